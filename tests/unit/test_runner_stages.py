"""harness/stages.py: which failures are data, which are run again, and what a trajectory says of them (law 8)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.harness import stages
from lightning_ray.harness.spec import HarnessResult, RolloutSpec
from lightning_ray.harness.stages import Attempt, Failure, StageFailed
from lightning_ray.proxy.endpoint import Status
from lightning_ray.sandbox.base import LimitExceeded, PatchUnavailable, SandboxDied, SandboxError
from lightning_ray.tasks.base import Grade, Task
from lightning_ray.trajectory.call import Call

SPEC = RolloutSpec("r1", "g1", Task(instance_id="t1", problem_statement="fix it"), "train", seed=1, temperature=1.0)
KINDS = ["task", "harness", "sandbox", "proxy", "grader", "infra"]


def call(tokens: int, finish_reason: str = "stop", index: int = 0) -> Call:
    return Call(index, np.zeros(3, np.int32), np.zeros(tokens, np.int32), np.zeros(tokens, np.float32),
                np.zeros(tokens, np.int32), finish_reason)


@pytest.mark.parametrize("kind", KINDS)
def test_law8_failures_of_task_and_harness_are_data_all_others_are_run_again(kind):
    failure = Failure(kind, "run", "x")
    is_data = kind in ("task", "harness")
    assert failure.is_data == is_data
    assert stages.again(failure, 0, retries=2) == (not is_data)
    assert stages.end_of(Attempt(failure=failure)) == ("harness_failed" if is_data else "infra_failed")


@given(st.sampled_from(KINDS), st.integers(0, 5))
def test_law8_retries_are_bounded(kind, retries):
    failure = Failure(kind, "run", "x")
    attempts = 1
    while stages.again(failure, attempts - 1, retries):
        attempts += 1
    assert attempts == (1 if failure.is_data else retries + 1)


def test_a_failure_while_grading_does_not_run_the_agent_again():
    assert not stages.again(Failure("sandbox", "grade", "x"), 0, retries=2)
    assert not stages.again(None, 0, retries=2)


def test_law8_a_harness_that_failed_after_the_proxy_failed_is_not_to_blame():
    failed = HarnessResult("exit code 1", ok=False)
    assert stages.judge_run(failed, Status(faults=1)) == Failure(
        "proxy", "run", "the proxy failed on 1 requests, then the harness ended: exit code 1")
    away = HarnessResult("InternalServerError", ok=False, endpoint_failed=True)
    assert stages.judge_run(away, Status()).kind == "proxy"
    assert stages.judge_run(failed, Status()) == Failure("harness", "run", "exit code 1")
    assert stages.judge_run(failed, Status(limit="harness.max_calls (3)")) == Failure(
        "harness", "run", "harness.max_calls (3) used up, then the harness ended: exit code 1")
    assert stages.judge_run(HarnessResult("Submitted", ok=True), Status(faults=1)) is None


def test_the_first_blame_stays():
    with pytest.raises(StageFailed) as raised, stages.blamed_on("infra", "run"), stages.blamed_on("sandbox", "init"):
        raise OSError(28, "No space left on device")
    assert raised.value.failure == Failure("sandbox", "init", "OSError: [Errno 28] No space left on device")


def test_cancellation_is_never_blamed_on_anybody():
    with pytest.raises(KeyboardInterrupt), stages.blamed_on("infra", "run"):
        raise KeyboardInterrupt


def test_trajectory_of_a_graded_rollout():
    grade = Grade(passed=True, reward=1.0, reason="passed", suspicions=["odd"], report={"cases": 3})
    attempt = Attempt([call(4)], HarnessResult("Submitted", ok=True, log="bye"), "diff", grade, None, {"run": 1.5})
    record = stages.trajectory(SPEC, [attempt], {"limits": "v2"})
    assert (record.end, record.reason, record.reward, record.passed) == ("graded", "passed", 1.0, True)
    assert (record.rollout_id, record.group_id, record.task_id, record.patch) == ("r1", "g1", "t1", "diff")
    assert record.suspicions == ["odd"] and record.timings == {"run": 1.5} and record.tokens_sampled == 4
    assert record.notes == {"limits": "v2", "attempts": 1, "failures": [], "exit_status": "Submitted",
                            "harness_log": "bye", "grade": {"cases": 3}}


def test_law1_tokens_of_attempts_that_were_thrown_away_are_counted():
    lost = Attempt([call(5), call(6)], failure=Failure("infra", "run", "WorkerDied"))
    last = Attempt([call(3)], failure=Failure("harness", "run", "LimitsExceeded"))
    record = stages.trajectory(SPEC, [lost, last], {})
    assert (record.end, record.reason, record.reward) == ("harness_failed", "LimitsExceeded", 0.0)
    assert record.tokens_sampled == 3 and record.discarded_tokens == 11
    assert record.notes["attempts"] == 2
    assert record.notes["failures"] == ["infra: WorkerDied"]


def test_law8_a_rollout_that_kept_failing_says_whose_fault_it_was():
    record = stages.trajectory(SPEC, [Attempt(failure=Failure("sandbox", "init", "no"))] * 3, {})
    assert (record.end, record.reason, record.passed) == ("infra_failed", "sandbox: no", False)
    assert record.notes["attempts"] == 3


def test_an_empty_patch_is_graded_without_a_sandbox():
    grade = stages.empty_patch()
    assert not grade.passed and grade.reward == 0.0 and grade.reason == "empty_patch"


def test_a_patch_with_other_bytes_than_text_is_recorded_readably():
    patch = b"+caf\xe9".decode("utf-8", "surrogateescape")
    record = stages.trajectory(SPEC, [Attempt(patch=patch, grade=Grade(passed=False, reward=0, reason="x"))], {})
    assert record.patch == "+caf\ufffd"


@pytest.mark.parametrize(("error", "kind"), [
    (SandboxError("no room"), "sandbox"), (SandboxDied("gone"), "sandbox"),
    (LimitExceeded("out of memory"), "harness"), (PatchUnavailable("too large"), "harness"), (OSError("disk"), "infra"),
])
def test_law8_a_sandbox_says_whose_failure_it_is(error, kind):
    with pytest.raises(StageFailed) as failed, stages.blamed_on("infra", "run"):
        raise error
    assert failed.value.failure == Failure(kind, "run", f"{type(error).__name__}: {error}")


def test_law8_attempts_on_runners_that_died_count_and_share_no_name():
    spec = replace(SPEC, lost=2)
    record = stages.trajectory(spec, [Attempt(failure=Failure("sandbox", "init", "no")), Attempt([call(3)])], {})
    assert record.notes["attempts"] == 4
    assert record.notes["failures"] == [stages.RUNNER_DIED, stages.RUNNER_DIED, "sandbox: no"]
    names = [replace(SPEC, lost=lost).attempt(number) for lost in range(3) for number in range(3)]
    assert names[0] == "r1" and len(set(names)) == len(names)
