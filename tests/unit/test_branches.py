"""Branches and samples against laws 1, 2, 3, 5 and 9."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.trajectory.branches import branches, parents
from lightning_ray.trajectory.ledger import Ledger, LedgerError
from lightning_ray.trajectory.samples import call_mask, dropped_whole, step_batch
from tests.unit.trajectories import call_lists, groups, make_call, make_trajectory


def batch(made, **changes):
    return step_batch(made, **{"advantage": "grpo", "normalise": "rollout", "max_tokens": 16, **changes})


def test_a_conversation_is_one_branch():
    calls = [make_call(0, [1, 2], [3]), make_call(1, [1, 2, 3, 4], [5]), make_call(2, [1, 2, 3, 4, 5, 6], [7])]
    assert parents(calls) == [None, 0, 1]
    assert [branch.calls for branch in branches(calls)] == [(0, 1, 2)]


def test_a_fork_shares_its_prefix_and_trains_it_once():
    calls = [make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4]), make_call(2, [1, 2, 5], [6])]
    first, second = branches(calls)
    assert (first.calls, first.owned) == ((0, 1), {0, 1})
    assert (second.calls, second.owned) == ((0, 2), {2})


def test_a_rewritten_history_begins_a_branch():
    calls = [make_call(0, [1], [2, 3]), make_call(1, [1, 2, 9], [4])]
    assert parents(calls) == [None, None]


def test_identical_prompts_are_two_calls():
    calls = [make_call(0, [1, 2], [3]), make_call(1, [1, 2], [3]), make_call(2, [1, 2, 3, 4], [5])]
    found = branches(calls)
    assert sorted(position for branch in found for position in branch.owned) == [0, 1, 2]
    assert parents(calls)[2] == 1, "of two exact prefixes of the same length the latest is continued"


@given(call_lists())
def test_law3_each_call_is_owned_by_exactly_one_branch(calls):
    owned = [position for branch in branches(calls) for position in branch.owned]
    assert sorted(owned) == list(range(len(calls)))


@given(call_lists())
def test_law2_branches_extend_token_for_token(calls):
    for branch in branches(calls):
        for earlier, later in zip(branch.calls, branch.calls[1:], strict=False):
            sequence = [*calls[earlier].prompt_ids, *calls[earlier].sampled_ids]
            assert list(calls[later].prompt_ids[: len(sequence)]) == sequence


@given(groups(), st.integers(1, 24), st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce++"]),
       st.sampled_from(["all", "main", "bugs|title", "poet"]))
def test_law1_every_sampled_token_is_trained_or_dropped_under_a_name(made, max_tokens, advantage, train):
    result = batch(made, max_tokens=max_tokens, advantage=advantage, train=train)
    sampled = sum(t.tokens_sampled + t.discarded_tokens for group in made for t in group)
    assert result.ledger.sampled == sampled == result.ledger.trained + result.ledger.dropped.total()
    assert result.ledger.trained == sum(sample.trained for sample in result.samples)
    assert set(result.ledgers) == {t.rollout_id for group in made for t in group}


@given(groups(), st.integers(1, 24))
def test_law2_trained_tokens_are_the_sampled_tokens(made, max_tokens):
    """Token, log-prob and version of every trained position are those of a call, each call's mask used exactly once."""
    flat = [trajectory for group in made for trajectory in group]
    result = batch(made, max_tokens=max_tokens)
    for index, trajectory in enumerate(flat):
        rows = [sample for sample in result.samples if sample.rollout == index]
        got = sorted((int(t), float(lp), int(v)) for row in rows for t, lp, v in zip(
            row.token_ids[row.loss_mask], row.logprobs[row.loss_mask], row.versions[row.loss_mask], strict=True))
        want = sorted((int(t), float(lp), int(v)) for call in trajectory.calls for t, lp, v, keep in zip(
            call.sampled_ids, call.logprobs, call.versions, call_mask(call, max_tokens), strict=True) if keep)
        assert got == (want if rows else []) and all(len(row.token_ids) <= max_tokens for row in rows)


@given(groups())
def test_law5_weights_of_a_rollout_sum_to_one_over_all_rollouts(made):
    result = batch(made)
    total = sum(len(group) for group in made)
    for index in {sample.rollout for sample in result.samples}:
        summed = sum(s.weight * s.trained for s in result.samples if s.rollout == index)
        assert summed == pytest.approx(1 / total)


def test_law5_advantages_come_from_the_whole_group_before_dropping():
    """A member whose every token is masked still counts in the group's mean."""
    group = [make_trajectory([make_call(0, [1], [2])], reward=1.0, rollout_id="a"),
             make_trajectory([make_call(0, [1], [2], masked="constrained")], reward=0.0, rollout_id="b"),
             make_trajectory([], reward=0.0, rollout_id="c", end="harness_failed")]
    (sample,) = batch([group], advantage="dr_grpo").samples
    assert sample.advantage == pytest.approx(2 / 3)
    assert sample.weight == pytest.approx(1 / 3)


def test_a_zero_variance_group_trains_nothing_and_says_so():
    group = [make_trajectory([make_call(0, [1], [2, 3])], reward=1.0, rollout_id=name) for name in "ab"]
    result = batch([group])
    assert result.samples == [] and result.ledger.dropped == {"zero_variance": 4}


def test_an_infra_failed_rollout_is_refused():
    group = [make_trajectory([], rollout_id=name, end="infra_failed") for name in "ab"]
    with pytest.raises(ValueError, match="infra_failed"):
        batch([group])


@pytest.mark.parametrize(("normalise", "weights"), [
    ("rollout", [1 / 2 / 1, 1 / 2 / 3]), ("token", [1 / 4, 1 / 4]), ("sample", [1 / 2 / 1, 1 / 2 / 3])])
def test_normalisation(normalise, weights):
    group = [make_trajectory([make_call(0, [1], [2])], reward=1.0, rollout_id="a"),
             make_trajectory([make_call(0, [1], [2, 3, 4])], reward=0.0, rollout_id="b")]
    assert [sample.weight for sample in batch([group], normalise=normalise).samples] == pytest.approx(weights)


@given(groups())
def test_law9_the_same_calls_give_the_same_samples_bit_for_bit(made):
    first, second = batch(made), batch(made)
    for one, other in zip(first.samples, second.samples, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "versions"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
        assert (one.advantage, one.rollout, one.weight) == (other.advantage, other.rollout, other.weight)


@given(call_lists(), st.sampled_from(["stale", "infra_failed"]))
def test_law1_holds_for_rollouts_dropped_whole(calls, reason):
    ledger = dropped_whole(make_trajectory(calls, discarded=3), reason)
    assert ledger.trained == 0
    assert ledger.dropped.total() == ledger.sampled == sum(len(call.sampled_ids) for call in calls) + 3


def test_an_account_that_does_not_balance_is_an_error():
    with pytest.raises(LedgerError, match="2 unaccounted"):
        Ledger(sampled=5, trained=3).check("here")


def test_truncated_tokens_are_named():
    group = [make_trajectory([make_call(0, [1, 1], [2, 3, 4])], reward=1.0, rollout_id="a"),
             make_trajectory([make_call(0, [1, 1], [2])], reward=0.0, rollout_id="b")]
    result = batch([group], max_tokens=3)
    assert result.ledger.dropped == {"truncated": 2} and result.ledger.trained == 2
    assert all(np.array_equal(s.token_ids, [1, 1, 2]) for s in result.samples)
