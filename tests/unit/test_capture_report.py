"""The report of `lightning-ray capture`, from calls made by hand."""

import json
from dataclasses import replace

import pytest
from hypothesis import given

from lightning_ray.harness.report import Ending, Parity, lines, report
from tests.unit.trajectories import call_lists, make_call

GOOD = Ending("graded", "passed", reward=1.0, exit_status="exit code 0", seconds=3.0)


def made(calls, ending=GOOD, **settings):
    return report(calls, ending, **{"max_context": 1000} | settings)


def call(index, prompt, sampled, relation="continued", **fields):
    return replace(make_call(index, prompt, sampled, masked=fields.pop("masked", None)), relation=relation, **fields)


CONVERSATION = [
    call(0, [1, 2], [3, 4], "new_conversation", system="You fix\n bugs."),
    call(1, [1, 2, 3, 4, 5], [6], system="You fix\n bugs."),
]


def test_one_conversation_is_one_branch():
    result = made(CONVERSATION)
    (branch,) = result.branches
    assert (branch.calls, branch.relation, branch.length, branch.sampled) == ([0, 1], "new_conversation", 6, 3)
    assert branch.system == "You fix bugs."
    assert (result.calls, result.sampled, result.trainable, result.masked) == (2, 3, 3, {})
    assert (result.prompt_tokens, result.dialects) == (7, {"chat": 2})
    assert result.warnings == []


@given(call_lists())
def test_law1_every_sampled_token_is_trainable_or_masked_for_a_reason(calls):
    result = made(calls, max_context=9)
    assert result.sampled == sum(len(one.sampled_ids) for one in calls)
    assert result.sampled == result.trainable + sum(result.masked.values())
    assert sum(branch.sampled for branch in result.branches) == result.sampled
    assert sum(branch.trainable for branch in result.branches) == result.trainable


def test_a_harness_that_never_called_is_told_why():
    ending = Ending("harness_failed", "exit code 3", reward=0.0, exit_status="exit code 3", log="no network\n")
    result = made([], ending)
    assert "did not end well (exit code 3)" in result.warnings[0]
    assert "no call was made" in result.warnings[1] and "OPENAI_BASE_URL" in result.warnings[1]
    assert "  no network" in lines(result)


def test_a_harness_that_rewrites_its_history_every_turn_is_named_with_its_branches():
    calls = [call(n, [n, 7], [8], "rewritten_history" if n else "new_conversation") for n in range(14)]
    (warning,) = made(calls).warnings
    assert warning.startswith("history is rewritten every turn: 14 branches of 14 calls (rewritten_history)")


def test_one_compaction_among_many_turns_is_no_warning():
    calls = [call(n, list(range(1, 2 * n + 2)), [2 * n + 2], "continued" if n else "new_conversation")
             for n in range(5)]
    assert made([*calls, call(5, [9, 9], [1], "compacted")]).warnings == []


def test_a_request_on_the_side_that_quotes_an_answer_is_no_warning():
    """As aider's for a commit message, which shows the change."""
    assert made([CONVERSATION[0], call(1, [9, 9], [1], "compacted")]).warnings == []


def test_constrained_calls_are_counted_and_where_all_are_nothing_is_trainable():
    calls = [replace(one, masked="constrained") for one in CONVERSATION]
    result = made(calls)
    assert result.masked == {"constrained": 3}
    assert any("constrained decoding" in warning and "2 calls: 3 tokens" in warning for warning in result.warnings)
    assert any("nothing is trainable" in warning for warning in result.warnings)


@pytest.mark.parametrize(("fields", "words"), [
    ({"finish_reason": "length"}, "1 answer of 1 cut off"),
    ({"masked": "cancelled"}, "went away before 1 answer"),
    ({"text": "<tool_call>\n{}"}, "policy.tool_parser is not set"),
])
def test_a_warning_for(fields, words):
    assert any(words in warning for warning in made([call(0, [1], [2, 3], "new_conversation", **fields)]).warnings)


def test_a_tool_call_that_a_parser_read_is_no_warning():
    one = call(0, [1], [2], "new_conversation", text="<tool_call>\n{}")
    assert made([one], tool_parser="hermes").warnings == []


def test_overridden_parameters_are_listed_with_every_value_that_was_asked_for():
    calls = [replace(one, overridden={"temperature": 0.0, "max_tokens": 100 + one.index}) for one in CONVERSATION]
    result = made(calls)
    assert result.overridden == {"temperature": [0.0], "max_tokens": [100, 101]}
    assert "overridden the harness asked for temperature 0.0; max_tokens 100 101" in lines(result)


def test_branches_that_the_trainer_leaves_out_are_excluded_in_the_report_too():
    title = call(2, [9], [8, 8], "new_conversation", system="Give it a title.")
    result = made([*CONVERSATION, title], train="main")
    assert (result.trainable, result.masked) == (3, {"excluded": 2})
    assert [branch.trainable for branch in result.branches] == [3, 0] and result.warnings == []
    nothing = made(CONVERSATION, train="poet")
    assert nothing.masked == {"excluded": 3}
    assert "capture.train 'poet' fits no system prompt of this run" in nothing.warnings


def test_log_probs_that_differ_too_much_are_a_warning():
    close, far = Parity(3, 0.002, 0.01, 1.0), Parity(3, 0.4, 2.0, 1.0)
    assert made(CONVERSATION, parity=close).warnings == []
    assert "disagree" in made(CONVERSATION, parity=far).warnings[0]
    assert any("0.0020 on average, 0.0100 at most (3 tokens, temperature 1)" in line
               for line in lines(made(CONVERSATION, parity=close)))


def test_a_run_without_isolation_says_so():
    ending = replace(GOOD, reward=None, sandbox="none", unsafe="--no-sandbox was given")
    result = made(CONVERSATION, ending)
    assert result.warnings == ["what the model wrote ran without isolation: --no-sandbox was given"]
    assert lines(result)[:2] == ["harness    exit code 0 after 3.0 s, without a sandbox",
                                 "end        graded (passed), not graded"]


def test_the_report_is_json():
    text = json.dumps(made(CONVERSATION, parity=Parity(3, 0.1, 0.2, 1.0)).as_dict())
    assert json.loads(text)["branches"][0]["calls"] == [0, 1]
    assert json.loads(text)["ending"]["exit_status"] == "exit code 0"
