"""Samples: the training rows of a step, made from groups of trajectories. Pure and deterministic (law 9).

The loss of a step is `L = 1/R * sum over rollouts ( sum over trained tokens of l / number of trained tokens )`
with R the rollouts of the step that have a valid reward, zero-variance groups included (law 5). It is carried by
`Sample.weight`, what one trained token counts, so that the learner only adds up `weight * l`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lightning_ray.trajectory.advantages import AdvantageName, silent_groups, step_advantages
from lightning_ray.trajectory.branches import branches
from lightning_ray.trajectory.call import Call, Trajectory
from lightning_ray.trajectory.ledger import Ledger
from lightning_ray.trajectory.selection import ALL, select

Normalise = Literal["rollout", "token", "sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row, made from one branch. All arrays have length T."""

    token_ids: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """bool [T]: True where the token at that position was sampled and is trained here."""
    logprobs: np.ndarray
    """float32 [T]: behaviour log-probs of sampled tokens, 0 elsewhere."""
    versions: np.ndarray
    """int32 [T]: policy version that sampled the token, -1 where it was not sampled."""
    advantage: float
    """Of its rollout."""
    rollout: int
    """Index of its rollout in the step."""
    weight: float = 0.0
    """What one trained token of this sample counts in the loss of the step."""

    @property
    def trained(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What a step trains, and the account of what it does not."""

    samples: list[Sample]
    ledger: Ledger
    ledgers: dict[str, Ledger]
    """By rollout id."""
    branches: int
    """Over all rollouts of the step."""
    rollouts: int
    silent: frozenset[str]
    """Rollouts (ids) that train nothing because all rewards that they are compared with are equal."""


def call_mask(call: Call, max_tokens: int) -> np.ndarray:
    """bool [S]: which sampled tokens of a call are trained where its rollout is: all, unless the call is masked, up
    to position `max_tokens` of its branch. It does not depend on the branch, since a call has one prompt."""
    room = 0 if call.masked is not None else max(0, max_tokens - len(call.prompt_ids))
    return np.arange(len(call.sampled_ids)) < room


def rollout_samples(
    trajectory: Trajectory, *, advantage: float, rollout: int, max_tokens: int
) -> tuple[list[Sample], Ledger, int]:
    """The samples of one rollout (weights not yet set), their account, and the number of branches.

    A branch longer than `max_tokens` is cut there; what falls off is dropped as `truncated`.
    """
    ledger = _opened(trajectory)
    samples: list[Sample] = []
    found = branches(trajectory.calls)
    for branch in found:
        leaf = trajectory.calls[branch.calls[-1]]
        length = len(leaf.prompt_ids) + len(leaf.sampled_ids)
        token_ids = np.concatenate([leaf.prompt_ids, leaf.sampled_ids]).astype(np.int32)
        mask = np.zeros(length, dtype=bool)
        logprobs = np.zeros(length, dtype=np.float32)
        versions = np.full(length, -1, dtype=np.int32)
        for position in branch.calls:
            call = trajectory.calls[position]
            start = len(call.prompt_ids)
            span = slice(start, start + len(call.sampled_ids))
            logprobs[span], versions[span] = call.logprobs, call.versions
            if position in branch.owned:
                mask[span] = call_mask(call, max_tokens)
                ledger.drop(call.masked or "truncated", int((~mask[span]).sum()))
        if not mask.any():
            continue
        ledger.trained += int(mask.sum())
        cut = slice(0, max_tokens)
        samples.append(Sample(token_ids[cut], mask[cut], logprobs[cut], versions[cut], advantage, rollout))
    ledger.check(f"rollout {trajectory.rollout_id}")
    return samples, ledger, len(found)


def _opened(trajectory: Trajectory) -> Ledger:
    ledger = Ledger(sampled=trajectory.tokens_sampled + trajectory.discarded_tokens)
    ledger.drop("infra_failed", trajectory.discarded_tokens)
    return ledger


def dropped_whole(trajectory: Trajectory, reason: str) -> Ledger:
    """The account of a rollout that trains nothing. Tokens masked for a reason of their own keep that reason."""
    ledger = _opened(trajectory)
    for call in trajectory.calls:
        ledger.drop(call.masked or reason, len(call.sampled_ids))
    ledger.check(f"rollout {trajectory.rollout_id}")
    return ledger


def step_batch(
    groups: Sequence[Sequence[Trajectory]], *, advantage: AdvantageName, normalise: Normalise, max_tokens: int,
    train: str = ALL,
) -> StepBatch:
    """The samples of one step from its complete groups. No trajectory may be `infra_failed`. `train` selects branches
    (`selection.py`)."""
    samples: list[Sample] = []
    ledgers: dict[str, Ledger] = {}
    branch_count = rollout = 0
    rewards = [[trajectory.reward for trajectory in group] for group in groups]
    values, silent = step_advantages(advantage, rewards), silent_groups(advantage, rewards)
    for group, group_values, group_silent in zip(groups, values, silent, strict=True):
        for trajectory, value in zip(group, group_values, strict=True):
            if trajectory.end == "infra_failed":
                raise ValueError(f"rollout {trajectory.rollout_id} is infra_failed: it has no valid reward")
            if trajectory.rollout_id in ledgers:
                raise ValueError(f"rollout {trajectory.rollout_id} appears twice in one step")
            selected = replace(trajectory, calls=select(trajectory.calls, train))
            made, ledger, count = rollout_samples(selected, advantage=value, rollout=rollout, max_tokens=max_tokens)
            if group_silent:
                ledger = dropped_whole(selected, "zero_variance")
            else:
                samples += made
            ledgers[trajectory.rollout_id] = ledger
            branch_count += count
            rollout += 1
    total = sum(ledgers.values(), Ledger())
    total.check("step")
    quiet = frozenset(trajectory.rollout_id for group, is_silent in zip(groups, silent, strict=True) if is_silent
                      for trajectory in group)
    return StepBatch(_weighted(samples, normalise, rollout), total, ledgers, branch_count, rollout, quiet)


def nothing_trained(batch: StepBatch) -> str:
    """Why a batch has no samples, for readers."""
    if len(batch.silent) == batch.rollouts:
        return "all rewards that are compared with each other are equal"
    counts = ", ".join(f"{count} {reason}" for reason, count in batch.ledger.dropped.most_common())
    return f"its tokens were dropped ({counts})" if counts else "no token was sampled"


def _weighted(samples: list[Sample], normalise: Normalise, rollouts: int) -> list[Sample]:
    tokens_of_rollout = Counter()
    for sample in samples:
        tokens_of_rollout[sample.rollout] += sample.trained
    all_tokens = tokens_of_rollout.total()
    weight = {
        "rollout": lambda sample: 1 / (rollouts * tokens_of_rollout[sample.rollout]),
        "token": lambda sample: 1 / all_tokens,
        "sample": lambda sample: 1 / (len(samples) * sample.trained),
    }[normalise]
    return [replace(sample, weight=weight(sample)) for sample in samples]
