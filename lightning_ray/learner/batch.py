"""Which samples go into which micro-batch, and the arrays of one micro-batch (pure, deterministic).

A step is divided three times: samples into *updates* (by rollout), each update over *ranks*, each rank's share
into *micro-batches* of at most `budget` tokens, padding counted. Every rank has the same number of micro-batches;
where one has less to do, an empty one takes part in the collective operations and adds nothing. Since the loss is a
sum over tokens that carry their own weight, it does not depend on how samples are divided.

Where ranks read sequences together (`learner.sequence_parallel`), a team of them is one rank here, and each of its
ranks takes a `Part` of every packed micro-batch.

Two layouts of a micro-batch, `input_ids` [rows, width]:
  packed  one row, samples one after the other, no padding. For models whose only mixing of positions is attention
          (`attention.py` keeps samples apart).
  padded  one row a sample, padded on the right, rows of similar length together. For models with recurrent layers.
          Everything such a model does is causal, so padding on the right cannot reach a token.

Only what the loss needs is computed: a sample is cut before its last trained token (that one is predicted, never
read), samples without trained tokens are left out, and only positions that predict a trained token are projected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_ray.trajectory.samples import Sample

Layout = Literal["packed", "padded"]

MAX_PADDING = 0.05
"""Share of padding above which a padded micro-batch is not filled further."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Arrays of one micro-batch. N trained tokens of S samples; an empty one has S = 0 and one weightless token."""

    samples: tuple[int, ...]
    """Indices into the samples of the step."""
    input_ids: np.ndarray
    """int64 [rows, width]."""
    position_ids: np.ndarray
    """int64 [rows, width], from 0 in each sample."""
    lengths: tuple[int, ...]
    """Tokens of each sample that are read. In a packed row they follow each other in this order."""
    select: np.ndarray
    """int64 [N]: positions of the flattened `input_ids` that predict a trained token, sample by sample."""
    targets: np.ndarray
    """int64 [N]: the trained tokens."""
    behaviour: np.ndarray
    """float32 [N]."""
    versions: np.ndarray
    """int32 [N], as `whole_versions` says."""
    advantages: np.ndarray
    """float32 [N]."""
    weights: np.ndarray
    """float32 [N]."""
    segments: np.ndarray
    """int64 [N]: position in `samples`."""

    @property
    def tokens(self) -> int:
        """Tokens read, without padding."""
        return sum(self.lengths) if self.samples else 0


def whole_versions(versions: np.ndarray) -> np.ndarray:
    """int32 [T]: the policy version that a sampled token's log-prob depends on, from the versions that sampled (int32
    [T], -1 where none did). -1 too where an answer went on after an update: its later tokens were sampled on a KV cache
    that older weights had filled, so that no one policy gives their log-probs."""
    starts = np.flatnonzero((versions >= 0) & (np.r_[-1, versions[:-1]] < 0))
    if not len(starts):
        return versions.astype(np.int32)
    answer = np.maximum(np.searchsorted(starts, np.arange(len(versions)), side="right") - 1, 0)
    return np.where(versions == versions[starts[answer]], versions, -1).astype(np.int32)


def read_length(sample: Sample) -> int:
    """Tokens that must be read to predict all trained ones: all before the last trained one; 0 where none is trained.

    Raises ValueError where the first token is trained: nothing predicts it.
    """
    trained = np.flatnonzero(sample.loss_mask)
    if not len(trained):
        return 0
    if trained[0] == 0:
        raise ValueError(f"a sample of rollout {sample.rollout} trains its first token, which nothing predicts")
    return int(trained[-1])


def split_updates(samples: Sequence[Sample], updates: int) -> list[list[int]]:
    """Indices of the samples of each update. The samples of one rollout stay together; rollouts go round robin, so
    that those of one group spread. Fewer rollouts than updates give fewer updates. What trains nothing is in none.
    """
    members: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        if read_length(sample):
            members.setdefault(sample.rollout, []).append(index)
    parts: list[list[int]] = [[] for _ in range(min(updates, len(members)))]
    for turn, rollout in enumerate(sorted(members)):
        parts[turn % updates].extend(members[rollout])
    return parts


def update_scale(samples: Sequence[Sample], part: Sequence[int]) -> float:
    """What the weights of one update are multiplied by, so that its tokens weigh together what those of the whole
    step do: with weights 1/(R n) that is a mean over the rollouts of the update instead of all R."""

    def mass(indices: Sequence[int]) -> float:
        return sum(samples[i].weight * samples[i].trained for i in indices)

    return mass(range(len(samples))) / mass(part)


def plan(
    lengths: Sequence[int], indices: Sequence[int], *, ranks: int, budget: int, layout: Layout
) -> list[list[tuple[int, ...]]]:
    """Micro-batches of each rank, as tuples of sample indices; () is an empty one.

    `lengths` are of all samples, `indices` says which ones to place. A sample longer than `budget` goes alone.
    """
    shares = [_micro_batches(lengths, share, budget, layout) for share in _shares(lengths, indices, ranks)]
    count = max(map(len, shares))
    return [share + [()] * (count - len(share)) for share in shares]


def _shares(lengths: Sequence[int], indices: Sequence[int], ranks: int) -> list[list[int]]:
    """Longest first, each to the rank with the least so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += lengths[index]
    return shares


def _micro_batches(lengths: Sequence[int], share: Sequence[int], budget: int, layout: Layout) -> list[tuple[int, ...]]:
    """`share` comes longest first."""
    if layout == "packed":
        return _best_fit(lengths, share, budget)
    batches: list[list[int]] = []
    for index in share:
        if batches and _room(lengths, [*batches[-1], index], budget):
            batches[-1].append(index)
        else:
            batches.append([index])
    return [tuple(batch) for batch in batches]


def _best_fit(lengths: Sequence[int], share: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    batches: list[list[int]] = []
    free: list[int] = []
    for index in share:
        fitting = [(free[b] - lengths[index], b) for b in range(len(batches)) if free[b] >= lengths[index]]
        if fitting:
            left, b = min(fitting)
            batches[b].append(index)
            free[b] = left
        else:
            batches.append([index])
            free.append(budget - lengths[index])
    return [tuple(sorted(batch)) for batch in batches]


def _room(lengths: Sequence[int], batch: Sequence[int], budget: int) -> bool:
    area = len(batch) * lengths[batch[0]]
    return area <= budget and area - sum(lengths[i] for i in batch) <= MAX_PADDING * area


def build(samples: Sequence[Sample], indices: Sequence[int], *, layout: Layout, scale: float = 1.0) -> MicroBatch:
    """The arrays of one micro-batch; no indices give the empty one. `scale` multiplies the weights."""
    if not indices:
        return _empty()
    rows = [samples[i] for i in indices]
    lengths = [read_length(sample) for sample in rows]
    width = sum(lengths) if layout == "packed" else max(lengths)
    height = 1 if layout == "packed" else len(rows)
    input_ids = np.zeros(height * width, dtype=np.int64)
    position_ids = np.zeros_like(input_ids)
    starts = np.cumsum([0, *lengths[:-1]]) if layout == "packed" else np.arange(height) * width
    select = []
    trained = [np.flatnonzero(sample.loss_mask) for sample in rows]
    for sample, start, length, where in zip(rows, starts, lengths, trained, strict=True):
        input_ids[start : start + length] = sample.token_ids[:length]
        position_ids[start : start + length] = np.arange(length)
        select.append(start + where - 1)
    if layout == "padded":
        position_ids = np.tile(np.arange(width), height)
    counts = [len(where) for where in trained]
    gathered = list(zip(rows, trained, strict=True))
    return MicroBatch(
        samples=tuple(indices),
        input_ids=input_ids.reshape(height, width),
        position_ids=position_ids.reshape(height, width),
        lengths=tuple(lengths),
        select=np.concatenate(select).astype(np.int64),
        targets=np.concatenate([sample.token_ids[where] for sample, where in gathered]).astype(np.int64),
        behaviour=np.concatenate([sample.logprobs[where] for sample, where in gathered]).astype(np.float32),
        versions=np.concatenate([whole_versions(sample.versions)[where] for sample, where in gathered]),
        advantages=np.repeat(np.array([s.advantage for s in rows], dtype=np.float32), counts),
        weights=np.repeat(np.array([s.weight * scale for s in rows], dtype=np.float32), counts),
        segments=np.repeat(np.arange(len(rows)), counts),
    )


def _empty() -> MicroBatch:
    one, nothing = np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int64)
    zero = np.zeros(1, dtype=np.float32)
    return MicroBatch((), one, one, (1,), nothing, nothing, zero, np.full(1, -1, np.int32), zero, zero, nothing)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank of a team reads of a packed micro-batch. Names as in `MicroBatch`."""

    input_ids: np.ndarray
    """int64 [1, width]: `width` is the same on all ranks of a team."""
    position_ids: np.ndarray
    lengths: tuple[int, ...]
    """Of all samples of the whole micro-batch; what fills it up to a multiple of the team is a sample of its own."""
    select: np.ndarray
    """int64, positions in this part. A part that predicts no trained token still selects one, so that its rank takes
    part in the backward pass."""
    targets: np.ndarray
    own: np.ndarray
    """int64 [n]: which of the N trained tokens of the micro-batch this part predicts."""


def part_of(batch: MicroBatch, position: int, size: int) -> Part:
    """The part of rank `position` in a team of `size`."""
    width = batch.input_ids.shape[1]
    share = -(-width // size)
    filling = share * size - width
    here = slice(position * share, (position + 1) * share)
    own = np.flatnonzero((batch.select >= here.start) & (batch.select < here.stop))
    select, targets = batch.select[own] - here.start, batch.targets[own]
    nothing = np.zeros(1, dtype=np.int64)
    return Part(
        input_ids=np.pad(batch.input_ids, ((0, 0), (0, filling)))[:, here],
        position_ids=np.concatenate([batch.position_ids, np.arange(filling)[None]], axis=1)[:, here],
        lengths=batch.lengths + ((filling,) if filling else ()),
        select=select if len(own) else nothing,
        targets=targets if len(own) else nothing,
        own=own,
    )
