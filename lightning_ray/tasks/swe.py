"""The `swe` grader: FAIL_TO_PASS and PASS_TO_PASS by pytest, on a pristine checkout with the agent's filtered patch.

`task.grading`, all optional: `files` (path -> text: test files that enter only now, over whatever is there), `python`
(the interpreter inside, Python 3.10 or later), `paths` (folders that imports are looked up in), `conftest` (load the
task's own conftest.py files), `config` (the task's own pytest configuration file), `plugins` (installed pytest plugins
that the tests need), `runs` (how often tests that failed are tried; where two runs differ the reason is `flaky`).
`conftest` and `config` are the task's own because no patch may touch such files, unless the task's solution does.

pytest is this installation's own, mounted read-only. A required test passes when it was reported once and its setup,
call and teardown all passed; skipped and expected failures are none. Every required test must pass and the session
must have come to its end. The candidate shares a process with the tests, so a determined one can forge its report:
`pytest_driver.py` says what is looked for. Where that is not enough, grade by `cases`.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lightning_ray.config import RewardConfig
from lightning_ray.sandbox.base import ExecResult, Sandbox
from lightning_ray.tasks import patches
from lightning_ray.tasks.base import Grade, Task
from lightning_ray.tasks.pytest_run import run_pytest, runner_mounts
from lightning_ray.tasks.verdicts import EARLY_EXIT, Grader, grading_data, named


class SweGrading(BaseModel):
    """`task.grading` of the `swe` grader."""

    model_config = ConfigDict(extra="forbid")

    files: dict[str, str] = {}
    python: str = "python3"
    paths: list[str] = [".", "src"]
    conftest: bool = False
    config: str | None = None
    plugins: list[str] = []
    runs: int = Field(default=1, ge=1, le=5)


class SweGrader(Grader):
    """See the module."""

    def __init__(self, task: Task, config: RewardConfig) -> None:
        super().__init__(config)
        self._grading = grading_data(SweGrading, task)
        self.files = self._grading.files
        self._required = list(dict.fromkeys([*task.FAIL_TO_PASS, *task.PASS_TO_PASS]))
        if not self._required:
            raise ValueError(f"task {task.instance_id}: FAIL_TO_PASS and PASS_TO_PASS name no test")
        self._tests = list(dict.fromkeys(name.partition("::")[0] for name in self._required))
        if odd := [name for name in self._tests if not name.endswith(".py") or name.startswith(("/", "-"))]:
            raise ValueError(f"task {task.instance_id}: {odd[0]!r}: test ids must be `path/test_file.py::name`")
        self.mounts = runner_mounts()

    @property
    def hidden(self) -> set[str]:
        return {*self.files, *self._tests}

    async def _judge(self, task: Task, patch: str, filtered: patches.Filtered, sandbox: Sandbox) -> Grade:
        grading = self._grading
        runs: list[tuple[str, dict[str, Any]]] = []
        suspicions: list[str] = []
        while len(runs) < grading.runs and (not runs or runs[-1][0].startswith("tests_failed")):
            done, said = await run_pytest(
                sandbox, self._tests, tests=self._required, added=added_lines(filtered.patch), paths=grading.paths,
                conftest=grading.conftest, config=grading.config, plugins=grading.plugins, python=grading.python,
                timeout_s=self._config.timeout_s)
            reason, report, odd = verdict(self._required, done, said)
            runs.append((reason, report))
            suspicions += odd
        reason, report = judge_runs(runs)
        return self._finish(reason, filtered, report, suspicions)


def added_lines(patch: str) -> dict[str, list[int]]:
    """The line numbers, in the new files, of the lines that a (filtered) patch adds."""
    found: dict[str, list[int]] = {}
    for section in patches.sections(patch):
        lines = found.setdefault(section.path, [])
        number = 0
        for line in section.lines:
            if match := patches.HUNK.match(line):
                number = int(match[2])
            elif number and line.startswith("+"):
                lines.append(number)
                number += 1
            elif number and line.startswith(" "):
                number += 1
    return found


def verdict(required: list[str], done: ExecResult,
            said: list[dict[str, Any]]) -> tuple[str, dict[str, Any], list[str]]:
    """Reason, report and suspicions of one run. RuntimeError where the test runner itself did not come up: nothing of
    the candidate's has run then."""
    tests = dict.fromkeys(required, "not_run")
    details: dict[str, str] = {}
    suspicions: list[str] = []
    errors: dict[str, str] = {}
    for message in said:
        name, outcome = message.get("id"), message.get("outcome")
        if isinstance(name, str) and name in tests and isinstance(outcome, str):
            tests[name] = outcome if tests[name] == "not_run" else "reported_twice"
            if message.get("detail"):
                details[name] = str(message["detail"])
        elif "collect_error" in message:
            errors[str(message["collect_error"])] = str(message.get("detail"))
        elif "suspicion" in message:
            suspicions.append(str(message["suspicion"]))
    report: dict[str, Any] = {"tests": tests}
    report |= {key: value for key, value in (("details", details), ("collect_errors", errors)) if value}
    if done.timed_out:
        return "timeout", report, suspicions
    if done.truncated:
        return "too_much_output", report, suspicions
    if not said:
        raise RuntimeError(f"the test runner does not start: {done.output[-500:].strip()}")
    if "ended" not in said[-1]:
        return "ended_early", report, [*suspicions, EARLY_EXIT]
    failed = [name for name, outcome in tests.items() if outcome != "passed"]
    return (named("tests_failed", failed) if failed else "passed"), report, suspicions


def judge_runs(runs: list[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """The verdict over one run or several. Tests whose outcomes differ make it `flaky`: neither passed nor failed."""
    reason, report = runs[-1]
    outcomes = [run["tests"] for _, run in runs]
    odd = [name for name in report["tests"] if len({tests[name] for tests in outcomes}) > 1]
    if odd:
        return named("flaky", odd), report | {"runs": outcomes}
    return reason, report
