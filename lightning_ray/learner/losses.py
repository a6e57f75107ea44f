"""Policy losses: small functions of log-probs and advantages, one value per trained token (pure).

Symbols, all of shape [N], N trained tokens of whole samples:
  lp     log pi(token), the policy that is trained (the only one with a gradient)
  prox   log-prob under the proximal policy, the one that the trust region is measured from
  mu     behaviour log-prob, recorded when the token was sampled
  A      advantage of the token's rollout

`policy_loss` is what the learner calls. It multiplies a loss by the importance weight w of the proximal
against the behaviour policy, so that the expectation is one over the proximal policy although the tokens came
from the behaviour policy: w = pi_prox / mu, truncated (`tis_cap`) or masked (`mis_cap`), without gradient.
This is the decoupled objective of Hilton et al., "Batch size-invariance for policy optimization" (NeurIPS 2022),
section 3, with the weight bounded.

`algorithm.proximal` says which policy is the proximal one:
  recomputed  the learner's own weights before the first update of the step. The ratio pi / pi_prox is then 1 at the
              first update (nothing is clipped there); staleness and the numerical difference between generator and
              learner are corrected by w.
  behaviour   the policy that sampled. The ratio is pi / mu and already holds the whole correction; w is
              exactly 1 and neither `tis_cap` nor `mis_cap` has an effect. Nothing is corrected twice. (`reinforce`
              has no ratio: with this choice nothing corrects it.)

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
    reference: Tensor | None = None
    """Log-probs under the frozen reference policy; needed where `kl_coef` is above 0."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss and diagnostics of each token, shape [N]."""

    loss: Tensor
    clipped: Tensor
    """bool: the trust region took this token's gradient (`ppo_clip`, `gspo`) or bounded its ratio (`cispo`)."""
    capped: Tensor
    """bool: its importance weight was truncated (`tis_cap`), or it was masked (`mis_cap`)."""
    kl: Tensor
    """The k3 estimate of the KL divergence to the reference policy, without gradient; 0 where there is none."""


def ppo_clip(tokens: Tokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(lp - prox).

    Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; bounds of their own on each side as in
    Yu et al., "DAPO" (2025), eq. 10. A token is clipped where the second term is the smaller one: r > 1 + high with
    A > 0, or r < 1 - low with A < 0.
    """
    return _clipped_surrogate(torch.exp(tokens.logprobs - tokens.proximal), tokens.advantages, config)


def gspo(tokens: Tokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """`ppo_clip` with one ratio for a whole sample: s = exp(mean over its tokens of (lp - prox)).

    Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 7; written per token as its GSPO-token (eq. 14),
    s * pi / sg(pi), so that all samples of a rollout keep their weights. The gradient is the same.
    """
    difference = tokens.logprobs - tokens.proximal
    count = torch.bincount(tokens.segments).to(difference.dtype)
    total = torch.zeros_like(count).index_add(0, tokens.segments, difference.detach())
    mean = (total / count)[tokens.segments]
    ratio = torch.exp(mean + tokens.logprobs - tokens.logprobs.detach())
    return _clipped_surrogate(ratio, tokens.advantages, config)


def cispo(tokens: Tokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, 1 - low, 1 + high)) A lp with r = exp(lp - prox): bounded ratios, and a gradient for every token.

    MiniMax, "MiniMax-M1" (2025), eq. 4 and 5.
    """
    ratio = torch.exp(tokens.logprobs.detach() - tokens.proximal)
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -bounded * tokens.advantages * tokens.logprobs, bounded != ratio


def reinforce(tokens: Tokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-A lp. Williams, "Simple statistical gradient-following algorithms" (1992), theorem 1; A holds the baseline."""
    return -tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.logprobs, dtype=torch.bool)


LOSSES: dict[str, Callable[[Tokens, AlgorithmConfig], tuple[Tensor, Tensor]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}
"""Each gives the loss and whether the token was clipped, both [N]."""


def policy_loss(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """What the learner minimises: w * (the configured loss) + kl_coef * k3."""
    loss, clipped = LOSSES[config.loss](tokens, config)
    weight, capped = importance_weight(
        tokens.proximal, tokens.behaviour, tis_cap=config.tis_cap, mis_cap=config.mis_cap
    )
    loss = weight * loss
    kl = torch.zeros_like(loss)
    if config.kl_coef > 0:
        kl = k3(tokens.logprobs, tokens.reference)
        loss = loss + config.kl_coef * kl
    return TokenLoss(loss, clipped.detach(), capped, kl.detach())


def importance_weight(
    proximal: Tensor, behaviour: Tensor, *, tis_cap: float | None = None, mis_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """w from exp(prox - mu), and whether it was capped; both [N], no gradient.

    tis_cap  min(w, cap): truncated importance sampling, Ionides, "Truncated Importance Sampling" (2008).
    mis_cap  w where it is within [1 / cap, cap], else 0: the token does not train (masked importance sampling).
    neither  1: no correction.
    Where the proximal policy is the behaviour policy w is exactly 1.
    """
    weight = torch.exp(proximal - behaviour).detach()
    if tis_cap is not None:
        return weight.clamp(max=tis_cap), weight > tis_cap
    if mis_cap is not None:
        outside = (weight < 1 / mis_cap) | (weight > mis_cap)
        return weight.masked_fill(outside, 0.0), outside
    return torch.ones_like(weight), torch.zeros_like(weight, dtype=torch.bool)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(ref - lp) - (ref - lp) - 1, an estimate of KL(pi, ref) that is never negative; [N], with gradient.

    Schulman, "Approximating KL Divergence" (2020), the estimator k3; as a loss in Shao et al., "DeepSeekMath"
    (2024), eq. 4.
    """
    difference = reference - logprobs
    return torch.expm1(difference) - difference


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return -torch.minimum(unclipped, clipped), clipped < unclipped
