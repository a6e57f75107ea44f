"""Decisions of the `swe`, `command` and `function` graders, without a sandbox."""

import pytest

from lightning_ray.config import RewardConfig
from lightning_ray.sandbox.base import ExecResult
from lightning_ray.tasks import patches
from lightning_ray.tasks.base import Grade
from lightning_ray.tasks.function_grader import graded
from lightning_ray.tasks.pytest_run import runner_mounts
from lightning_ray.tasks.swe import added_lines, judge_runs, verdict

DONE = ExecResult("", 0)
A, B = {"id": "t.py::a", "outcome": "passed"}, {"id": "t.py::b", "outcome": "passed"}
REQUIRED = ["t.py::a", "t.py::b"]
START, END = {"started": True}, {"ended": 0}


def test_every_required_test_must_pass_explicitly():
    reason, report, suspicions = verdict(REQUIRED, DONE, [START, A, B, END])
    assert (reason, suspicions) == ("passed", []) and report == {"tests": dict.fromkeys(REQUIRED, "passed")}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([START, A, END], "tests_failed: t.py::b"),
        ([START, A, {**B, "outcome": "skipped"}, END], "tests_failed: t.py::b"),
        ([START, A, {**B, "outcome": "xfailed"}, END], "tests_failed: t.py::b"),
        ([START, A, {**B, "outcome": "incomplete"}, END], "tests_failed: t.py::b"),
        ([START, A, A, B, END], "tests_failed: t.py::a"),
        ([START, A, {"id": "t.py::b", "outcome": None}, END], "tests_failed: t.py::b"),
        ([START, A, B], "ended_early"),
        ([START], "ended_early"),
    ],
)
def test_anything_less_fails_with_its_reason(said, reason):
    found, _, suspicions = verdict(REQUIRED, DONE, said)
    assert found == reason and suspicions == (["exit_before_the_end"] if reason == "ended_early" else [])


def test_a_runner_that_does_not_start_is_no_verdict_on_the_candidate():
    with pytest.raises(RuntimeError, match="no pytest here"):
        verdict(REQUIRED, ExecResult("no pytest here", 1), [])


def test_timeouts_and_floods_are_told_apart_from_failures():
    assert verdict(REQUIRED, ExecResult("", -9, timed_out=True), [START, A])[0] == "timeout"
    assert verdict(REQUIRED, ExecResult("", 0, truncated=True), [START, A])[0] == "too_much_output"


def test_runs_that_differ_are_flaky_and_runs_that_agree_are_not():
    failed = ("tests_failed: a", {"tests": {"a": "failed", "b": "passed"}})
    passed = ("passed", {"tests": {"a": "passed", "b": "passed"}})
    assert judge_runs([failed, failed]) == failed and judge_runs([passed]) == passed
    reason, report = judge_runs([failed, passed])
    assert reason == "flaky: a" and len(report["runs"]) == 2


def test_lines_that_a_patch_adds_are_numbered_in_the_new_file():
    patch = (
        "diff --git a/x.py b/x.py\nindex 1111111..2222222 100644\n--- a/x.py\n+++ b/x.py\n"
        "@@ -1,3 +1,4 @@\n one\n-two\n+2\n+2.5\n three\n@@ -10 +11 @@\n-ten\n+10\n"
    )
    assert added_lines(patch) == {"x.py": [2, 3, 11]}


def test_only_the_runners_own_packages_are_mounted():
    assert {mount.target for mount in runner_mounts()} >= {"/opt/runner/pytest", "/opt/runner/_pytest"}
    assert all(mount.source.exists() and mount.source.name == mount.target.split("/")[-1] for mount in runner_mounts())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(1, (True, 1.0, "passed")), (0.25, (False, 0.25, "reward: 0.25")), (0, (False, 0.0, "reward: 0")),
     (Grade(passed=True, reward=0.5, reason="half"), (True, 0.5, "half"))],
)  # fmt: skip
def test_a_functions_answer_is_a_grade(answer, expected):
    grade = graded(answer, patches.Filtered(), RewardConfig())
    assert (grade.passed, grade.reward, grade.reason) == expected


def test_suspicions_take_a_functions_reward_too():
    filtered = patches.Filtered(refusals=[patches.Refusal("conftest.py", "loaded_by_itself", True)])
    assert graded(0.5, filtered, RewardConfig()).reward == 0.0
    assert graded(0.5, filtered, RewardConfig(on_suspicion="flag")).reward == 0.5


@pytest.mark.parametrize("answer", [None, "1", True, [1]])
def test_a_function_that_answers_nonsense_is_an_error(answer):
    with pytest.raises(TypeError, match="number or a Grade"):
        graded(answer, patches.Filtered(), RewardConfig())
