"""Which parameters travel together: whole layers, in order, within the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.learner.buckets import layer_of, plan

LAYERS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), max_size=12)


@pytest.mark.parametrize(("name", "layer"), [
    ("model.layers.12.mlp.experts.3.up_proj.weight", "12"), ("model.embed_tokens.weight", "-"),
    ("visual.blocks.0.w", "0"),
])
def test_layer_of_takes_the_outermost_index(name, layer):
    assert layer_of(name) == layer


def model(layers: list[list[int]]) -> list[tuple[str, int]]:
    return [(f"model.layers.{number}.part{part}.weight", size)
            for number, layer in enumerate(layers) for part, size in enumerate(layer)]


@given(LAYERS, st.integers(1, 200))
def test_everything_travels_once_in_order_and_layers_are_whole(layers, limit):
    parameters = model(layers)
    loads = plan(parameters, limit)
    assert [name for load in loads for name in load.names] == [name for name, _ in parameters]
    places = [{layer_of(name) for name in load.names} for load in loads]
    assert sum(map(len, places)) == len(layers), "a layer is in two buckets"
    sizes = dict(parameters)
    held = [sum(map(sizes.get, load.names)) for load in loads]
    assert all(size <= limit // 2 or len(place) == 1 for size, place in zip(held, places, strict=True))
    for size, after, load in zip(held, held[1:], loads, strict=False):
        assert load.ahead == (size + after <= limit), "two that are in memory at once have more than the limit"
    assert not any(load.ahead for load in loads[-1:]), "there is nothing after the last"


def test_a_bucket_is_as_full_as_whole_layers_make_it():
    parameters = [("embed", 30), *model([[5, 5], [10], [10], [40], [1]]), ("norm", 1), ("head", 30)]
    loads = plan(parameters, 100)
    assert [len(load.names) for load in loads] == [4, 2, 3]
    assert [load.ahead for load in loads] == [True, True, False]
    assert [load.ahead for load in plan(parameters, 70)] == [True, True, False, False]
    assert len(plan(parameters, 1000)) == 1
    assert plan([], 10) == []
