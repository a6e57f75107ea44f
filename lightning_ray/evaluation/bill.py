"""The bill: what rollouts took, and what the same tokens would cost at prices that the configuration gives. Pure."""

from collections.abc import Sequence
from typing import Any

from lightning_ray.config import PricesConfig
from lightning_ray.trajectory.call import Trajectory

MILLION = 1_000_000


def tokens_cached(trajectory: Trajectory) -> int:
    """Prompt tokens that a prefix cache has seen already: those that a call shares with the call it continues."""
    total = 0
    for call in trajectory.calls:
        if call.parent is not None:
            before = trajectory.calls[call.parent]
            total += min(len(call.prompt_ids), len(before.prompt_ids) + len(before.sampled_ids))
    return total


def bill(trajectories: Sequence[Trajectory], prices: PricesConfig, *, wall_s: float, devices: int) -> dict[str, Any]:
    """Tokens, seconds and cost of `trajectories` together, and for each rollout and each solved one.

    `tokens_in` counts every prompt whole and includes `tokens_in_cached`. `device_s` is the wall time of the run times
    the devices that served the policy; `agent_s` and `grading_s` are wall seconds of the stages, summed over rollouts.
    Costs are in the currency of the prices; None where no price was given. Per solved is None where none was.
    """
    solved = sum(trajectory.passed for trajectory in trajectories)
    cached = sum(map(tokens_cached, trajectories))
    totals: dict[str, Any] = {
        "tokens_in": sum(trajectory.tokens_prompt for trajectory in trajectories), "tokens_in_cached": cached,
        "tokens_out": sum(trajectory.tokens_sampled + trajectory.discarded_tokens for trajectory in trajectories),
        "device_s": wall_s * devices,
        "agent_s": sum(trajectory.timings.get("run", 0.0) for trajectory in trajectories),
        "grading_s": sum(trajectory.timings.get("grade", 0.0) for trajectory in trajectories),
    }
    totals["cost"] = None
    if prices.given:
        totals["cost"] = (
            (totals["tokens_in"] - cached) * prices.tokens_in + cached * prices.tokens_in_cached
            + totals["tokens_out"] * prices.tokens_out) / MILLION + totals["device_s"] / 3600 * prices.device_hour

    def shared(by: int) -> dict[str, Any] | None:
        return {key: None if value is None else value / by for key, value in totals.items()} if by else None

    return {"rollouts": len(trajectories), "solved": solved, **totals,
            "per_rollout": shared(len(trajectories)), "per_solved": shared(solved)}
