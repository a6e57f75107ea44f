"""Runs a package's own test suite in a sandbox and says what became of each test.

The code is trusted as far as its publisher is, and is isolated all the same. pytest is this installation's own, mounted
read-only, with the same options as in grading (`tasks/swe.py`), so that a test that passes here passes there.
"""

import json
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path

from lightning_ray.sandbox.base import Sandbox
from lightning_ray.tasks.pytest_mounts import RUNNER
from lightning_ray.tasks.verdicts import messages

DRIVER = (Path(__file__).parent / "suite_driver.py").read_text()


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """`tests`: id -> outcome (`passed`, `failed`, `skipped`); one that failed in setup or teardown is `failed`, too."""

    tests: dict[str, str]
    seconds: dict[str, float]
    shown: dict[str, str]
    """Of failed tests: the test's own lines with what pytest says about them; no line of the code under test."""
    ended: bool
    """The session came to its end in time."""
    output: str

    def passed(self) -> set[str]:
        return {name for name, outcome in self.tests.items() if outcome == "passed"}


async def run_suite(sandbox: Sandbox, files: list[str], *, conftest: bool, paths: list[str], timeout_s: float
                    ) -> SuiteRun:
    """Runs the test files (paths in the workspace). Raises `SandboxError` where the sandbox fails."""
    nonce = secrets.token_hex(8)
    order = {"nonce": nonce, "runner": RUNNER, "files": files, "paths": paths, "conftest": conftest}
    command = f"exec python3 -I -c {shlex.quote(DRIVER)}"
    done = await sandbox.exec(command, timeout_s=timeout_s, stdin=json.dumps(order).encode())
    found = messages(done.output, nonce)
    tests = {each["id"]: each for each in found if "id" in each}
    return SuiteRun(
        tests={name: each["outcome"] for name, each in tests.items()},
        seconds={name: each["seconds"] for name, each in tests.items()},
        shown={name: each["shown"] for name, each in tests.items() if each["shown"]},
        ended=bool(found) and "ended" in found[-1] and not done.timed_out, output=done.output[-2000:])
