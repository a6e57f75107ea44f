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
    buckets = plan(parameters, limit)
    assert [name for bucket in buckets for name in bucket] == [name for name, _ in parameters]
    places = [{layer_of(name) for name in bucket} for bucket in buckets]
    assert sum(map(len, places)) == len(layers), "a layer is in two buckets"
    sizes = dict(parameters)
    for bucket, held in zip(buckets, places, strict=True):
        assert sum(map(sizes.get, bucket)) <= limit or len(held) == 1


def test_a_bucket_is_as_full_as_whole_layers_make_it():
    parameters = [("embed", 30), *model([[5, 5], [10], [10], [40], [1]]), ("norm", 1), ("head", 30)]
    assert [len(bucket) for bucket in plan(parameters, 50)] == [4, 2, 3]
    assert len(plan(parameters, 1000)) == 1
    assert plan([], 10) == []
