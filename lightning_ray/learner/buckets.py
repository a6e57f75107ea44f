"""Which parameters travel together when weights are published, and what travels. `plan` is pure.

A publish is a sequence of buckets. While the engines load one, the next is gathered, where both have room; each is let
go of once it is loaded: a publish needs the memory of `limit` bytes, and not of the model. Engines fuse neighbouring
matrices of a layer, and hold on to what they have of a layer until it is complete: a layer is therefore never split,
and one that is too large is a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights in the memory of the host, as they travel through Ray's object store."""

    arrays: dict[str, tuple[np.ndarray, str, tuple[int, ...]]]
    """Name -> (bytes as uint8 [n], dtype name, shape)."""
    tally: dict[str, tuple[int, int]]
    """What was counted of them where they were gathered (`tally.py`)."""

    def open(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors, on `device`; on the CPU they are views of these arrays."""
        import torch

        return {name: torch.from_numpy(raw).view(getattr(torch, dtype)).view(shape).to(device)
                for name, (raw, dtype, shape) in self.arrays.items()}


@dataclass(frozen=True, slots=True)
class Load:
    """What one bucket will hold."""

    names: list[str]
    ahead: bool
    """The next one may be gathered while this one is loaded."""


def layer_of(name: str) -> str:
    """The first integer among the segments of a parameter's name: the same in checkpoints and in engines. `-` where
    there is none."""
    return next((part for part in name.split(".") if part.isdigit()), "-")


def plan(parameters: Iterable[tuple[str, int]], limit: int) -> list[Load]:
    """The loads, in the order of `parameters` (name, bytes). One holds as many whole neighbouring layers as half of
    `limit` bytes has room for, at least one, so that as a rule two have room at once."""
    loads: list[list[str]] = []
    sizes: list[int] = []
    for layer in _layers(parameters):
        size = sum(bytes_ for _, bytes_ in layer)
        if not loads or sizes[-1] + size > limit // 2:
            loads.append([])
            sizes.append(0)
        loads[-1] += [name for name, _ in layer]
        sizes[-1] += size
    return [Load(names, size + after <= limit)
            for names, size, after in zip(loads, sizes, [*sizes[1:], limit + 1], strict=False)]


def _layers(parameters: Iterable[tuple[str, int]]) -> Sequence[list[tuple[str, int]]]:
    layers: list[list[tuple[str, int]]] = []
    last = None
    for name, size in parameters:
        layer = layer_of(name)
        if layer != last:
            layers.append([])
        layers[-1].append((name, size))
        last = layer
    return layers
