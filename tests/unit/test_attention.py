"""Packed attention against attention over each sample alone, written out."""

import math

import pytest
import torch
from transformers import LlamaConfig, Qwen3_5TextConfig, Qwen3Config

from lightning_ray.learner.attention import packable, packed_attention

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTHS = (5, 1, 9, 3)


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """[heads, T, D] of one sample -> [T, heads, D], position by position."""
    outputs = []
    for position in range(q.shape[1]):
        first = 0 if window is None else max(0, position + 1 - window)
        seen = slice(first, position + 1)
        heads = []
        for head in range(HEADS):
            keys, values = (t[head * KV_HEADS // HEADS, seen] for t in (k, v))
            weights = (keys @ q[head, position] / math.sqrt(DIM)).softmax(-1)
            heads.append(weights @ values)
        outputs.append(torch.stack(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize("window", [None, 4])
def test_each_token_sees_only_its_own_sample(window: int | None) -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(1, heads, total, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    got, _ = packed_attention(
        torch.nn.Module(), q, k, v, None, sample_lengths=LENGTHS, scaling=1 / math.sqrt(DIM), sliding_window=window
    )
    assert got.shape == (1, total, HEADS, DIM)
    parts = zip(*(tensor[0].split(LENGTHS, dim=1) for tensor in (q, k, v)), strict=True)
    wanted = torch.cat([alone(*part, window) for part in parts])
    torch.testing.assert_close(got[0], wanted)
    direction = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad((got[0] * direction).sum(), (q, k, v)),
        torch.autograd.grad((wanted * direction).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_mask_is_refused() -> None:
    tensor = torch.zeros(1, 2, 3, DIM)
    with pytest.raises(ValueError, match="not a mask"):
        packed_attention(torch.nn.Module(), tensor, tensor, tensor, torch.ones(3, 3), sample_lengths=(3,))


def test_only_models_of_attention_alone_are_packed() -> None:
    assert packable(LlamaConfig()) and packable(Qwen3Config())
    assert not packable(Qwen3_5TextConfig())
