"""Does the engine hold exactly the weights that were sent? An order-free checksum that layouts cannot hide from.

An engine fuses (q, k, v into one matrix), pads the vocabulary, and on the CPU packs matrices into opaque buffers, so
neither names nor byte order survive loading. What survives is the multiset of values. A `Tally` is, for each layer,
the sum of all values' float32 bit patterns modulo 2**64 and the number of non-zero values: whatever fuses, permutes
or zero-pads leaves it alone, and a tensor that is stale, missing or changed in any bit does not. It cannot see two
values that changed places; that is left to the log-prob gap that every step measures.

Matrices that were packed away are read back through the function that the engine computes with: a one-hot input
gives one column of the matrix exactly (one product by 1, plus zeros).

Negative zero counts as zero, since a product with it loses its sign.
"""

from collections.abc import Iterable, Iterator

import torch

CHUNK = 1 << 22
"""Values that are widened to float32 at once: bounds the extra memory to some tens of MB."""
PROBE_ROWS = 256
"""One-hot rows that are pushed through a packed matrix at once."""

Tally = dict[str, tuple[int, int]]
"""Layer index (`-` for what belongs to none) -> (sum of bit patterns modulo 2**64, number of non-zero values)."""


class Unreadable(Exception):
    """This engine's layout cannot be read back; the message says which module and why."""


class Damaged(Exception):
    """The engine computes with something that is no copy of any weights; the message names the module."""


def layer_of(name: str) -> str:
    """The first integer among the segments of a parameter's name: the same in checkpoints and in the engine."""
    return next((part for part in name.split(".") if part.isdigit()), "-")


def add(tally: Tally, name: str, tensor: torch.Tensor) -> None:
    """Count one tensor (any dtype that float32 holds exactly, any device) into its layer."""
    total, nonzero = tally.get(layer_of(name), (0, 0))
    for chunk in tensor.detach().reshape(-1).split(CHUNK):
        values = chunk.float() + 0.0
        total += int(values.view(torch.int32).sum(dtype=torch.int64))
        nonzero += int(torch.count_nonzero(values))
    tally[layer_of(name)] = (total % 2**64, nonzero)


def tally_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Tally:
    tally: Tally = {}
    for name, tensor in tensors:
        add(tally, name, tensor)
    return tally


def held(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that `model` (a vLLM model) computes with, as `(name, tensor)`; a packed matrix comes in strips.

    A matrix that is kept both plain and packed (a language-model head) is read back and compared with the plain one.
    Raises `Unreadable` for layouts that are not the checkpoint's values (quantised, packed experts), and `Damaged`
    where a packed copy differs from the plain matrix beside it or holds values that are not finite.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        _check_readable(name, module)
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{own}", parameter
        if hasattr(module, "cpu_linear"):
            plain = module.weight if module.weight.numel() else None
            for start, strip in _read_back(name, module):
                if plain is None:
                    yield f"{name}.weight", strip
                elif not torch.equal(strip, plain[:, start:start + strip.shape[1]]):
                    raise Damaged(f"{name}: the packed copy of the weight differs from the weight itself")


def _check_readable(name: str, module: torch.nn.Module) -> None:
    method = getattr(module, "quant_method", None)
    if method is None or type(method).__name__.startswith(("UnquantizedLinear", "UnquantizedEmbedding")):
        return
    raise Unreadable(f"{name} keeps its weights by {type(method).__name__}")


def _read_back(name: str, module: torch.nn.Module) -> Iterator[tuple[int, torch.Tensor]]:
    """Strips `(first column, [N, columns])` of a matrix [N, K] that lives in `module.cpu_linear`."""
    plain = module.weight
    width = plain.shape[1] if plain.numel() else getattr(module, "input_size_per_partition", None) or module.input_size
    for start in range(0, width, PROBE_ROWS):
        rows = min(PROBE_ROWS, width - start)
        one_hot = torch.zeros(rows, width, dtype=plain.dtype)
        one_hot[torch.arange(rows), start + torch.arange(rows)] = 1
        columns = module.cpu_linear(one_hot, plain, None).T
        if not torch.isfinite(columns).all():
            raise Damaged(f"{name}: the weight holds values that are not finite")
        yield start, columns


def difference(sent: Tally, held: Tally) -> str:
    """Empty where the two agree; else which layers do not, with both counts."""
    layers = sorted({*sent, *held}, key=lambda layer: (len(layer), layer))
    wrong = [layer for layer in layers if sent.get(layer, (0, 0)) != held.get(layer, (0, 0))]
    return "; ".join(
        f"layer {layer}: sent sum {sent.get(layer, (0, 0))[0]:#x} of {sent.get(layer, (0, 0))[1]} non-zero values, "
        f"held {held.get(layer, (0, 0))[0]:#x} of {held.get(layer, (0, 0))[1]}" for layer in wrong
    )
