"""Pass@k, McNemar's test, the bootstrap and the bill, against known values."""

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from lightning_ray.config import PricesConfig
from lightning_ray.evaluation.bill import bill, tokens_cached
from lightning_ray.evaluation.comparison import compare, mcnemar_exact, mean_with_interval, pass_at_k
from lightning_ray.trajectory.call import Call, Trajectory


@pytest.mark.parametrize(("samples", "passed"), [(5, 0), (5, 2), (5, 5), (8, 1)])
def test_pass_at_k_is_the_mean_over_all_choices(samples, passed):
    for k in range(1, samples + 1):
        every = [any(member < passed for member in chosen) for chosen in combinations(range(samples), k)]
        assert pass_at_k(samples, passed, k) == pytest.approx(fmean(every))


@pytest.mark.parametrize(("samples", "passed", "k"), [(3, 4, 1), (3, 1, 4), (0, 0, 1), (3, 1, 0)])
def test_pass_at_k_refuses_what_cannot_be_estimated(samples, passed, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, passed, k)


@pytest.mark.parametrize(("first", "second", "p"), [
    (0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (1, 9, 0.021484375), (10, 2, 0.03857421875), (6, 16, 0.05248)])
def test_mcnemar_against_the_binomial(first, second, p):
    assert mcnemar_exact(first, second) == pytest.approx(p, rel=1e-4) == mcnemar_exact(second, first)


def test_bootstrap_is_near_the_normal_interval_and_seeded():
    values = [1.0] * 60 + [0.0] * 40
    found = mean_with_interval(values, resamples=4000)
    assert found["mean"] == 0.6
    assert found["ci95"] == pytest.approx([0.6 - 1.96 * 0.049, 0.6 + 1.96 * 0.049], abs=0.015)
    assert found == mean_with_interval(values, resamples=4000)
    assert mean_with_interval([1.0, 1.0])["ci95"] == [1.0, 1.0]


def test_a_paired_comparison_keeps_pairs_together():
    first = {f"i{number}": float(number < 40) for number in range(100)}
    second = {name: float(value or name in ("i50", "i51", "i52", "i53", "i54", "i55")) for name, value in first.items()}
    found = compare(first, {**second, "extra": 1.0}, resamples=2000)
    assert (found["both"], found["only_first"], found["only_second"], found["neither"]) == (40, 0, 6, 54)
    assert found["instances"] == 100 and found["left_out"] == 1 and found["mcnemar_p"] == pytest.approx(0.03125)
    assert found["difference"] == pytest.approx(0.06)
    low, high = found["difference_ci95"]
    assert 0 < low < 0.06 < high < 0.12, "unpaired, the interval would hold zero by far"
    with pytest.raises(ValueError, match="share no instance"):
        compare({"a": 1.0}, {"b": 1.0})


def call(index, prompt, sampled, parent=None):
    return Call(index, np.arange(prompt), np.arange(sampled), np.zeros(sampled), np.zeros(sampled), "stop",
                parent=parent)


def test_the_bill():
    solved = Trajectory("r1", "g", "t", [call(0, 100, 10), call(1, 130, 5, parent=0), call(2, 40, 1)], "graded",
                        passed=True, timings={"run": 2.0, "grade": 1.0})
    failed = Trajectory("r2", "g", "t", [call(0, 100, 4)], "graded", discarded_tokens=6, timings={"run": 3.0})
    assert tokens_cached(solved) == 110 and tokens_cached(failed) == 0
    prices = PricesConfig(tokens_in=10.0, tokens_in_cached=1.0, tokens_out=100.0, device_hour=36.0)
    found = bill([solved, failed], prices, wall_s=50.0, devices=2)
    assert (found["tokens_in"], found["tokens_in_cached"], found["tokens_out"]) == (370, 110, 26)
    assert (found["device_s"], found["agent_s"], found["grading_s"], found["solved"]) == (100.0, 5.0, 1.0, 1)
    assert found["cost"] == pytest.approx((260 * 10 + 110 * 1 + 26 * 100) / 1e6 + 1.0)
    assert found["per_solved"]["cost"] == pytest.approx(found["cost"]) == 2 * found["per_rollout"]["cost"]


def test_no_prices_no_cost_and_nothing_solved():
    found = bill([Trajectory("r", "g", "t", [call(0, 10, 1)], "graded")], PricesConfig(), wall_s=1.0, devices=1)
    assert found["cost"] is None and found["per_solved"] is None and found["per_rollout"]["tokens_in"] == 10
