"""Pass@k, and whether one policy is better than another on the same instances. Pure."""

import random
from collections.abc import Mapping, Sequence
from math import comb
from statistics import fmean
from typing import Any

RESAMPLES = 10_000


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate of the chance that at least one of `k` samples passes, from `samples >= k` of which
    `passed` did: `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374, equation 1)."""
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {passed} of {samples}")
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def mean_with_interval(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Any]:
    """`{mean, ci95}`: the percentile bootstrap over instances (Efron 1979, Ann. Statist. 7:1)."""
    if not values:
        raise ValueError("no instance, no mean")
    draw = random.Random(seed)
    size = len(values)
    means = sorted(fmean(draw.choices(values, k=size)) for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[min(resamples - 1, int(0.975 * resamples))]
    return {"mean": fmean(values), "ci95": [low, high]}


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided p-value that both policies are equally good, from the instances that exactly one of them solved
    (McNemar 1947, Psychometrika 12:153; exact: each such instance is a fair coin under equality)."""
    if min(only_first, only_second) < 0:
        raise ValueError("counts are not negative")
    total = only_first + only_second
    tail = sum(comb(total, count) for count in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**total)


def compare(first: Mapping[str, float], second: Mapping[str, float], *, seed: int = 0, resamples: int = RESAMPLES
            ) -> dict[str, Any]:
    """Two policies on the instances that both were judged on. `first`, `second`: instance id -> share of its samples
    that passed. The p-value counts an instance as solved where more than half of them did; the interval of the
    difference (second - first) is the bootstrap's over instances, pairs kept together. ValueError where they
    share none.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ValueError("the two evaluations share no instance that both were judged on")
    solved = [(first[name] > 0.5, second[name] > 0.5) for name in shared]
    only_first, only_second = solved.count((True, False)), solved.count((False, True))
    difference = mean_with_interval([second[name] - first[name] for name in shared], seed=seed, resamples=resamples)
    return {
        "instances": len(shared), "left_out": len(first.keys() ^ second.keys()),
        "first": fmean(first[name] for name in shared), "second": fmean(second[name] for name in shared),
        "difference": difference["mean"], "difference_ci95": difference["ci95"],
        "both": solved.count((True, True)), "only_first": only_first, "only_second": only_second,
        "neither": solved.count((False, False)), "mcnemar_p": mcnemar_exact(only_first, only_second),
    }
