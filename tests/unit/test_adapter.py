"""Adapters on tiny models of each architecture: what is published is the model that computes, under its own names."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_ray.config import LoraSettings
from lightning_ray.learner.adapter import add_adapter, published, switched_off
from tests.tiny_models import make_config

IDS = torch.arange(3, 40)[None]


def made(architecture: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(architecture)).eval()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_5"])
def test_merged_weights_make_the_same_model(architecture: str) -> None:
    start, policy = made(architecture), made(architecture)
    add_adapter(policy, LoraSettings(rank=3, alpha=5))
    with torch.no_grad():
        assert torch.equal(policy(IDS).logits, start(IDS).logits)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        assert trained
        for parameter in trained:
            parameter.normal_(std=0.1)
        moved = policy(IDS).logits
        assert (moved - start(IDS).logits).abs().max() > 0.01
        with switched_off(policy):
            torch.testing.assert_close(policy(IDS).logits, start(IDS).logits)
        assert torch.equal(policy(IDS).logits, moved)
        weights = {weight.name: weight for weight in published(policy)}
        own = dict(start.named_parameters())
        assert weights.keys() == own.keys()
        for name, parameter in own.items():
            assert weights[name].shape == tuple(parameter.shape)
            parameter.copy_(weights[name].value())
        torch.testing.assert_close(start(IDS).logits, moved, rtol=1e-4, atol=1e-4)


def test_adapters_have_the_dtype_of_the_model_and_are_the_same_on_every_rank() -> None:
    first, second = made("qwen3").to(torch.bfloat16), made("qwen3").to(torch.bfloat16)
    add_adapter(first, LoraSettings(rank=2))
    torch.manual_seed(17)
    add_adapter(second, LoraSettings(rank=2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one.dtype == torch.bfloat16 and torch.equal(one, other)
