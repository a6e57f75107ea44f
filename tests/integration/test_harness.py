"""mini-SWE-agent, unchanged, against a real HTTP endpoint and a real sandbox, in both ways of running it."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from lightning_ray.config import HarnessConfig, SamplingConfig
from lightning_ray.harness.checks import check_harness
from lightning_ray.harness.command import run_command
from lightning_ray.harness.pool import WorkerPool
from lightning_ray.harness.spec import command_plan, mounts
from lightning_ray.proxy.endpoint import OpenRollout
from lightning_ray.sandbox.base import ExecResult, SandboxSpec
from lightning_ray.sandbox.bubblewrap import Bubblewrap
from tests.integration.scripted_proxy import Answer, ScriptedProxy

pytestmark = pytest.mark.asyncio(loop_scope="module")

TASK = "`add` in sums.py is wrong: {{not a template}}, é, \"quotes\", {task} and $HOME"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
COMMANDS = [
    "cat sums.py",
    None,  # a format error
    "no-such-command --at-all; echo on stderr >&2; exit 3",
    "echo before; sleep 30",  # runs into the environment's timeout
    "printf 'one\\ntwo'; echo $PAGER; pwd; id -un",
    "sed -i 's/a - b/a + b/' sums.py && git diff --stat",
    "python3 -c 'print(\"é\" * 3)' && head -c 20000 /dev/zero | tr '\\0' x",
    SUBMIT,
]
AGENT = {
    "system_template": "You fix bugs. {{system}} {{release}} {{machine}} {{node}} {{cwd}} {{timeout}}",
    "instance_template": "{{task}}\nStep limit {{step_limit}}.",
    "step_limit": 20, "cost_limit": 0.0,
}
ENVIRONMENT = {"cwd": "/testbed", "timeout": 1, "env": {"PAGER": "cat"}, "interpreter": ["/bin/sh", "-c"]}
"""`interpreter`: what mini-SWE-agent's local environment uses, so that the shell's own messages are the same."""


def settings(model_class: str) -> dict:
    return {"agent": AGENT, "environment": ENVIRONMENT,
            "model": {"model_class": model_class, "cost_tracking": "ignore_errors"}}


def script_for(model_class: str):
    def script(rollout, number):
        command = COMMANDS[number]
        if command is None:
            return Answer("I do not know.")
        if model_class == "litellm_textbased":
            return Answer(f"THOUGHT: next\n\n```mswea_bash_command\n{command}\n```")
        return Answer("next", command)
    return script


@pytest.fixture
def workspace(tmp_path) -> Path:
    path = tmp_path / "workspace"
    path.mkdir()
    (path / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    return path


@pytest_asyncio.fixture(loop_scope="module")
async def endpoint():
    proxies = []

    async def make(script) -> ScriptedProxy:
        proxy = ScriptedProxy(script)
        proxies.append(proxy)
        await proxy.start()
        return proxy

    yield make
    for proxy in proxies:
        await proxy.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory):
    pool = WorkerPool("lightning_ray.harness.mini_swe_agent:run", 1, tmp_path_factory.mktemp("workers"))
    await pool.start()
    yield pool
    await pool.stop()


def opened(name: str) -> OpenRollout:
    return OpenRollout(name, "train", SamplingConfig(), 0, 100)


async def as_python(proxy: ScriptedProxy, pool: WorkerPool, workspace: Path, model_class: str, **agent):
    """The result, the requests and the diff of a run in a warm worker process."""
    own = settings(model_class)
    own["agent"] = own["agent"] | agent
    sandbox = Bubblewrap(SandboxSpec("python", workspace))
    await sandbox.start()
    try:
        endpoint = await proxy.open(opened("python"))

        async def execute(command, cwd, timeout, env):
            return await sandbox.exec(command, timeout_s=timeout, env=env)

        result = await pool.run("python", {
            "task": {"problem_statement": TASK}, "base_url": endpoint.base_url, "api_key": "none", "model": "policy",
            "settings": own}, execute)
        return result, proxy.rollouts["python"].requests, await sandbox.diff()
    finally:
        await sandbox.stop()


def command_config(model_class: str) -> HarnessConfig:
    """`mini` as it is deployed: from a virtual environment, with a configuration file of its own."""
    config = settings(model_class)
    config["model"] = config["model"] | {"model_name": "openai/{model}", "model_kwargs": {
        "api_base": "{base_url}/v1", "api_key": "none", "drop_params": True, "timeout": 600}}
    config = yaml.safe_dump(config, allow_unicode=True)
    return HarnessConfig(
        kind="command",
        command=[f"{sys.prefix}/bin/mini", "-c", "mini.yaml", "-c", "/tmp/mini/rl.yaml", "-y", "--exit-immediately",
                 "-t", "{task}", "-o", "/tmp/mini/trajectory.json"],
        files={"/tmp/mini/rl.yaml": config},
        mounts={sys.prefix: sys.prefix, sys.base_prefix: sys.base_prefix},
        env={"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
             "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"},
        result={"path": "/tmp/mini/trajectory.json", "key": "info.exit_status", "ok": ["Submitted"]})


async def as_command(proxy: ScriptedProxy, workspace: Path, model_class: str):
    """The same of a run of `mini` inside the sandbox."""
    config = command_config(model_class)
    check_harness(config)
    sandbox = Bubblewrap(SandboxSpec("command", workspace, mounts=mounts(config)))
    await sandbox.start()
    try:
        await proxy.open(opened("command"))
        await sandbox.connect(partial(proxy.listen, "command"))
        result = await run_command(sandbox, command_plan(config, TASK, "policy"), 120, config.result)
        return result, proxy.rollouts["command"].requests, await sandbox.diff()
    finally:
        await sandbox.stop()


@pytest.mark.parametrize("model_class", ["litellm_textbased", "litellm", "litellm_response"])
async def test_python_and_command_harness_send_the_same_requests_for_the_same_answers(
        model_class, workspace, endpoint, pool):
    proxy = await endpoint(script_for(model_class))
    python, python_requests, python_diff = await as_python(proxy, pool, workspace, model_class)
    command, command_requests, command_diff = await as_command(proxy, workspace, model_class)
    assert (python.exit_status, python.ok) == ("Submitted", True), python
    assert (command.exit_status, command.ok) == ("Submitted", True), command
    assert len(python_requests) == len(COMMANDS)
    assert command_requests == python_requests
    assert python_diff == command_diff and "+    return a + b" in python_diff


TOO_LONG = ("This model's maximum context length is 9 tokens. However, your messages resulted in 10 tokens. Please "
            "reduce the length of the messages.")


def command(text: str) -> Answer:
    return Answer(f"```mswea_bash_command\n{text}\n```")


@pytest.mark.parametrize(("script", "agent", "end", "requests"), [
    (lambda rollout, number: command("true"), {"step_limit": 3}, "LimitsExceeded", 3),
    (lambda rollout, number: Answer("no command"), {}, "RepeatedFormatError", 3),
    (lambda rollout, number: command(SUBMIT + "; exit 1"), {"step_limit": 1}, "LimitsExceeded", 1),
    (lambda rollout, number: Answer(TOO_LONG, status=400, code="context_length_exceeded"), {},
     "ContextWindowExceededError", 1),
    (lambda rollout, number: Answer("no such endpoint", status=404, code="not_found"), {}, "NotFoundError", 1),
    (lambda rollout, number: Answer("its calls are used up", status=403, code="rollout_limit"), {}, "APIError", 1),
])
async def test_law8_how_mini_swe_agent_ends_without_submitting_is_data(
        script, agent, end, requests, workspace, endpoint, pool):
    result, sent, _ = await as_python(await endpoint(script), pool, workspace, "litellm_textbased", **agent)
    assert (result.exit_status, result.ok, result.endpoint_failed) == (end, False, False)
    assert len(sent) == requests


async def test_law8_an_endpoint_that_breaks_is_not_mini_swe_agents_fault(workspace, endpoint, pool):
    proxy = await endpoint(lambda rollout, number: Answer("ours", status=500))
    result, sent, _ = await as_python(proxy, pool, workspace, "litellm_textbased")
    assert (result.exit_status, result.ok, result.endpoint_failed) == ("InternalServerError", False, True)
    assert len(sent) == 3  # its SDK tried again


async def test_law4_a_connection_that_breaks_once_is_retried_by_the_sdk(workspace, endpoint, pool):
    proxy = await endpoint(lambda rollout, number: Answer(cut=True) if number == 0 else command(SUBMIT))
    result, sent, _ = await as_python(proxy, pool, workspace, "litellm_textbased")
    assert result.ok and len(sent) == 2 and sent[0] == sent[1]


async def test_mini_swe_agents_own_configuration_is_enough(workspace, endpoint, pool):
    proxy = await endpoint(lambda rollout, number: Answer("done", SUBMIT))
    opened_at = await proxy.open(opened("own"))

    async def execute(command, cwd, timeout, env):
        assert (cwd, timeout, env["PAGER"]) == ("/testbed", 30, "cat")
        return ExecResult("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\nby hand\n", 0)

    result = await pool.run("own", {"task": {"problem_statement": TASK}, "base_url": opened_at.base_url,
                                    "api_key": "none", "model": "policy", "settings": {}}, execute)
    assert (result.exit_status, result.ok) == ("Submitted", True)
    (request,) = proxy.rollouts["own"].requests
    assert request["messages"][1]["content"].startswith(f"Please solve this issue: {TASK}")
    assert request["tools"][0]["function"]["name"] == "bash"
