"""Does the engine compute with exactly the weights that were sent?

Parameters that lie open are counted where they lie, whole (`tally.py`). On the CPU vLLM packs the matrix of a linear
layer away and computes with the packed copy, which cannot be counted. There each matrix is looked at in the moment in
which it is packed (`Packing`): all that goes in is counted, and what came out is read back through the function that
the engine computes with, and must be equal. A one-hot input gives one column of the matrix exactly (one product by 1,
plus zeros), all columns would cost a prompt of as many tokens; so they take turns, `COLUMNS` in each publish, evenly
spaced: a packed copy that is stale, partial or of another matrix shows at once, a single value that was packed wrong
when its column's turn comes. A layer that was not packed anew in a publish is stale.
"""

import time
from functools import partial
from typing import Any

import torch

from lightning_ray.learner import tally as tallies
from lightning_ray.learner.tally import Tally

COLUMNS = 8
"""Columns of a packed matrix that are read back in one publish, or up to twice as many."""


class Unreadable(Exception):
    """This engine's layout cannot be read back; the message says which module and why."""


class Damaged(Exception):
    """The engine computes with something that is no copy of the weights that it was given; the message names the
    module."""


def columns(width: int, turn: int) -> slice:
    """Which columns of a matrix of `width` columns are read back at this turn."""
    stride = max(1, width // COLUMNS)
    return slice(turn % stride, None, stride)


class Packing:
    """Watches how `model` (a vLLM model, loaded) packs its matrices from now on. `begin` before each publish."""

    def __init__(self, model: torch.nn.Module):
        modules = {name: module for name, module in model.named_modules() if hasattr(module, "cpu_linear")}
        self._names = {id(module): name for name, module in modules.items()}
        for method in {id(module.quant_method): module.quant_method for module in modules.values()}.values():
            method.process_weights_after_loading = partial(self._pack, method.process_weights_after_loading)
        self.begin(0)

    def begin(self, turn: int) -> None:
        """Forget the last publish. `turn`: its number, which chooses the columns."""
        self._turn = turn
        self._packed: Tally = {}
        self._seen: set[str] = set()
        self._damage = ""
        self.seconds = 0.0
        """What looking has cost in this publish."""

    def seen(self, module: torch.nn.Module) -> bool:
        """Whether it was packed in this publish; True for a module that packs nothing."""
        name = self._names.get(id(module))
        return name is None or name in self._seen

    def tally(self) -> Tally:
        """Of the matrices that were packed away, as they went in. Raises `Damaged` where a packed copy is not what went
        in, or is an old one."""
        stale = [name for name in self._names.values() if name not in self._seen]
        if stale:
            raise Damaged(f"{stale[0]}: it computes with a packed copy of older weights")
        if self._damage:
            raise Damaged(self._damage)
        return self._packed

    def _pack(self, pack: Any, module: torch.nn.Module) -> None:
        given = module.weight.data
        pack(module)
        name = self._names.get(id(module))
        if name is None or not hasattr(module, "cpu_linear") or given.ndim != 2:
            return
        started = time.monotonic()
        self._seen.add(name)
        if not module.weight.numel():  # it lies open nowhere any more
            tallies.add(self._packed, f"{name}.weight", given)
        self._damage = self._damage or _damage(name, module, given, columns(given.shape[1], self._turn))
        self.seconds += time.monotonic() - started


def _damage(name: str, module: torch.nn.Module, given: torch.Tensor, which: slice) -> str:
    """What is wrong with the packed copy of `given` [N, K] in `module.cpu_linear`; empty where nothing is."""
    wanted = torch.arange(given.shape[1])[which]
    one_hot = torch.zeros(len(wanted), given.shape[1], dtype=given.dtype)
    one_hot[torch.arange(len(wanted)), wanted] = 1
    found = module.cpu_linear(one_hot, module.weight, None).T
    if not torch.isfinite(found).all():
        return f"{name}: the weight holds values that are not finite"
    return "" if torch.equal(found, given[:, which]) else f"{name}: the packed copy of the weight differs from it"


def tally_held(model: torch.nn.Module, packing: Packing | None = None) -> Tally:
    """The tally of the weights that `model` (a vLLM model) computes with; `packing` watched what it packed away.

    Raises `Unreadable` for layouts that are not the checkpoint's values (quantised, packed experts), and `Damaged` as
    `Packing.tally` does.
    """
    held: Tally = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        _check_readable(name, module)
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen and parameter.numel():
                seen.add(id(parameter))
                tallies.add(held, f"{name}.{own}", parameter)
    if packing is not None:
        tallies.merge(held, packing.tally())
    return held


def _check_readable(name: str, module: torch.nn.Module) -> None:
    method = getattr(module, "quant_method", None)
    if method is None or type(method).__name__.startswith(("UnquantizedLinear", "UnquantizedEmbedding")):
        return
    raise Unreadable(f"{name} keeps its weights by {type(method).__name__}")
