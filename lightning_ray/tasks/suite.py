"""Runs a package's own test suite in a sandbox and says what became of each test. The code is trusted as far as its
publisher is, and is isolated all the same.
"""

from dataclasses import dataclass

from lightning_ray.sandbox.base import Sandbox
from lightning_ray.tasks.pytest_run import run_pytest


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """`tests`: id -> outcome (`passed`, `failed`, `skipped`, ...); one that failed in setup or teardown is `failed`."""

    tests: dict[str, str]
    seconds: dict[str, float]
    shown: dict[str, str]
    """Of failed tests: the test's own lines with what pytest says about them; no line of the code under test."""
    ended: bool
    """The session came to its end in time."""
    output: str
    """What kept tests from running, where something did."""

    def passed(self) -> set[str]:
        return {name for name, outcome in self.tests.items() if outcome == "passed"}


async def run_suite(sandbox: Sandbox, files: list[str], *, conftest: bool, paths: list[str], timeout_s: float
                    ) -> SuiteRun:
    """Runs the test files (paths in the workspace). Raises `SandboxError` where the sandbox fails."""
    done, said = await run_pytest(sandbox, files, conftest=conftest, paths=paths, timeout_s=timeout_s)
    tests = {each["id"]: each for each in said if "id" in each}
    errors = [f"{each['collect_error']}: {each['detail']}" for each in said if "collect_error" in each]
    return SuiteRun(
        tests={name: each["outcome"] for name, each in tests.items()},
        seconds={name: each["seconds"] for name, each in tests.items()},
        shown={name: each["shown"] for name, each in tests.items() if each["outcome"] == "failed"},
        ended=bool(said) and "ended" in said[-1] and not done.timed_out,
        output="\n".join([*errors, done.output if not said else ""])[-2000:])
