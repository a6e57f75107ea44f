"""Log-probs of given tokens and the entropy, from hidden states, without ever holding all logits.

The vocabulary projection is done in chunks over positions, and again in the backward pass, so that the memory
is `CHUNK_LOGITS` float32 logits (times three) however many positions and however large the vocabulary. Logits,
log-probs and entropy are float32 (float64 for float64 input), of the distribution at the sampling temperature:
softmax(logits / temperature).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHUNK_LOGITS = 1 << 22
"""Logits held at once: 16 MiB in float32."""


class LogprobHead(nn.Module):
    """The output projection of a causal language model, asked for log-probs of tokens instead of logits.

    It shares its parameters with `projection` (tied to the embedding or not). DeepSpeed gathers the parameters
    of a module around its forward and its backward; since the whole computation happens in this module's forward,
    a projection partitioned by ZeRO-3 works like any other.
    """

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.weight = projection.weight
        self.bias = projection.bias

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """`hidden` [N, H], `targets` int64 [N] -> log-probs [N] (with gradient) and entropies [N] (without)."""
        return _Logprobs.apply(hidden, self.weight, self.bias, targets, 1.0 / temperature)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale):  # type: ignore[no-untyped-def]
        precision = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(targets), dtype=precision, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        wide = _widened(weight, precision)
        for part in _chunks(len(targets), weight.shape[0]):
            logits = _logits(hidden[part], wide, bias, scale, precision)
            normaliser[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normaliser[part]
            # entropy = log Z - E[logit]
            entropy[part] = normaliser[part] - logits.softmax(-1).mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.scale, ctx.precision = scale, precision
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        precision = ctx.precision
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precision) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=precision) if need_bias else None
        wide = _widened(weight, precision)
        for part in _chunks(len(targets), weight.shape[0]):
            # d logprob / d logits = onehot(target) - softmax
            scaled = (grad[part] * ctx.scale).unsqueeze(-1)
            logits = _logits(hidden[part], wide, bias, ctx.scale, precision)
            slope = logits.sub_(normaliser[part, None]).exp_().mul_(-scaled)
            slope.scatter_add_(-1, targets[part, None], scaled)
            if need_hidden:
                grad_hidden[part] = (slope.to(wide.dtype) @ wide).to(hidden.dtype)
            if need_weight:
                grad_weight.addmm_(slope.t(), hidden[part].to(precision))
            if need_bias:
                grad_bias += slope.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _chunks(positions: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(start, start + size) for start in range(0, positions, size)]


def _widened(weight: Tensor, precision: torch.dtype) -> Tensor:
    """The weight as the matrix product wants it: a GPU multiplies bfloat16 into float32, a CPU needs it widened."""
    return weight if weight.is_cuda else weight.to(precision)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, precision: torch.dtype) -> Tensor:
    if weight.dtype == precision:
        logits = hidden.to(precision) @ weight.t()
    else:
        logits = torch.mm(hidden, weight.t(), out_dtype=precision)
    if bias is not None:
        logits += bias
    return logits.mul_(scale)
