"""Which tasks are worth training on, and how often (tasks/difficulty.py)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.tasks.base import Task
from lightning_ray.tasks.difficulty import WHY, Tally, select, tallied

TASKS = [Task(instance_id=f"t{number}", problem_statement="x") for number in range(14)]
TALLIES = {"t0": Tally(4, 4), "t1": Tally(2, 4), "t2": Tally(1, 4), "t3": Tally(0, 0),
           **{f"t{number}": Tally(0, 4) for number in range(4, 14)}}


def chosen(share, seed=0):
    return select(TASKS, TALLIES, keep_failing=share, group_size=8, seed=seed)


def test_outcomes_are_tallied_and_what_failed_for_our_reasons_is_none():
    outcomes = [{"instance_id": name, "end": end, "passed": passed} for name, end, passed in (
        ("a", "graded", True), ("a", "graded", False), ("a", "infra_failed", False), ("a", "harness_failed", False),
        ("b", "infra_failed", False))]
    assert tallied(outcomes) == {"a": Tally(1, 3)}


@pytest.mark.parametrize(("tally", "verdict"), [
    (Tally(0, 0), "not_judged"), (Tally(0, 1), "always_failing"), (Tally(4, 4), "always_passing"),
    (Tally(1, 4), "mixed"), (Tally(3, 4), "mixed"),
])
def test_verdicts(tally, verdict):
    assert tally.verdict == verdict


def test_mixed_tasks_are_kept_and_a_share_of_the_failing_ones():
    found = chosen(0.3)
    assert found.counts == {"mixed": 2, "always_failing_kept": 3, "always_failing": 7, "always_passing": 1,
                            "not_judged": 1}
    assert set(found.counts) == set(WHY) and sum(found.counts.values()) == len(TASKS) == len(found.rates)
    kept = [task.instance_id for task in found.kept]
    assert kept[:2] == ["t1", "t2"] and len(kept) == 5
    assert [rate["instance_id"] for rate in found.rates if rate["kept"]] == kept
    assert found.rates[1] == {"instance_id": "t1", "passed": 2, "judged": 4, "pass_rate": 0.5, "verdict": "mixed",
                              "kept": True, "weight": found.kept[0].weight}
    assert found.rates[3]["pass_rate"] is None


def test_the_seed_decides_which_and_a_larger_share_keeps_the_same_and_more():
    few, many = ({task.instance_id for task in chosen(share).kept} for share in (0.3, 0.6))
    assert few < many and few == {task.instance_id for task in chosen(0.3).kept}
    assert len({frozenset(task.instance_id for task in chosen(0.3, seed).kept) for seed in range(5)}) > 1
    assert len(chosen(0).kept) == 2 and len(chosen(1).kept) == 12


@given(st.integers(1, 16), st.integers(2, 16), st.data())
def test_a_weight_is_the_chance_of_a_group_that_teaches(judged, group_size, data):
    passed = data.draw(st.integers(0, judged))
    weight = Tally(passed, judged).weight(group_size)
    assert 0 < weight < 1
    assert weight == pytest.approx(Tally(judged - passed, judged).weight(group_size))
    assert weight <= Tally(judged, 2 * judged).weight(group_size) + 1e-9  # most at one half


def test_weights_by_hand():
    assert Tally(2, 4).weight(2) == pytest.approx(0.5)  # 1 - 1/4 - 1/4
    assert Tally(0, 4).weight(8) == pytest.approx(1 - 0.1**8 - 0.9**8)
