"""Does the engine hold exactly the weights that were sent? An order-free checksum that layouts cannot hide from.

An engine fuses (q, k, v into one matrix), pads the vocabulary, and on the CPU packs matrices into opaque buffers, so
neither names nor byte order survive loading. What survives is the multiset of values in each column of the last
dimension. A `Tally` is, for each layer, the sum of the values' float32 bit patterns modulo 2**64 and the number of
non-zero values: whatever fuses rows, permutes or zero-pads leaves it alone, and a tensor that is stale, missing or
changed in any bit does not. It cannot see two values that changed places; that is left to the log-prob gap that every
step measures.

Matrices that were packed away are read back through the function that the engine computes with: a one-hot input
gives one column of the matrix exactly (one product by 1, plus zeros). That costs a prompt of as many tokens as there
are columns. Where matrices are packed (on the CPU), those wider than `WHOLE` are therefore compared in about `COLUMNS`
evenly spaced columns, others at each `turn`: what is stale or missing is seen at once, a single wrong value when its
column's turn comes. All else is compared whole.

Negative zero counts as zero, since a product with it loses its sign.
"""

from collections.abc import Iterable

import torch

from lightning_ray.learner.buckets import layer_of

CHUNK = 1 << 22
"""Values that are widened to float32 at once: bounds the extra memory to some tens of MB."""
WHOLE = 384
"""Matrices of up to so many columns are always compared whole."""
COLUMNS = 64
"""Columns of a wider matrix that are compared at one turn, or up to twice as many."""

Tally = dict[str, tuple[int, int]]
"""Layer index (`-` for what belongs to none) -> (sum of bit patterns modulo 2**64, number of non-zero values)."""


class Unreadable(Exception):
    """This engine's layout cannot be read back; the message says which module and why."""


class Damaged(Exception):
    """The engine computes with something that is no copy of any weights; the message names the module."""


def columns(width: int, turn: int | None) -> slice:
    """Which columns of a last dimension of `width` are compared at this turn; None: all."""
    if turn is None:
        return slice(None)
    stride = 1 if width <= WHOLE else width // COLUMNS
    return slice(turn % stride, None, stride)


def add(tally: Tally, name: str, tensor: torch.Tensor, turn: int | None = None) -> None:
    """Count one tensor (any dtype that float32 holds exactly, any device) into its layer."""
    _count(tally, name, tensor if tensor.ndim < 2 else tensor[..., columns(tensor.shape[-1], turn)])


def _count(tally: Tally, name: str, tensor: torch.Tensor) -> None:
    total, nonzero = tally.get(layer_of(name), (0, 0))
    for chunk in tensor.detach().reshape(-1).split(CHUNK):
        values = chunk.float() + 0.0
        total += int(values.view(torch.int32).sum(dtype=torch.int64))
        nonzero += int(torch.count_nonzero(values))
    tally[layer_of(name)] = (total % 2**64, nonzero)


def tally_of(tensors: Iterable[tuple[str, torch.Tensor]], turn: int | None = None) -> Tally:
    """The tally of tensors as the learner sends them."""
    tally: Tally = {}
    for name, tensor in tensors:
        add(tally, name, tensor, turn)
    return tally


def tally_held(model: torch.nn.Module, turn: int | None = None) -> Tally:
    """The tally of the weights that `model` (a vLLM model) computes with.

    A matrix that is kept both plain and packed (a language-model head) is read back and compared with the plain one.
    Raises `Unreadable` for layouts that are not the checkpoint's values (quantised, packed experts), and `Damaged`
    where a packed copy differs from the plain matrix beside it or holds values that are not finite.
    """
    tally: Tally = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        _check_readable(name, module)
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                add(tally, f"{name}.{own}", parameter, turn)
        if hasattr(module, "cpu_linear"):
            packed = _read_back(name, module, turn)
            if not module.weight.numel():
                _count(tally, f"{name}.weight", packed)
            elif not torch.equal(packed, module.weight[:, columns(module.weight.shape[1], turn)]):
                raise Damaged(f"{name}: the packed copy of the weight differs from the weight itself")
    return tally


def _check_readable(name: str, module: torch.nn.Module) -> None:
    method = getattr(module, "quant_method", None)
    if method is None or type(method).__name__.startswith(("UnquantizedLinear", "UnquantizedEmbedding")):
        return
    raise Unreadable(f"{name} keeps its weights by {type(method).__name__}")


def _read_back(name: str, module: torch.nn.Module, turn: int | None) -> torch.Tensor:
    """[N, columns of this turn]: of the matrix [N, K] that lives in `module.cpu_linear`."""
    plain = module.weight
    width = plain.shape[1] if plain.numel() else getattr(module, "input_size_per_partition", None) or module.input_size
    wanted = torch.arange(width)[columns(width, turn)]
    one_hot = torch.zeros(len(wanted), width, dtype=plain.dtype)
    one_hot[torch.arange(len(wanted)), wanted] = 1
    found = module.cpu_linear(one_hot, plain, None).T
    if not torch.isfinite(found).all():
        raise Damaged(f"{name}: the weight holds values that are not finite")
    return found


def difference(sent: Tally, held: Tally) -> str:
    """Empty where the two agree; else which layers do not, with both counts."""
    layers = sorted({*sent, *held}, key=lambda layer: (len(layer), layer))
    wrong = [layer for layer in layers if sent.get(layer, (0, 0)) != held.get(layer, (0, 0))]
    return "; ".join(
        f"layer {layer}: sent sum {sent.get(layer, (0, 0))[0]:#x} of {sent.get(layer, (0, 0))[1]} non-zero values, "
        f"held {held.get(layer, (0, 0))[0]:#x} of {held.get(layer, (0, 0))[1]}" for layer in wrong
    )
