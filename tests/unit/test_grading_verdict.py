"""How results become a verdict, outside the candidate's process."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.config import RewardConfig
from lightning_ray.tasks import patches
from lightning_ray.tasks.cases import Case, same, verdict
from lightning_ray.tasks.grading import grader_for
from lightning_ray.tasks.verdicts import finish, messages
from tests.sandboxes import make_task

NONCE = "n" * 32
CASES = {"a": Case(call="f", expected=1), "b": Case(call="f", expected=[1, {"x": None}])}
A, B = {"id": "a", "value": 1}, {"id": "b", "value": [1, {"x": None}]}
START, END = {"imported": True}, {"ended": True}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(json_values)
def test_a_value_is_the_same_as_itself(value):
    assert same(json.loads(json.dumps(value)), value)


@given(json_values, json_values)
def test_same_is_equality_of_json_texts(one, two):
    texts = [json.dumps(value, sort_keys=True) for value in (one, two)]
    if same(one, two):
        assert texts[0] == texts[1] or 0.0 in (one, two) or "0.0" in texts[0]
    elif texts[0] == texts[1]:
        raise AssertionError("the same text, but not the same")


@pytest.mark.parametrize(
    ("one", "two"),
    [(True, 1), (1, True), (0, False), (1, 1.0), ("1", 1), (None, False), ([1], [True]), ({"a": 1}, {"a": 1.0}),
     ([1], [1, 2]), ({"a": 1}, {"a": 1, "b": 2}), (float("nan"), float("nan")), ([], {}), ("", None)],
)  # fmt: skip
def test_values_of_different_type_are_different(one, two):
    assert not same(one, two)


def test_all_right_passes():
    reason, report = verdict(CASES, ["a", "b"], [START, A, B, END])
    assert reason == "passed" and report == {"tests": {"a": "passed", "b": "passed"}}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([START, {"id": "a", "value": True}, B, END], "tests_failed: a"),
        ([START, {"id": "a", "error": "ValueError: x"}, B, END], "tests_failed: a"),
        ([START, A, END], "tests_failed: b"),
        ([START, END], "tests_failed: a, b"),
        ([START, A, B], "ended_early"),
        ([], "ended_early"),
        ([END, START, A, B], "ended_early"),
        ([START, A, A, B, END], "tests_failed: a"),
        ([START, {"id": "a", "value": 0}, A, B, END], "tests_failed: a"),
        ([START, {"id": "a"}, B, END], "tests_failed: a"),
        ([START, {"id": ["a"], "value": 1}, B, END], "tests_failed: a"),
        ([{"import_error": "SyntaxError: x"}], "import_failed: SyntaxError: x"),
        ([START, A, B, END, {"import_error": "late"}], "import_failed: late"),
    ],
)
def test_anything_less_fails_with_its_reason(said, reason):
    assert verdict(CASES, ["a", "b"], said)[0] == reason


def test_only_what_is_required_is_asked_for():
    assert verdict(CASES, ["a"], [START, A, END])[0] == "passed"


def test_many_failures_are_counted():
    cases = {str(i): Case(call="f", expected=1) for i in range(9)}
    reason, report = verdict(cases, list(cases), [START, END])
    assert reason == "tests_failed: 0, 1, 2, 3, 4 and 4 more" and len(report["tests"]) == 9


def test_only_lines_with_the_nonce_are_the_drivers():
    lines = [f'{NONCE} {{"id": 1}}', '{"id": 2}', 'wrong {"id": 3}', f' {NONCE} {{"id": 4}}', f"{NONCE} not json"]
    output = "\n".join([*lines, f"{NONCE} [5]", NONCE])
    assert messages(output, NONCE) == [{"id": 1}]
    assert messages(f"{NONCE} {'[' * 100_000}\n", NONCE) == []


@pytest.mark.parametrize(
    ("on_suspicion", "passed", "reward", "reason"),
    [("zero", False, 0.0, "suspicious: test_file: t.py"), ("flag", True, 1.0, "passed")],
)
def test_suspicions_take_the_reward_or_are_flagged(on_suspicion, passed, reward, reason):
    filtered = patches.Filtered(refusals=[patches.Refusal("t.py", "test_file", True)])
    grade = finish("passed", filtered, {}, RewardConfig(on_suspicion=on_suspicion))
    assert (grade.passed, grade.reward, grade.reason) == (passed, reward, reason)
    assert grade.suspicions == ["test_file: t.py"] and grade.report == {"left_out": ["test_file: t.py"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grading": {}}, "module"),
        ({"grading": {"module": "shop.py", "cases": {}}}, "cases"),
        ({"grading": {"module": "shop.py", "cases": {"t": {"call": "f()", "expected": 1}}}}, "call"),
        ({"grading": {"module": "shop.py", "cases": {"t": {"call": "f"}}}}, "expected"),
        ({"grading": {"module": "shop", "cases": {"tests::adds": {"call": "f", "expected": 1}}}, "PASS_TO_PASS": []},
         ".py"),
        ({"FAIL_TO_PASS": ["nothing"]}, "'nothing' is none"),
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": []}, "they name none"),
        ({"grader": "swe"}, "module"),
        ({"grader": "swe", "grading": {}, "FAIL_TO_PASS": ["adds"]}, "path/test_file.py::name"),
        ({"grader": "swe", "grading": {}, "FAIL_TO_PASS": [], "PASS_TO_PASS": []}, "name no test"),
        ({"grader": "swe", "grading": {"eval_script": "x", "log_parser": "none"}}, "log_parser"),
        ({"grader": "command"}, "command"),
        ({"grader": "function", "grading": {}}, "module:function"),
        ({"grader": "function", "grading": {"function": "json:nothing"}}, "cannot be imported"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_graded_is_an_error_that_names_it(change, message):
    with pytest.raises(ValueError, match=message) as raised:
        grader_for(make_task(**change), RewardConfig())
    assert "shop-1" in str(raised.value)
