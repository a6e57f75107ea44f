"""Causal attention over packed samples: each token sees only its own sample, and nothing is computed for the rest.

Registered with transformers under the name `PACKED`. The lengths of the samples come as the keyword argument
`sample_lengths` of the model's forward, which transformers hands through to its attention function. A mask over a
whole packed row would cost its square; one call a sample costs what the samples cost.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

PACKED = "lightning_ray_packed"

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def packable(config: PreTrainedConfig) -> bool:
    """Whether attention is the only place where positions of this model mix, so that samples can be packed."""
    return set(getattr(config, "layer_types", None) or ()) <= _ATTENTION_LAYERS and config.model_type in _PACKABLE


_PACKABLE = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}
"""Architectures whose attention goes through transformers' interface and that have no other mixing of positions."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sample_lengths: tuple[int, ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """`query` [1, heads, T, D], `key` and `value` [1, kv_heads, T, D], T = sum(sample_lengths) -> [1, T, heads, D]."""
    if attention_mask is not None:
        raise ValueError("packed attention takes sample_lengths, not a mask")
    grouped = query.shape[1] != key.shape[1]
    parts = [tensor.split(list(sample_lengths), dim=2) for tensor in (query, key, value)]
    outputs = []
    for length, q, k, v in zip(sample_lengths, *parts, strict=True):
        mask = _window(length, sliding_window, query.device)
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _window(length: int, size: int | None, device: torch.device) -> Tensor | None:
    """The mask of a sliding window, where the sample is longer than that."""
    if size is None or length <= size:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < size)


AttentionInterface.register(PACKED, packed_attention)
