"""A command harness: any program, run inside the sandbox, for one rollout.

The program finds its endpoint by the variables of `spec.endpoint_environment`: at `http://127.0.0.1:8080` where the
sandbox has a network namespace on this machine, else where `Sandbox.connect` says. Files are written first, outside the
workspace. How it ended comes from `harness.result` (a key in a JSON file that the program writes) where that is given,
else from its exit status.
"""

import json
import posixpath
import shlex
from typing import Any

from lightning_ray.config import HarnessResultFile
from lightning_ray.harness.spec import CommandPlan, HarnessResult
from lightning_ray.sandbox.base import Sandbox, SandboxDied, SandboxError

LOG_CHARS = 4000
SETUP_TIMEOUT_S = 30.0


async def run_command(sandbox: Sandbox, plan: CommandPlan, timeout_s: float,
                      result_file: HarnessResultFile | None) -> HarnessResult:
    """Write the files, run the program, read how it ended. Raises `SandboxError`."""
    for path, content in plan.files.items():
        await _write(sandbox, path, content)
    run = await sandbox.exec(shlex.join(plan.argv), timeout_s=timeout_s, env=plan.env)
    log = run.output[-LOG_CHARS:]
    if run.timed_out:
        return HarnessResult("Timeout", ok=False, detail=f"after {timeout_s:g} s", log=log)
    if result_file is None or run.returncode != 0:
        return HarnessResult(f"exit code {run.returncode}", ok=run.returncode == 0, log=log)
    try:
        content = await sandbox.get(result_file.path)
    except SandboxDied:
        raise
    except (FileNotFoundError, SandboxError):
        content = None
    return parse_result(result_file, content, log)


def parse_result(result_file: HarnessResultFile, content: bytes | None, log: str) -> HarnessResult:
    """The exit status in the program's own result file. A file without it is a failure of the harness."""
    if content is None:
        detail = f"{result_file.path} was not written, or cannot be read"
        return HarnessResult("no result file", ok=False, detail=detail, log=log)
    try:
        value: Any = json.loads(content)
        for key in result_file.key.split("."):
            value = value[key]
    except (ValueError, KeyError, TypeError) as error:
        detail = f"{result_file.path} holds no {result_file.key} ({type(error).__name__})"
        return HarnessResult("unreadable result file", ok=False, detail=detail, log=log)
    return HarnessResult(str(value), ok=str(value) in result_file.ok, log=log)


async def _write(sandbox: Sandbox, path: str, content: str) -> None:
    directory = posixpath.dirname(path)
    written = await sandbox.exec(f"mkdir -p {shlex.quote(directory)} && cat > {shlex.quote(path)}",
                                 timeout_s=SETUP_TIMEOUT_S, stdin=content.encode())
    if written.returncode != 0:
        raise SandboxError(f"harness.files: {path} could not be written: {written.output.strip()}")
