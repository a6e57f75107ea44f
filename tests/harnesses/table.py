"""The harnesses of the suite: how each is installed, how it is told its endpoint, and in which words the scripted
policy speaks to it. `{bin}` is the directory of its programs, the other placeholders are those of `harness.command` in
a configuration (`lightning_ray/config/`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ray.sandbox.base import WORKSPACE
from tests.harnesses.install import Install, Npm, Present, Venv

HERE = Path(__file__).parent
READ, MEND = "cat sums.py", "sed -i 's/a - b/a + b/' sums.py"
"""What the policy does; then it says that it is done."""
DONE = "I am done: add returns the sum now."

Turn = str | dict[str, dict[str, Any]]
"""What the policy says: a text, or a call of the first of these tools that the prompt offers, with its arguments."""


def by_shell(last: Turn = DONE, **tools: Callable[[str], dict[str, Any]]) -> list[Turn]:
    """Read, mend, be done, by a tool that runs shell commands: name -> its arguments for a command."""
    return [{name: arguments(command) for name, arguments in tools.items()} for command in (READ, MEND)] + [last]


@dataclass(frozen=True, slots=True)
class Entry:
    install: Install
    command: list[str]
    dialect: str
    turns: list[Turn]
    """A harness whose turns are all texts offers no tools."""
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    result: dict[str, Any] | None = None


def plain(command: str) -> dict[str, Any]:
    return {"command": command}


def described(command: str) -> dict[str, Any]:
    return {"command": command, "description": "work on sums.py"}


CODEX = """\
model = "{model}"
model_provider = "trained"
[model_providers.trained]
name = "trained"
base_url = "{base_url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""

OPENCODE = """\
{"model": "trained/{model}", "share": "disabled", "autoupdate": false, "permission": "allow",
 "provider": {"trained": {"npm": "@ai-sdk/openai-compatible", "name": "trained",
   "options": {"baseURL": "{base_url}/v1", "apiKey": "none"}, "models": {"{model}": {"name": "{model}"}}}}}
"""

MINI = """\
agent: {mode: yolo, confirm_exit: false, step_limit: 20, cost_limit: 0}
environment: {environment_class: local, timeout: 60}
model:
  model_class: litellm
  model_name: openai/{model}
  cost_tracking: ignore_errors
  model_kwargs: {api_base: "{base_url}/v1", api_key: none, drop_params: true, timeout: 600}
"""

BLOCK = """\
sums.py
```python
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE
```
"""

ENTRIES = {
    "mini-SWE-agent": Entry(
        install=Present("mini-swe-agent"),
        command=["{bin}/mini", "-c", "mini.yaml", "-c", "/tmp/mini/rl.yaml", "-y", "--exit-immediately", "-t", "{task}",
                 "-o", "/tmp/mini/trajectory.json"],
        dialect="chat",
        env={"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
             "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"},
        files={"/tmp/mini/rl.yaml": MINI},
        result={"path": "/tmp/mini/trajectory.json", "key": "info.exit_status", "ok": ["Submitted"]},
        turns=by_shell({"bash": plain("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")}, bash=plain),
    ),
    "Claude Code": Entry(
        install=Npm(("@anthropic-ai/claude-code@2.1.332",)),
        command=["{bin}/claude", "-p", "{task}", "--dangerously-skip-permissions", "--output-format", "json",
                 "--model", "{model}"],
        dialect="messages",
        env={"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
             "ANTHROPIC_SMALL_FAST_MODEL": "{model}"},
        turns=by_shell(Bash=described),
    ),
    "Codex": Entry(
        install=Npm(("@openai/codex@0.171.0",)),
        command=["{bin}/codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--json",
                 "{task}"],
        dialect="responses",
        env={"CODEX_HOME": "/tmp/codex"},
        files={"/tmp/codex/config.toml": CODEX},
        turns=by_shell(exec_command=lambda command: {"cmd": command}, shell_command=plain),
    ),
    "Qwen Code": Entry(
        install=Npm(("@qwen-code/qwen-code@0.24.4",)),
        command=["{bin}/qwen", "-p", "{task}", "--yolo", "--auth-type", "openai"],
        dialect="chat",
        env={"OPENAI_MODEL": "{model}"},
        turns=[{"read_file": {"file_path": f"{WORKSPACE}/sums.py"}},
               {"edit": {"file_path": f"{WORKSPACE}/sums.py", "old_string": "a - b", "new_string": "a + b"}}, DONE],
    ),
    "opencode": Entry(
        install=Npm(("opencode-ai@1.18.33",)),
        command=["{bin}/opencode", "run", "{task}"],
        dialect="chat",
        env={"OPENCODE_CONFIG": "/tmp/opencode/opencode.json", "OPENCODE_DISABLE_AUTOUPDATE": "1",
             "OPENCODE_DISABLE_MODELS_FETCH": "1", "XDG_DATA_HOME": "/tmp/opencode/data"},
        files={"/tmp/opencode/opencode.json": OPENCODE},
        turns=by_shell(bash=described),
    ),
    "aider": Entry(
        install=Venv(("aider-chat==0.86.2",)),
        command=["{bin}/aider", "--model", "openai/{model}", "--yes-always", "--no-check-update", "--no-analytics",
                 "--no-show-model-warnings", "--edit-format", "diff", "--message", "{task}", "sums.py"],
        dialect="chat",
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        turns=[BLOCK],
    ),
    "openai-agents": Entry(
        install=Present("openai-agents"),
        command=["{bin}/python", "/tmp/agent/main.py", "{task}", "{model}"],
        dialect="responses",
        env={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
        files={"/tmp/agent/main.py": (HERE / "openai_agents.py").read_text()},
        turns=by_shell(bash=plain),
    ),
    "LangGraph": Entry(
        install=Venv(("langgraph==1.2.24", "langchain-openai==1.7.4")),
        command=["{bin}/python", "/tmp/agent/main.py", "{task}", "{model}"],
        dialect="chat",
        files={"/tmp/agent/main.py": (HERE / "langgraph_agent.py").read_text()},
        turns=by_shell(bash=plain),
    ),
    "OpenHands SDK": Entry(
        install=Venv(("openhands-sdk==1.58.2", "openhands-tools==1.58.2"), python="3.12"),
        command=["{bin}/python", "/tmp/agent/main.py", "{task}", "{model}"],
        dialect="chat",
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        files={"/tmp/agent/main.py": (HERE / "openhands_agent.py").read_text()},
        turns=by_shell(terminal=plain),
    ),
}
