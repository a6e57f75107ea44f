"""The learning rate over a run."""

import itertools

import pytest

from lightning_ray.config import LearnerConfig
from lightning_ray.learner.optimizer import learning_rate


def rates(schedule: str, total: int = 14, warmup: int = 4) -> list[float]:
    config = LearnerConfig(lr=1.0, lr_schedule=schedule, warmup_steps=warmup)
    return [learning_rate(update, config, total) for update in range(total + 1)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_it_warms_up_linearly_to_the_full_rate(schedule: str) -> None:
    assert rates(schedule)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant_stays() -> None:
    assert set(rates("constant")[4:]) == {1.0}


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_reaches_half_in_the_middle_and_zero_after_the_last_update(schedule: str) -> None:
    found = rates(schedule)
    assert found[9] == pytest.approx(0.5)
    assert found[13] > 0 and found[14] == pytest.approx(0)
    assert all(later < earlier for earlier, later in itertools.pairwise(found[4:]))


def test_a_run_longer_than_planned_does_not_climb_again() -> None:
    config = LearnerConfig(lr=1.0, lr_schedule="cosine", warmup_steps=0)
    assert learning_rate(25, config, 10) == pytest.approx(0)


def test_without_warm_up_the_first_update_has_the_full_rate() -> None:
    assert rates("constant", warmup=0)[0] == 1.0
