"""Which parameters travel together when weights are published. Pure.

A publish is a sequence of buckets; each is gathered, sent, loaded and let go of before the next, so that a publish
needs the memory of one bucket, and not of the model. Engines fuse neighbouring matrices of a layer, and hold on to what
they have of a layer until it is complete: a layer is therefore never split, and one that is larger than the limit is a
bucket of its own.
"""

from collections.abc import Iterable, Sequence


def layer_of(name: str) -> str:
    """The first integer among the segments of a parameter's name: the same in checkpoints and in engines. `-` where
    there is none."""
    return next((part for part in name.split(".") if part.isdigit()), "-")


def plan(parameters: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Names of each bucket, in the order of `parameters` (name, bytes). A bucket holds as many whole neighbouring
    layers as `limit` bytes have room for, at least one."""
    buckets: list[list[str]] = []
    room = 0
    for layer in _layers(parameters):
        size = sum(bytes_ for _, bytes_ in layer)
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1] += [name for name, _ in layer]
        room -= size
    return buckets


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
