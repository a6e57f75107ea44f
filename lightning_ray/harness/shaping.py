"""Shaping of rewards: what a solved training rollout loses for its length (`reward.length_penalty`)."""

from typing import Literal

from lightning_ray.config import LengthPenaltyConfig
from lightning_ray.trajectory.call import Trajectory


def length_penalty(turns: int, tokens: int, config: LengthPenaltyConfig) -> float:
    """`turns`: model calls that were answered; `tokens`: of the longest prompt. Each part is
    penalty * clip((value - free) / (most - free), 0, 1); the two are added."""

    def part(value: int, free: int, most: int, penalty: float) -> float:
        return penalty * min(1.0, max(0.0, (value - free) / (most - free)))

    return part(turns, config.free_turns, config.most_turns, config.turns_penalty) + part(
        tokens, config.free_tokens, config.most_tokens, config.tokens_penalty
    )


def shape(record: Trajectory, mode: Literal["train", "evaluate"], config: LengthPenaltyConfig | None) -> Trajectory:
    """The record with its penalty taken off (never below 0) and noted as `length_penalty`. Only training rollouts that
    solved their task are touched."""
    if config is None or mode != "train" or not record.passed:
        return record
    answered = [call for call in record.calls if call.finish_reason != "abort"]
    longest = max((len(call.prompt_ids) for call in answered), default=0)
    penalty = length_penalty(len(answered), longest, config)
    record.reward = max(0.0, record.reward - penalty)
    record.notes["length_penalty"] = penalty
    return record
