"""What length costs, with the published recipe's figures."""

import numpy as np
import pytest

from lightning_ray.config import Config, ConfigError, LengthPenaltyConfig
from lightning_ray.harness.shaping import length_penalty, shape
from lightning_ray.trajectory.call import Call, Trajectory

RECIPE = LengthPenaltyConfig()


@pytest.mark.parametrize(
    ("turns", "tokens", "penalty"),
    [(0, 0, 0), (80, 50_000, 0), (90, 50_000, 0.05), (100, 0, 0.1), (500, 0, 0.1), (0, 57_000, 0.05),
     (0, 64_000, 0.1), (1000, 1_000_000, 0.2)],
)  # fmt: skip
def test_nothing_up_to_the_free_length_then_linear_then_flat(turns, tokens, penalty):
    assert length_penalty(turns, tokens, RECIPE) == pytest.approx(penalty)


def record(passed: bool = True, calls: int = 90) -> Trajectory:
    one = np.ones(3, np.int32)
    made = [Call(index, one, one, one.astype(np.float32), one, "stop") for index in range(calls)]
    lost = Call(calls, np.ones(60_000, np.int32), one[:0], one[:0].astype(np.float32), one[:0], "abort")
    return Trajectory("r", "g", "t", [*made, lost], "graded", reward=float(passed), passed=passed)


def test_a_solved_training_rollout_pays_for_its_answered_calls():
    shaped = shape(record(), "train", RECIPE)
    assert shaped.reward == pytest.approx(0.95) and shaped.passed
    assert shaped.notes["length_penalty"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("mode", "passed", "config"), [("evaluate", True, RECIPE), ("train", False, RECIPE), ("train", True, None)]
)
def test_nobody_else_pays(mode, passed, config):
    shaped = shape(record(passed), mode, config)
    assert shaped.reward == float(passed) and "length_penalty" not in shaped.notes


def test_a_penalty_that_does_not_rise_is_refused():
    with pytest.raises(ConfigError, match=r"most_turns \(80\) must be above free_turns \(80\)"):
        Config.build({"reward": {"length_penalty": {"most_turns": 80}}})
