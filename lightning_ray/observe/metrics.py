"""The metrics of one step, from what was trained and what was not. Pure.

Keys are a contract: others script against `metrics.jsonl`. Always
`tokens_sampled == tokens_trained + sum(tokens_dropped.values())` (law 1).
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning_ray.buffer import Dropped, Group
from lightning_ray.trajectory.ledger import Ledger
from lightning_ray.trajectory.samples import StepBatch, dropped_whole

UPDATE_KEYS = ("loss", "grad_norm", "clip_fraction", "logprob_gap_mean", "logprob_gap_max", "learn_s", "publish_s")


def step_ledger(batch: StepBatch, dropped: Sequence[Dropped]) -> Ledger:
    """The account of the step: the groups it trained and the groups that it dropped whole."""
    account = batch.ledger
    for drop in dropped:
        for member in drop.group.trajectories:
            account = account + dropped_whole(member, drop.reason)
    account.check("step")
    return account


def step_metrics(
    *, step: int, policy_version: int, groups: Sequence[Group], dropped: Sequence[Dropped], batch: StepBatch,
    update: Mapping[str, Any], wall_s: float, generate_s: float, heldout_pass_rate: float | None = None,
) -> dict[str, Any]:
    """One line of `metrics.jsonl`. Rewards and pass rates are over the trained groups; counts are over all groups
    that left the buffer in this step."""
    trained = [member for group in groups for member in group.trajectories]
    everything = trained + [member for drop in dropped for member in drop.group.trajectories]
    ends = [member.end for member in everything]
    account = step_ledger(batch, dropped)
    metrics: dict[str, Any] = {
        "step": step, "policy_version": policy_version, "wall_s": wall_s,
        "rollouts": len(everything),
        "reward_mean": fmean(member.reward for member in trained),
        "pass_rate": fmean(member.passed for member in trained),
        "calls": sum(len(member.calls) for member in everything),
        "tokens_prompt": sum(member.tokens_prompt for member in everything),
        "tokens_sampled": account.sampled, "tokens_trained": account.trained,
        "tokens_dropped": dict(sorted(account.dropped.items())),
        "samples": len(batch.samples), "branches_per_rollout": batch.branches / max(1, batch.rollouts),
        "rollouts_graded": ends.count("graded"), "rollouts_harness_failed": ends.count("harness_failed"),
        "rollouts_infra_failed": ends.count("infra_failed"),
        "rollouts_retried": sum(member.notes.get("attempts", 1) > 1 for member in everything),
        "suspicions": sum(bool(member.suspicions) for member in everything),
        "groups_trained": len(groups), "groups_dropped": len(dropped),
        "tasks_set_aside": sum(drop.reason == "set_aside" for drop in dropped),
        "generate_s": generate_s,
        **{key: update.get(key) for key in UPDATE_KEYS},
        **{key: value for key, value in update.items() if key not in UPDATE_KEYS},
    }
    if heldout_pass_rate is not None:
        metrics["heldout_pass_rate"] = heldout_pass_rate
    return metrics
