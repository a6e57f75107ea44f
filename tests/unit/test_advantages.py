"""Advantages: known values, and statistics that lose no member of a group."""

from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.trajectory.advantages import WITHIN_GROUP, silent_groups, step_advantages
from lightning_ray.trajectory.samples import step_batch
from tests.unit.trajectories import groups, make_call, make_trajectory

NAMES = [*WITHIN_GROUP, "reinforce++"]
REWARDS = st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=5), min_size=1, max_size=4)


@pytest.mark.parametrize(("name", "expected"), [
    ("grpo", [[1.0, -1.0], [1.0, -1.0]]), ("dr_grpo", [[0.5, -0.5], [1.0, -1.0]]), ("rloo", [[1.0, -1.0], [2.0, -2.0]]),
])
def test_within_a_group(name, expected):
    assert step_advantages(name, [[1.0, 0.0], [2.0, 0.0]]) == [pytest.approx(one) for one in expected]


def test_reinforce_plus_plus_compares_over_the_step():
    rewards = [[1.0, 1.0], [0.0, 1.0, 0.0]]
    flat = [reward for group in rewards for reward in group]
    expected = [[(reward - fmean(flat)) / pstdev(flat) for reward in group] for group in rewards]
    assert step_advantages("reinforce++", rewards) == [pytest.approx(one) for one in expected]
    assert silent_groups("reinforce++", rewards) == [False, False]
    assert silent_groups("grpo", rewards) == [True, False]
    assert silent_groups("reinforce++", [[1.0, 1.0], [1.0]]) == [True, True]


@given(REWARDS, st.sampled_from(NAMES))
def test_advantages_sum_to_nothing_over_what_is_compared(rewards, name):
    values = step_advantages(name, rewards)
    assert [len(group) for group in values] == [len(group) for group in rewards]
    sums = [sum(group) for group in values]
    compared = [sum(sums)] if name == "reinforce++" else sums
    assert compared == pytest.approx([0.0] * len(compared), abs=1e-9)


@given(groups(), st.integers(1, 24), st.sampled_from(NAMES))
def test_law5_statistics_never_lose_a_member_with_a_valid_reward(made, max_tokens, name):
    """Whatever of its tokens is masked, cut off or missing: the advantages are those of all rewards."""
    expected = step_advantages(name, [[member.reward for member in group] for group in made])
    flat = [value for group in expected for value in group]
    result = step_batch(made, advantage=name, normalise="rollout", max_tokens=max_tokens)
    assert result.rollouts == len(flat)
    assert all(sample.advantage == flat[sample.rollout] for sample in result.samples)


def test_a_rollout_is_silent_where_it_is_compared_with_its_like():
    same = [make_trajectory([make_call(0, [1], [2])], reward=1.0, rollout_id=name, group_id="a") for name in "ab"]
    mixed = [make_trajectory([make_call(0, [1], [2])], reward=float(name == "c"), rollout_id=name, group_id="b")
             for name in "cd"]
    options = {"normalise": "rollout", "max_tokens": 9}
    assert step_batch([same, mixed], advantage="grpo", **options).silent == {"a", "b"}
    result = step_batch([same, mixed], advantage="reinforce++", **options)
    assert result.silent == frozenset() and len(result.samples) == 4
