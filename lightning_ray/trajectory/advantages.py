"""Advantages of rollouts, computed over whole groups before anything is dropped (law 5).

A reward is a float, one for each rollout of the group, all of them valid; the answer has the same length and order.
`step_advantages` takes the rewards of all groups of a step, since one estimator compares over the whole step.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Literal

AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce++"]

STD_FLOOR = 1e-6
"""Below this spread all rewards of a group count as equal: there is nothing to compare."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """(r_i - mean) / std over the group, population std. DeepSeekMath (arXiv 2402.03300), section 4.1.2."""
    spread = pstdev(rewards)
    if spread < STD_FLOOR:
        return [0.0] * len(rewards)
    centre = fmean(rewards)
    return [(reward - centre) / spread for reward in rewards]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """r_i - mean over the group. Dr. GRPO (arXiv 2503.20783), section 3.2: without the bias of the std."""
    centre = fmean(rewards)
    return [reward - centre for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r_i - mean of the others. RLOO (arXiv 2402.14740), equation 9. A group of one has no others: 0."""
    count = len(rewards)
    if count < 2:
        return [0.0] * count
    total = sum(rewards)
    return [reward - (total - reward) / (count - 1) for reward in rewards]


WITHIN_GROUP: dict[AdvantageName, Callable[[Sequence[float]], list[float]]] = {
    "grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo,
}


def step_advantages(name: AdvantageName, groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of each rollout of each group.

    `reinforce++` compares with all rollouts of the step: (r_i - mean) / std over the step, population std. REINFORCE++
    (arXiv 2501.03262), normalisation over the global batch. On one step it is `grpo` of one large group.
    """
    if name != "reinforce++":
        return [WITHIN_GROUP[name](rewards) for rewards in groups]
    values = iter(grpo([reward for rewards in groups for reward in rewards]))
    return [[next(values) for _ in rewards] for rewards in groups]


def silent_groups(name: AdvantageName, groups: Sequence[Sequence[float]]) -> list[bool]:
    """For each group whether it trains nothing, because all rewards that it is compared with are equal."""
    if name != "reinforce++":
        return [zero_variance(rewards) for rewards in groups]
    return [zero_variance([reward for rewards in groups for reward in rewards])] * len(groups)


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, so that there is nothing to compare."""
    return pstdev(rewards) < STD_FLOOR
