"""The `cases` grader: function calls whose results are compared outside the candidate's process.

`task.grading` is `{"module": "shop.py", "cases": {"tests::total": {"call": "total", "args": [3, 5], "kwargs":
{}, "expected": 8}}}`, and the ids in FAIL_TO_PASS and PASS_TO_PASS are keys of `cases`. Expected values never enter the
sandbox: results come out as JSON and are compared here, types included (`True` is not 1, 1 is not 1.0; a tuple
arrives as a list).
"""

import json
import secrets
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lightning_ray.config import RewardConfig
from lightning_ray.sandbox.base import ExecResult, Sandbox
from lightning_ray.tasks.base import Grade, Task
from lightning_ray.tasks.patches import Filtered
from lightning_ray.tasks.verdicts import EARLY_EXIT, Grader, grading_data, messages, named

DRIVER = (Path(__file__).parent / "driver.py").read_text()


class Case(BaseModel):
    """One function call and its result."""

    model_config = ConfigDict(extra="forbid")

    call: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    expected: Any


class CasesGrading(BaseModel):
    """`task.grading` of the `cases` grader."""

    model_config = ConfigDict(extra="forbid")

    module: str
    """Path of the module in the workspace."""
    cases: dict[str, Case] = Field(min_length=1)


def same(value: Any, expected: Any) -> bool:
    """Equality of JSON values, types included."""
    if type(value) is not type(expected):
        return False
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in value)
    if isinstance(value, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    return value == expected


def verdict(cases: dict[str, Case], required: list[str], said: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Reason (`passed`, or why not) and report, from what the driver said. Every required case must have been answered
    exactly once, rightly, and the session must have come to its end."""
    report: dict[str, Any] = {"tests": dict.fromkeys(required, "not_run")}
    for message in said:
        if "import_error" in message:
            report["import_error"] = message["import_error"]
            return f"import_failed: {message['import_error']}", report
    for message in said:
        name = message.get("id")
        if not isinstance(name, str) or name not in report["tests"]:
            continue
        if report["tests"][name] != "not_run":
            report["tests"][name] = "answered_twice"
        elif "error" in message:
            report["tests"][name] = f"error: {message['error']}"
        else:
            right = "value" in message and same(message["value"], cases[name].expected)
            report["tests"][name] = "passed" if right else "wrong_result"
    if not said or said[-1] != {"ended": True}:
        return "ended_early", report
    failed = [name for name, outcome in report["tests"].items() if outcome != "passed"]
    return (named("tests_failed", failed) if failed else "passed"), report


class CasesGrader(Grader):
    """See the module."""

    def __init__(self, task: Task, config: RewardConfig) -> None:
        super().__init__(config)
        self._grading = grading_data(CasesGrading, task)
        self._required = [*task.FAIL_TO_PASS, *task.PASS_TO_PASS]
        unknown = [name for name in self._required if name not in self._grading.cases]
        if unknown or not self._required:
            raise ValueError(
                f"task {task.instance_id}: FAIL_TO_PASS and PASS_TO_PASS must name cases in grading.cases; "
                f"{f'{unknown[0]!r} is none' if unknown else 'they name none'}"
            )
        if not self._grading.module.endswith(".py"):
            raise ValueError(f"task {task.instance_id}: grading.module must be the path of a .py file")

    async def _judge(self, task: Task, patch: str, filtered: Filtered, sandbox: Sandbox) -> Grade:
        nonce = secrets.token_hex(16)
        done = await self._run(nonce, sandbox)
        if done.timed_out:
            return self._finish("timeout", filtered, {"timeout_s": self._config.timeout_s})
        reason, report = verdict(self._grading.cases, self._required, messages(done.output, nonce))
        return self._finish(reason, filtered, report, [EARLY_EXIT] if reason == "ended_early" else [])

    async def _run(self, nonce: str, sandbox: Sandbox) -> ExecResult:
        calls = [
            [name, case.call, case.args, case.kwargs]
            for name, case in ((name, self._grading.cases[name]) for name in dict.fromkeys(self._required))
        ]
        module = ".".join(PurePosixPath(self._grading.module).with_suffix("").parts)
        order = {"nonce": nonce, "module": module, "calls": calls}
        command = f"exec python3 -I -S -c {shlex.quote(DRIVER)}"
        return await sandbox.exec(command, timeout_s=self._config.timeout_s, stdin=json.dumps(order).encode())
