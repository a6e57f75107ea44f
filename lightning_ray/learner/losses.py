"""Policy losses: small functions of log-probs and advantages, one value per trained token (pure).

Symbols, all of shape [N], N trained tokens of whole samples:
  lp     log pi(token), the policy that is trained (the only one with a gradient)
  prox   log-prob under the proximal policy, the one that the trust region is measured from
  mu     behaviour log-prob, recorded when the token was sampled
  A      advantage of the token's rollout

`policy_loss` is what the learner calls. It multiplies a loss by the importance weight w of the proximal
against the behaviour policy, so that the expectation is one over the proximal policy although the tokens came
from the behaviour policy: w = pi_prox / mu, truncated (`tis_cap`), without gradient.
This is the decoupled objective of Hilton et al., "Batch size-invariance for policy optimization" (NeurIPS 2022),
section 3, with the weight truncated.

`algorithm.proximal` says which policy is the proximal one:
  recomputed  the learner's own weights before the first update of the step. The ratio pi / pi_prox is then 1 at the
              first update (nothing is clipped there); staleness and the numerical difference between generator and
              learner are corrected by w.
  behaviour   the policy that sampled. The ratio is pi / mu and already holds the whole correction; w is
              exactly 1 and `tis_cap` has no effect. Nothing is corrected twice.

What a token counts in the sum (normalisation) is not decided here: see `Sample.weight`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ray.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of one micro-batch, samples whole. All of shape [N]."""

    logprobs: Tensor
    """log pi, with gradient."""
    behaviour: Tensor
    proximal: Tensor
    advantages: Tensor
    segments: Tensor
    """int64, sorted: which sample of the micro-batch a token belongs to, counted from 0."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss and diagnostics of each token, shape [N]."""

    loss: Tensor
    clipped: Tensor
    """bool: the trust region took (`ppo_clip`, `gspo`) or bounded (`cispo`) this token's gradient."""


def ppo_clip(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(lp - prox).

    Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; bounds of their own on each side as in
    Yu et al., "DAPO" (2025), eq. 10. A token is clipped where the second term is the smaller one: r > 1 + high with
    A > 0, or r < 1 - low with A < 0.
    """
    ratio = torch.exp(tokens.logprobs - tokens.proximal)
    return _clipped_surrogate(ratio, tokens.advantages, config.clip_low, config.clip_high)


LOSSES: dict[str, Callable[[Tokens, AlgorithmConfig], TokenLoss]] = {"ppo_clip": ppo_clip}


def policy_loss(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """The configured loss times the importance weight: w * loss."""
    result = LOSSES[config.loss](tokens, config)
    weight = importance_weight(tokens.proximal, tokens.behaviour, tis_cap=config.tis_cap)
    return TokenLoss(weight * result.loss, result.clipped)


def importance_weight(proximal: Tensor, behaviour: Tensor, *, tis_cap: float | None) -> Tensor:
    """w = min(exp(prox - mu), tis_cap), or 1 without a cap; shape [N], no gradient.

    Truncated importance sampling: Ionides, "Truncated Importance Sampling" (2008), per token. Where the proximal
    policy is the behaviour policy the result is exactly 1.
    """
    if tis_cap is None:
        return torch.ones_like(behaviour)
    return torch.exp(proximal - behaviour).detach().clamp(max=tis_cap)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return TokenLoss(-torch.minimum(unclipped, clipped), (clipped < unclipped).detach())
