"""An order-free checksum of weights, which the layout of whoever holds them does not change. Pure.

An engine fuses matrices (q, k, v into one), pads the vocabulary and has names of its own, so neither names nor places
survive loading. What survives is the multiset of values in each layer. A `Tally` is, for each layer, the sum of the
values' float32 bit patterns modulo 2**64 and the number of patterns that are not zero: whatever fuses, permutes,
zero-pads or widens leaves it alone, and a tensor that is stale, missing or changed in any bit does not. It cannot see
two values that changed places; that is left to the log-prob gap that every step measures.

The learner makes it of what it sends, once for all engines; each engine of what it computes with
(`generator/checksum.py`).
"""

from collections.abc import Iterable

import torch

from lightning_ray.learner.buckets import layer_of

CHUNK = 1 << 16
"""Values that are widened at once on the CPU: what stays in a core's cache is counted at the speed of memory."""
GPU_CHUNK = 1 << 24

Tally = dict[str, tuple[int, int]]
"""Layer index (`-` for what belongs to none) -> (sum of bit patterns modulo 2**64, number of patterns not zero)."""


def add(tally: Tally, name: str, tensor: torch.Tensor) -> None:
    """Count one tensor (any dtype that float32 holds exactly, any device) into its layer."""
    sums, counts, unit = [], [], 1
    for chunk in tensor.detach().reshape(-1).split(CHUNK if tensor.device.type == "cpu" else GPU_CHUNK):
        if chunk.dtype == torch.bfloat16:  # the upper half of a float32
            patterns, unit = chunk.view(torch.int16), 1 << 16
        else:
            patterns = chunk.float().view(torch.int32)
        sums.append(patterns.sum(dtype=torch.int64))
        counts.append(torch.count_nonzero(patterns))
    _add(tally, layer_of(name), int(torch.stack(sums).sum()) * unit, int(torch.stack(counts).sum()))


def merge(tally: Tally, other: Tally) -> None:
    """Count into `tally` what `other` has counted."""
    for layer, (total, nonzero) in other.items():
        _add(tally, layer, total, nonzero)


def _add(tally: Tally, layer: str, total: int, nonzero: int) -> None:
    before, count = tally.get(layer, (0, 0))
    tally[layer] = ((before + total) % 2**64, count + nonzero)


def tally_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Tally:
    tally: Tally = {}
    for name, tensor in tensors:
        add(tally, name, tensor)
    return tally


def difference(sent: Tally, held: Tally) -> str:
    """Empty where the two agree; else which layers do not, with both counts."""
    layers = sorted({*sent, *held}, key=lambda layer: (len(layer), layer))
    wrong = [layer for layer in layers if sent.get(layer, (0, 0)) != held.get(layer, (0, 0))]
    return "; ".join(
        f"layer {layer}: sent sum {sent.get(layer, (0, 0))[0]:#x} of {sent.get(layer, (0, 0))[1]} non-zero values, "
        f"held {held.get(layer, (0, 0))[0]:#x} of {held.get(layer, (0, 0))[1]}" for layer in wrong
    )
