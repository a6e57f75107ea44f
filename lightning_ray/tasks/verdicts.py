"""What all graders share: a patch is let in and applied, a driver's words are told from the candidate's, and a reason
becomes a grade.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lightning_ray.config import RewardConfig
from lightning_ray.sandbox.base import Mount, Sandbox
from lightning_ray.tasks import patches
from lightning_ray.tasks.base import Grade, Task

Data = TypeVar("Data", bound=BaseModel)
APPLY_TIMEOUT_S = 30.0
NAMED = 5
"""Failed tests that a reason names; the report has all."""
EARLY_EXIT = "exit_before_the_end"


def named(what: str, names: Sequence[str]) -> str:
    """A reason that names a few and counts the others."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{what}: {', '.join(names[:NAMED])}{more}"


def messages(output: str, nonce: str) -> list[dict[str, Any]]:
    """What the driver said, in order; lines without the nonce, or that are not JSON objects, are not the driver's."""
    found = []
    for line in output.split("\n"):
        mark, _, text = line.partition(" ")
        if mark != nonce:
            continue
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(message, dict):
            found.append(message)
    return found


def grading_data(kind: type[Data], task: Task) -> Data:
    """`task.grading` as the grader understands it. ValueError, naming the task, where it does not fit."""
    try:
        return kind.model_validate(task.grading)
    except ValidationError as error:
        raise ValueError(f"task {task.instance_id}: grading: {error}") from error


class Grader(ABC):
    """Computes a reward from a patch, in a fresh sandbox over a pristine workspace. Raises `SandboxError` where the
    sandbox fails; everything that a candidate does is a verdict."""

    mounts: tuple[Mount, ...] = ()
    """What its sandbox must show besides the workspace."""
    files: Mapping[str, str] = {}
    """Enter once the patch is applied, over whatever is there. No patch may touch them."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config

    @property
    def hidden(self) -> set[str]:
        """Files that no patch may touch, whatever the solution touches."""
        return set(self.files)

    async def grade(self, task: Task, patch: str, sandbox: Sandbox) -> Grade:
        filtered = patches.filter_patch(patch, patches.touched(task.patch), self.hidden)
        decided = await self._let_in(patch, filtered, sandbox)
        if decided is not None:
            return self._finish(decided, filtered, {})
        if self.files:
            await sandbox.put({name: text.encode() for name, text in self.files.items()})
        return await self._judge(task, patch, filtered, sandbox)

    async def _let_in(self, patch: str, filtered: patches.Filtered, sandbox: Sandbox) -> str | None:
        """Applies the agent's patch, as far as it is let in, to the pristine workspace. The reason, where that alone
        decides: `empty_patch`, `patch_refused`, or `patch_rejected: ` with what git said."""
        if not patch.strip():
            return "empty_patch"
        if not filtered.paths:
            return "patch_refused"
        done = await sandbox.exec("git apply --whitespace=nowarn -", timeout_s=APPLY_TIMEOUT_S,
                                  stdin=filtered.patch.encode("utf-8", "surrogateescape"))
        if done.returncode == 0:
            return None
        return f"patch_rejected: {' '.join(done.output.split())[:300] or f'exit status {done.returncode}'}"

    @abstractmethod
    async def _judge(self, task: Task, patch: str, filtered: patches.Filtered, sandbox: Sandbox) -> Grade:
        """The grade of a patch that is applied, as far as it is let in."""

    def _finish(self, reason: str, filtered: patches.Filtered, report: dict[str, Any],
                suspicions: Sequence[str] = ()) -> Grade:
        return finish(reason, filtered, report, self._config, suspicions)


def finish(reason: str, filtered: patches.Filtered, report: dict[str, Any], config: RewardConfig,
           suspicions: Sequence[str] = ()) -> Grade:
    """The grade of a verdict. With `reward.on_suspicion: zero` a suspicious solution does not count as one.
    `suspicions`: those beside the patch's own."""
    suspicions = list(dict.fromkeys([*filtered.suspicions, *suspicions]))
    passed = reason == "passed"
    if passed and suspicions and config.on_suspicion == "zero":
        passed, reason = False, f"suspicious: {suspicions[0]}"
    left_out = [str(refusal) for refusal in filtered.refusals]
    report = {**report, "left_out": left_out} if left_out else report
    return Grade(passed=passed, reward=float(passed), reason=reason, suspicions=suspicions, report=report)
