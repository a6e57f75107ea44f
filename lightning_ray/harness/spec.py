"""What a harness is told, and what it leaves behind: plain data and pure translation.

`command_plan` turns `HarnessConfig` and one task into a command line, an environment and files. Placeholders `{task}`,
`{base_url}` and `{model}` are filled in once: text that came in through a placeholder is never searched for
placeholders again.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_ray.config import ConfigError, HarnessConfig
from lightning_ray.sandbox.base import ENDPOINT_URL, Mount
from lightning_ray.tasks.base import Task

API_KEY = "none"
"""What SDKs get as a key because they want one. The endpoint is the identity; this is no secret."""

_PLACEHOLDER = re.compile(r"(?<!\{)\{(task|base_url|model)\}(?!\})")
"""Not `{{task}}`: that is a template of the harness's own."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """One rollout to run."""

    rollout_id: str
    group_id: str
    task: Task
    mode: Literal["train", "evaluate"]
    seed: int
    temperature: float
    lost: int = 0
    """How often it was started before, on a runner that died with it."""

    def attempt(self, number: int) -> str:
        """What the sandbox and the endpoint of attempt `number` (from 0) are called: no two attempts at a rollout
        share a name, on whichever runner they were made."""
        if self.lost:
            return f"{self.rollout_id}.{self.lost}-{number}"
        return f"{self.rollout_id}.{number}" if number else self.rollout_id


def rollout_seed(seed: int, rollout_id: str) -> int:
    """31 bits: each rollout samples by a seed of its own, else all members of a group would say the same."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{rollout_id}".encode(), digest_size=4).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class HarnessResult:
    """How the harness ended. Not `ok` is data: the rollout ends `harness_failed` with `exit_status` as its reason."""

    exit_status: str
    """The harness's own word (`Submitted`, `LimitsExceeded`), or `exit code N`."""
    ok: bool
    """Whether the patch is worth grading."""
    detail: str = ""
    """One line about a failure."""
    log: str = ""
    """The end of what the harness printed."""
    endpoint_failed: bool = False
    """It ended because its endpoint could not be reached or broke (5xx): then it is not to blame, and runs again."""

    @classmethod
    def from_dict(cls, values: Any) -> "HarnessResult":
        """What a Python harness returned. ValueError names what is wrong with it."""
        if not isinstance(values, dict):
            raise ValueError(f"a Python harness returns a dict with exit_status and ok, not {type(values).__name__}")
        missing = {"exit_status", "ok"} - values.keys()
        if missing:
            raise ValueError(f"the Python harness's result lacks {', '.join(sorted(missing))}")
        return cls(str(values["exit_status"]), bool(values["ok"]), str(values.get("detail", "")),
                   str(values.get("log", "")), bool(values.get("endpoint_failed", False)))


@dataclass(frozen=True, slots=True)
class CommandPlan:
    """A command harness for one task."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Absolute path inside the sandbox -> content."""


def fill(text: str, values: dict[str, str]) -> str:
    """`text` with the placeholders that `values` names filled in, in one pass."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


def endpoint_environment(base_url: str, api_key: str = API_KEY) -> dict[str, str]:
    """The variables by which OpenAI and Anthropic SDKs find their endpoint. `base_url` has no `/v1`."""
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_AUTH_TOKEN": api_key,
    }


def command_plan(config: HarnessConfig, problem_statement: str, model: str,
                 base_url: str = ENDPOINT_URL) -> CommandPlan:
    """What to run in the sandbox for one task. `harness.env` wins over the endpoint's variables."""
    values = {"task": problem_statement, "base_url": base_url, "model": model}
    env = endpoint_environment(base_url) | {name: fill(value, values) for name, value in config.env.items()}
    return CommandPlan(
        argv=tuple(fill(part, values) for part in config.command),
        env=env,
        files={path: fill(content, values) for path, content in config.files.items()},
    )


def mounts(config: HarnessConfig) -> tuple[Mount, ...]:
    return tuple(Mount(Path(source).expanduser(), target) for source, target in config.mounts.items())


def split_entry(entry: str) -> tuple[str, str]:
    """`module:function` in its parts, or ConfigError."""
    module, _, function = entry.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"harness.entry: {entry!r} is not of the form module:function, as package.module:run")
    return module, function
