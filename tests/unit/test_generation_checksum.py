"""The order-free checksum: blind to layout, and to nothing else. And what an engine packs away."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.generator.checksum import Damaged, Packing, Unreadable, columns, tally_held
from lightning_ray.learner.tally import CHUNK, difference, merge, tally_of

SEEDS = st.integers(0, 2**32 - 1)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(SEEDS)
def test_fusing_permuting_and_padding_change_nothing(seed):
    q, k = random(seed, 8, 4), random(seed + 1, 4, 4)
    fused = torch.cat([k, torch.zeros(3, 4), q]).T.contiguous()
    sent = tally_of([("model.layers.3.q.weight", q), ("model.layers.3.k.weight", k)])
    assert difference(sent, tally_of([("decoder.layers.3.qk.weight", fused)])) == ""


@given(SEEDS, st.integers(0, 31), st.integers(0, 15), st.sampled_from([torch.bfloat16, torch.float32]))
def test_any_changed_bit_shows(seed, index, bit, dtype):
    weight = random(seed, 8, 4, dtype=dtype)
    changed = weight.clone()
    changed.view(torch.int16).view(-1)[index] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert difference(tally_of([("layers.0.w", weight)]), tally_of([("layers.0.w", changed)])) != ""


def test_a_stale_layer_is_named():
    new = {"layers.0.w": random(0, 4, 4), "layers.1.w": random(1, 4, 4), "embed.weight": random(2, 4, 4)}
    sent, stale = tally_of(new.items()), tally_of({**new, "layers.1.w": random(9, 4, 4)}.items())
    assert "layer 1:" in difference(sent, stale) and "layer 0" not in difference(sent, stale)
    del new["embed.weight"]
    assert "layer -:" in difference(sent, tally_of(new.items()))


@given(SEEDS, st.sampled_from([torch.bfloat16, torch.float16]))
def test_the_same_values_in_a_wider_dtype_count_the_same(seed, dtype):
    weight = random(seed, 5, 7, dtype=dtype)
    assert tally_of([("w", weight)]) == tally_of([("w", weight.float())])


@given(SEEDS, st.lists(st.integers(1, CHUNK + 5), min_size=1, max_size=3))
def test_parts_and_buckets_add_up_to_the_whole(seed, cuts):
    weight = random(seed, sum(cuts))
    merged = {}
    for part in weight.split(cuts):
        merge(merged, tally_of([("w", part)]))
    assert merged == tally_of([("w", weight)])


class Packs:
    """Does what vLLM's methods for linear layers do on the CPU: the packed matrix is out of sight, and `keep` says
    whether the plain one stays beside it. `spoil` is done to what is packed."""

    def __init__(self, *, keep: bool, spoil=lambda matrix: matrix):
        self.keep, self.spoil = keep, spoil

    def process_weights_after_loading(self, module):
        matrix = self.spoil(module.weight.data.clone())
        module.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, matrix, bias)
        if not self.keep:
            module.weight = torch.nn.Parameter(matrix.new_empty(0), requires_grad=False)


Packs.__name__ = "UnquantizedLinearMethod"


def packed(matrix: torch.Tensor, **how) -> torch.nn.ModuleDict:
    """A model of one module, loaded."""
    head = torch.nn.Module()
    head.quant_method = Packs(**how)
    model = torch.nn.ModuleDict({"head": head})
    load(model, matrix)
    return model


def load(model: torch.nn.ModuleDict, matrix: torch.Tensor) -> None:
    model["head"].weight = torch.nn.Parameter(matrix, requires_grad=False)
    model["head"].quant_method.process_weights_after_loading(model["head"])


@given(SEEDS, st.sampled_from([torch.bfloat16, torch.float32]), st.sampled_from([3, 17, 300]), st.integers(0, 99),
       st.booleans())
def test_what_is_packed_away_counts_as_it_went_in(seed, dtype, width, turn, keep):
    model = packed(random(seed, 5, width, dtype=dtype), keep=keep)
    packing = Packing(model)
    packing.begin(turn)
    new = random(seed + 1, 5, width, dtype=dtype)
    load(model, new)
    assert packing.seen(model["head"])
    assert tally_held(model, packing) == tally_of([("head.weight", new)])


@pytest.mark.parametrize("keep", [True, False])
def test_a_matrix_that_is_not_packed_anew_is_stale(keep):
    model = packed(random(0, 5, 4), keep=keep)
    packing = Packing(model)
    load(model, random(1, 5, 4))
    assert tally_held(model, packing)
    packing.begin(1)
    assert not packing.seen(model["head"]) and packing.seen(torch.nn.Linear(2, 2))
    with pytest.raises(Damaged, match="head: it computes with a packed copy of older"):
        tally_held(model, packing)


@pytest.mark.parametrize("keep", [True, False])
def test_a_packed_copy_that_is_not_what_went_in_is_damage(keep):
    model = packed(random(0, 5, 40), keep=keep, spoil=lambda matrix: matrix.roll(1, 0))
    packing = Packing(model)
    load(model, random(1, 5, 40))
    with pytest.raises(Damaged, match="head: the packed copy"):
        tally_held(model, packing)


def test_a_single_value_that_was_packed_wrong_shows_when_its_columns_turn_comes():
    def spoil(matrix):
        matrix[3, 77] += 1
        return matrix

    model, found = packed(random(0, 5, 200), keep=False, spoil=spoil), []
    packing = Packing(model)
    for turn in range(200):
        packing.begin(turn)
        load(model, random(1, 5, 200))
        try:
            tally_held(model, packing)
        except Damaged:
            found.append(turn)
    assert found and all(77 in range(200)[columns(200, turn)] for turn in found)


def test_values_that_are_not_finite_are_damage():
    model = packed(random(0, 5, 4), keep=False)
    packing, matrix = Packing(model), random(1, 5, 4)
    matrix[2, 1] = float("nan")
    load(model, matrix)
    with pytest.raises(Damaged, match="not finite"):
        tally_held(model, packing)


@given(st.integers(1, 5000))
def test_all_columns_get_their_turn(width):
    turns = [range(width)[columns(width, turn)] for turn in range(width)]
    assert {column for some in turns for column in some} == set(range(width))
    assert all(some and len(some) <= 2 * 8 for some in turns)


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
