"""The order-free checksum: blind to layout, and to nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.generator.checksum import Damaged, Unreadable, columns, difference, tally_held, tally_of

SEEDS = st.integers(0, 2**32 - 1)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(SEEDS)
def test_fusing_permuting_and_padding_change_nothing(seed):
    q, k = random(seed, 8, 4), random(seed + 1, 4, 4)
    fused = torch.cat([k, torch.zeros(3, 4), q]).T.contiguous()
    sent = tally_of([("model.layers.3.q.weight", q), ("model.layers.3.k.weight", k)])
    assert difference(sent, tally_of([("decoder.layers.3.qk.weight", fused)])) == ""


@given(SEEDS, st.integers(0, 31), st.integers(0, 15))
def test_any_changed_bit_shows(seed, index, bit):
    weight = random(seed, 8, 4)
    changed = weight.clone()
    changed.view(torch.int16).view(-1)[index] ^= 1 << bit if bit < 15 else -(1 << 15)
    sent, other = tally_of([("layers.0.w", weight)]), tally_of([("layers.0.w", changed)])
    both_zero = weight.view(-1)[index] == 0 and changed.view(-1)[index] == 0
    assert (difference(sent, other) == "") == bool(both_zero)


def test_a_stale_layer_is_named():
    new = {"layers.0.w": random(0, 4, 4), "layers.1.w": random(1, 4, 4), "embed.weight": random(2, 4, 4)}
    sent, stale = tally_of(new.items()), tally_of({**new, "layers.1.w": random(9, 4, 4)}.items())
    assert "layer 1:" in difference(sent, stale) and "layer 0" not in difference(sent, stale)
    del new["embed.weight"]
    assert "layer -:" in difference(sent, tally_of(new.items()))


@given(SEEDS)
def test_the_same_values_in_a_wider_dtype_count_the_same(seed):
    weight = random(seed, 5, 7)
    assert tally_of([("w", weight)]) == tally_of([("w", weight.float())])


def test_negative_zero_is_zero():
    assert tally_of([("w", torch.tensor([-0.0, 1.0]))]) == tally_of([("w", torch.tensor([0.0, 1.0]))])


def test_tensors_longer_than_a_chunk_count_whole():
    weight = random(0, (1 << 22) + 5)
    assert tally_of([("w", weight)]) == tally_of([("w", weight[:100]), ("w", weight[100:])])


class Packed(torch.nn.Module):
    """A module as the engine has it on the CPU: the matrix lives in a closure, `weight` is empty or a plain twin."""

    def __init__(self, matrix: torch.Tensor, plain: torch.Tensor | None = None):
        super().__init__()
        self.input_size = matrix.shape[1]
        kept = torch.empty(0, dtype=matrix.dtype) if plain is None else plain
        self.weight = torch.nn.Parameter(kept, requires_grad=False)
        self.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, matrix, bias)


@given(SEEDS, st.sampled_from([torch.bfloat16, torch.float32]), st.sampled_from([3, 256, 300]), st.integers(0, 9))
def test_a_packed_matrix_is_read_back_exactly(seed, dtype, width, turn):
    matrix = random(seed, 5, width, dtype=dtype)
    found = tally_held(torch.nn.ModuleDict({"head": Packed(matrix)}), turn)
    assert found == tally_of([("head.weight", matrix)], turn)
    other = random(seed + 1, 5, width, dtype=dtype)
    assert found != tally_of([("head.weight", other)], turn)


@given(st.integers(1, 5000))
def test_all_columns_get_their_turn(width):
    turns = [range(width)[columns(width, turn)] for turn in range(width)]
    assert {column for some in turns for column in some} == set(range(width))
    assert all(some and len(some) <= 2 * 256 for some in turns)


@given(SEEDS, st.integers(0, 9))
def test_wide_matrices_fuse_as_narrow_ones_do(seed, turn):
    gate, up = random(seed, 6, 700), random(seed + 1, 6, 700)
    sent = tally_of([("layers.0.gate", gate), ("layers.0.up", up)], turn)
    assert sent == tally_of([("layers.0.gate_up", torch.cat([gate, up]))], turn)
    assert sent == tally_of([("layers.0.experts", torch.stack([gate, up]))], turn)
    stale = torch.cat([gate, random(seed + 2, 6, 700)])
    assert sent != tally_of([("layers.0.gate_up", stale)], turn)


def test_a_packed_copy_that_is_not_its_plain_twin_is_damage():
    old, new = random(0, 5, 4), random(1, 5, 4)
    assert tally_held(torch.nn.ModuleDict({"head": Packed(new, new)})) == tally_of([("head.weight", new)])
    with pytest.raises(Damaged, match="head: the packed copy"):
        tally_held(torch.nn.ModuleDict({"head": Packed(old, new)}))


def test_values_that_are_not_finite_are_damage():
    matrix = random(0, 5, 4)
    matrix[2, 1] = float("nan")
    with pytest.raises(Damaged, match="not finite"):
        tally_held(torch.nn.ModuleDict({"up": Packed(matrix)}))


def test_a_shared_parameter_counts_once():
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(4, 3, bias=False), "head": torch.nn.Linear(4, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    assert tally_held(model) == tally_of([("embed.weight", model["embed"].weight)])


def test_quantised_modules_cannot_be_read():
    class Fp8LinearMethod:
        pass

    model = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 3)})
    model["up"].quant_method = Fp8LinearMethod()
    with pytest.raises(Unreadable, match="up keeps its weights by Fp8LinearMethod"):
        tally_held(model)
