"""Where tensors lie in a shared buffer. That another process can open one is for GPUs (test_policy_group.py)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.learner.sharing import ALIGN, Layout, SharedBucket

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=6)


@given(SHAPES, st.sampled_from(["bfloat16", "float16", "float32"]))
def test_what_is_laid_out_is_found_again(shapes, dtype):
    named = [(f"w{number}", shape) for number, shape in enumerate(shapes)]
    layout = Layout.of(named, dtype)
    buffer = torch.zeros(layout.size, dtype=torch.uint8)
    wanted = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, shape in named}
    for name, view in layout.views(buffer).items():
        view.copy_(wanted[name])
    found = layout.views(buffer.clone())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) and found[name].shape == wanted[name].shape for name in wanted)
    assert all(start % ALIGN == 0 for start, _ in layout.places.values())
    assert SharedBucket(layout, {}, {}).bytes == sum(tensor.nbytes for tensor in wanted.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_are_rounded_to_the_layouts_dtype(dtype):
    layout = Layout.of([("w", (3,))], dtype)
    view = layout.views(torch.zeros(layout.size, dtype=torch.uint8))["w"]
    view.copy_(torch.tensor([1.0, 1.001, -2.5]))
    assert torch.equal(view, torch.tensor([1.0, 1.001, -2.5]).to(getattr(torch, dtype)))
