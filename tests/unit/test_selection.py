"""Which branches are trained: all, the main one's, or by the system prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.trajectory.samples import nothing_trained, step_batch
from lightning_ray.trajectory.selection import main_system_prompt, select
from tests.unit.trajectories import call_lists, make_call, make_trajectory

AGENT, TITLE = "You fix bugs.", "Give it a title."
CALLS = [make_call(0, [7], [8, 8, 8], system=TITLE), make_call(1, [1], [2], system=AGENT),
         make_call(2, [1, 2, 3], [4], system=AGENT), make_call(3, [5], [6], system="", masked="constrained")]


def masks(rule):
    return [call.masked for call in select(CALLS, rule)]


@pytest.mark.parametrize(("rule", "expected"), [
    ("all", [None, None, None, "constrained"]),
    ("main", ["excluded", None, None, "constrained"]),
    ("(?i)TITLE", [None, "excluded", "excluded", "constrained"]),
    ("^$", ["excluded", "excluded", "excluded", "constrained"]),
])
def test_a_rule_masks_what_it_leaves_out_and_keeps_other_reasons(rule, expected):
    assert masks(rule) == expected
    assert [call.masked for call in CALLS] == [None, None, None, "constrained"], "the record stays as it was"


def test_the_main_system_prompt_is_that_of_most_calls_then_of_most_tokens_then_the_first():
    assert main_system_prompt(CALLS) == AGENT
    assert main_system_prompt(CALLS[:2]) == TITLE
    assert main_system_prompt([CALLS[1], make_call(1, [9], [9], system=TITLE)]) == AGENT
    assert main_system_prompt([]) == ""


@given(call_lists(), st.sampled_from(["main", "title", "^$"]))
def test_law2_selection_changes_masks_and_nothing_else(calls, rule):
    for call, chosen in zip(calls, select(calls, rule), strict=True):
        assert (chosen is call) or (call.masked, chosen.masked) == (None, "excluded")
        assert chosen.sampled_ids is call.sampled_ids and chosen.prompt_ids is call.prompt_ids


def test_excluded_tokens_count_under_their_name_and_the_rest_weighs_as_a_whole_rollout():
    group = [make_trajectory(CALLS, reward=1.0, rollout_id="a"),
             make_trajectory([make_call(0, [1], [2], system=AGENT)], reward=0.0, rollout_id="b")]
    made = step_batch([group], advantage="grpo", normalise="rollout", max_tokens=16, train="main")
    assert made.ledger.dropped == {"excluded": 3, "constrained": 1} and made.ledger.trained == 3
    assert [sample.weight for sample in made.samples] == [1 / 4, 1 / 2]


def test_a_rule_that_leaves_everything_out_is_told():
    group = [make_trajectory([make_call(0, [1], [2], system=AGENT)], reward=reward, rollout_id=str(reward))
             for reward in (0.0, 1.0)]
    made = step_batch([group], advantage="grpo", normalise="rollout", max_tokens=16, train="poet")
    assert made.samples == [] and nothing_trained(made) == "its tokens were dropped (2 excluded)"
    equal = step_batch([[group[0], make_trajectory([], rollout_id="c")]], advantage="grpo", normalise="rollout",
                       max_tokens=16)
    assert nothing_trained(equal) == "all rewards that are compared with each other are equal"
