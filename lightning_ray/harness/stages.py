"""Decisions of the runner, without clock, task or client: what failed, whether it is run again, how a rollout ended.

A failure is typed by where it arose. `task` and `harness` are data: the task is broken for everybody, or the policy and
its harness did badly. `sandbox`, `proxy`, `grader` and `infra` are ours: the attempt is thrown away and the rollout
runs again, a bounded number of times. A failure while grading only repeats the grading: the agent's patch is kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_ray.harness.spec import HarnessResult, RolloutSpec
from lightning_ray.proxy.endpoint import Status
from lightning_ray.sandbox.base import SandboxError
from lightning_ray.tasks.base import Grade
from lightning_ray.trajectory.call import Call, End, Trajectory

Kind = Literal["task", "harness", "sandbox", "proxy", "grader", "infra"]
Stage = Literal["init", "run", "grade"]

DATA: frozenset[Kind] = frozenset({"task", "harness"})
EMPTY_PATCH = "empty_patch"
RUNNER_DIED = "infra: its runner died"
LOG_CHARS = 2000
"""How much of the harness's log a trajectory keeps."""


@dataclass(frozen=True, slots=True)
class Failure:
    kind: Kind
    stage: Stage
    reason: str

    @property
    def is_data(self) -> bool:
        return self.kind in DATA

    def __str__(self) -> str:
        return self.reason if self.kind == "harness" else f"{self.kind}: {self.reason}"


class StageFailed(Exception):
    """Carries a `Failure` out of a stage."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@contextmanager
def blamed_on(kind: Kind, stage: Stage) -> Iterator[None]:
    """Any error inside becomes a failure of `kind`, a `SandboxError` one of what it blames; a typed one stays."""
    try:
        yield
    except StageFailed:
        raise
    except SandboxError as error:
        raise StageFailed(Failure(error.blame, stage, describe(error))) from error
    except Exception as error:
        raise StageFailed(Failure(kind, stage, describe(error))) from error


@contextmanager
def reading_task(stage: Stage) -> Iterator[None]:
    """A ValueError inside says that the task itself is broken; any other error is ours."""
    with blamed_on("infra", stage):
        try:
            yield
        except ValueError as error:
            raise StageFailed(Failure("task", stage, str(error))) from error


def describe(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(slots=True)
class Attempt:
    """What one attempt at a rollout came to."""

    calls: list[Call] = field(default_factory=list)
    result: HarnessResult | None = None
    patch: str = ""
    """As the sandbox gave it: bytes that are no UTF-8 are surrogate escapes, which the record replaces."""
    grade: Grade | None = None
    failure: Failure | None = None
    timings: dict[str, float] = field(default_factory=dict)
    endpoint: Status = field(default_factory=Status)
    """Looked at where the harness failed."""

    @property
    def tokens_sampled(self) -> int:
        return sum(len(call.sampled_ids) for call in self.calls)


def judge_run(result: HarnessResult, endpoint: Status) -> Failure | None:
    """What the end of RUN says. A harness that failed because its endpoint was away, or after the proxy failed on some
    of its requests, is not to blame. One that was refused its next call is told by the limit that it reached."""
    if result.ok:
        return None
    reason = f"{result.exit_status}: {result.detail}" if result.detail else result.exit_status
    if result.endpoint_failed:
        return Failure("proxy", "run", f"the endpoint failed: {reason}")
    if endpoint.faults:
        return Failure("proxy", "run",
                       f"the proxy failed on {endpoint.faults} requests, then the harness ended: {reason}")
    if endpoint.limit:
        reason = f"{endpoint.limit} used up, then the harness ended: {reason}"
    return Failure("harness", "run", reason)


def again(failure: Failure | None, failures_before: int, retries: int) -> bool:
    """Whether the whole rollout runs again. `failures_before`: attempts at it that failed for reasons of ours."""
    return (failure is not None and not failure.is_data and failure.stage != "grade" and failures_before < retries)


def end_of(attempt: Attempt) -> End:
    if attempt.failure is None:
        return "graded"
    return "harness_failed" if attempt.failure.is_data else "infra_failed"


def empty_patch() -> Grade:
    """The grade of an agent that changed nothing: no sandbox is needed to know it."""
    return Grade(passed=False, reward=0.0, reason=EMPTY_PATCH)


def trajectory(spec: RolloutSpec, attempts: Sequence[Attempt], notes: dict[str, Any]) -> Trajectory:
    """The rollout's record: its last attempt, and an account of those that were thrown away.

    Notes: `attempts` (how many, on all runners), `failures` (one line for each that was thrown away), `exit_status`,
    `harness_log`, `grade` (the grader's report), and what `notes` brings.
    """
    last = attempts[-1]
    end = end_of(last)
    grade = last.grade if end == "graded" else None
    notes = notes | {
        "attempts": spec.lost + len(attempts),
        "failures": [RUNNER_DIED] * spec.lost + [str(attempt.failure) for attempt in attempts[:-1]],
    }
    if last.result is not None:
        notes |= {"exit_status": last.result.exit_status, "harness_log": last.result.log[-LOG_CHARS:]}
    if grade is not None:
        notes["grade"] = grade.report
    return Trajectory(
        rollout_id=spec.rollout_id,
        group_id=spec.group_id,
        task_id=spec.task.instance_id,
        calls=last.calls,
        end=end,
        reason=grade.reason if grade is not None else str(last.failure),
        reward=grade.reward if grade is not None else 0.0,
        passed=grade is not None and grade.passed,
        patch=last.patch.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
        suspicions=list(grade.suspicions) if grade is not None else [],
        discarded_tokens=sum(attempt.tokens_sampled for attempt in attempts[:-1]),
        timings=last.timings,
        notes=notes,
    )
