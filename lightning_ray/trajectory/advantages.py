"""Advantages of rollouts, computed over the whole group before anything is dropped (law 5).

A reward is a float, one for each rollout of the group that has a valid one; the answer has the same length and
order.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Literal

AdvantageName = Literal["grpo", "dr_grpo", "rloo"]

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


ADVANTAGES: dict[AdvantageName, Callable[[Sequence[float]], list[float]]] = {
    "grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo,
}


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether the group compares nothing: all rewards equal. It trains nothing and is counted."""
    return pstdev(rewards) < STD_FLOOR
