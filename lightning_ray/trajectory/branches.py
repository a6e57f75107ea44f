"""Branches: calls whose prompts extend each other token for token (laws 2 and 3).

The calls of a rollout form a forest. A call continues the earlier call whose whole sequence (prompt + answer) is
the longest exact prefix of its own prompt; where there is none, it begins a branch. A branch is one path from a
root to a leaf. Paths that share a prefix share its calls: each call is *owned* by exactly one branch, the first
that runs through it, so that each sampled token is trained once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_ray.trajectory.call import Call


@dataclass(frozen=True, slots=True)
class Branch:
    """One path through the calls of a rollout, from a root to a leaf."""

    calls: tuple[int, ...]
    """Positions in the list of calls; each one's prompt starts with the previous one's prompt + answer."""
    owned: frozenset[int]
    """Those among `calls` whose sampled tokens this branch trains."""


def parents(calls: Sequence[Call]) -> list[int | None]:
    """For each call the position of the earlier call that it continues, or None.

    The record is not trusted: continuation is decided on token ids alone. Among several exact prefixes the
    longest wins, then the latest.
    """
    sequences = [np.concatenate([call.prompt_ids, call.sampled_ids]) for call in calls]
    found: list[int | None] = []
    for position, call in enumerate(calls):
        best: int | None = None
        for earlier in range(position):
            length = len(sequences[earlier])
            if length > len(call.prompt_ids) or (best is not None and length < len(sequences[best])):
                continue
            if np.array_equal(call.prompt_ids[:length], sequences[earlier]):
                best = earlier
        found.append(best)
    return found


def branches(calls: Sequence[Call]) -> list[Branch]:
    """All branches, in the order of their leaves. Every call is owned by exactly one of them."""
    parent = parents(calls)
    inner = {position for position in parent if position is not None}
    result: list[Branch] = []
    taken: set[int] = set()
    for leaf in range(len(calls)):
        if leaf in inner:
            continue
        path: list[int] = []
        position: int | None = leaf
        while position is not None:
            path.append(position)
            position = parent[position]
        owned = frozenset(path) - taken
        taken |= owned
        result.append(Branch(calls=tuple(reversed(path)), owned=owned))
    return result
