"""A bucket of weights in the memory of a GPU, for the generator's process on the same GPU; nothing goes by the host.

The learner lays the tensors out in one buffer and exports it once (CUDA IPC, by torch's `reduce_tensor`); each
generator opens the buffer of the rank that shares its GPU, told apart by the GPU's UUID. torch counts who has a buffer
open across processes, one opening for each export; so the learner makes a new buffer for each bucket, and memory is
given back once both sides have let go of it. A process cannot open what it exported itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

ALIGN = 256
"""Bytes; what CUDA's own allocations are aligned to."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies in the buffer."""

    dtype: str
    places: dict[str, tuple[int, tuple[int, ...]]]
    """Name -> (first byte, shape)."""
    size: int
    """Bytes of the buffer."""

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: str) -> "Layout":
        places, end = {}, 0
        for name, shape in shapes:
            places[name] = (end, tuple(shape))
            end += -(-_bytes(shape, dtype) // ALIGN) * ALIGN
        return cls(dtype, places, end)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors, as parts of `buffer` (uint8 [size])."""
        return {name: buffer[start:start + _bytes(shape, self.dtype)].view(getattr(torch, self.dtype)).view(shape)
                for name, (start, shape) in self.places.items()}


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """What travels between the processes."""

    layout: Layout
    handles: dict[str, tuple]
    """UUID of a GPU -> torch's arguments for opening the buffer there."""
    tally: dict[str, tuple[int, int]]
    """What was counted of the tensors where they were gathered (`tally.py`)."""

    @property
    def bytes(self) -> int:
        return sum(_bytes(shape, self.layout.dtype) for _, shape in self.layout.places.values())

    def open(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors on `device`, for as long as any of them is referenced. Raises KeyError where no rank of the
        learner is on that GPU."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments: list[Any] = list(self.handles[uuid_of(device)])
        arguments[6] = device.index  # each process has a number of its own for the same GPU
        return self.layout.views(rebuild_cuda_tensor(*arguments))


def export(buffer: torch.Tensor) -> tuple[str, tuple]:
    """The handle of a buffer, with the UUID of its GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize(buffer.device)  # it is read from another stream
    return uuid_of(buffer.device), reduce_tensor(buffer)[1]


def uuid_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _bytes(shape: Iterable[int], dtype: str) -> int:
    return prod(shape) * getattr(torch, dtype).itemsize
