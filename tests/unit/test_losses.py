"""Losses against a plain loop over tokens, and their gradients against finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.config import AlgorithmConfig
from lightning_ray.learner.losses import Tokens, importance_weight, policy_loss

LOW, HIGH, CAP = 0.2, 0.28, 2.0


def tokens(n: int, seed: int = 0, proximal: str = "recomputed", spread: float = 0.3) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return spread * torch.randn(n, generator=generator, dtype=torch.float64)

    behaviour = -torch.rand(n, generator=generator, dtype=torch.float64) * 4 - 0.1
    prox = behaviour.clone() if proximal == "behaviour" else behaviour + noise()
    segments = torch.arange(n) * 3 // n
    advantages = torch.tensor([1.3, -0.7, 0.4], dtype=torch.float64)[segments]
    return Tokens((prox + noise()).requires_grad_(), behaviour, prox, advantages, segments)


def loop_ppo_clip(t: Tokens, i: int) -> tuple[float, bool]:
    ratio = math.exp(t.logprobs[i].item() - t.proximal[i].item())
    advantage = t.advantages[i].item()
    unclipped = ratio * advantage
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH) * advantage
    return -min(unclipped, clipped), clipped < unclipped


REFERENCES = {"ppo_clip": loop_ppo_clip}


@pytest.mark.parametrize("proximal", ["recomputed", "behaviour"])
@pytest.mark.parametrize("name", REFERENCES)
def test_loss_equals_the_loop_over_tokens(name: str, proximal: str) -> None:
    t = tokens(60, proximal=proximal)
    result = policy_loss(t, AlgorithmConfig(loss=name, clip_low=LOW, clip_high=HIGH, tis_cap=CAP))
    for i in range(60):
        loss, clipped = REFERENCES[name](t, i)
        weight = min(math.exp(t.proximal[i].item() - t.behaviour[i].item()), CAP)
        assert result.loss[i].item() == pytest.approx(weight * loss, rel=1e-9, abs=1e-12)
        assert bool(result.clipped[i]) == clipped
    assert result.clipped.any() and not result.clipped.all()


@pytest.mark.parametrize("proximal", ["recomputed", "behaviour"])
@pytest.mark.parametrize("name", REFERENCES)
def test_gradient_equals_finite_differences(name: str, proximal: str) -> None:
    t = tokens(24, seed=1, proximal=proximal)
    config = AlgorithmConfig(loss=name, clip_low=LOW, clip_high=HIGH, tis_cap=CAP)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return policy_loss(Tokens(logprobs, t.behaviour, t.proximal, t.advantages, t.segments), config).loss

    assert torch.autograd.gradcheck(loss, (t.logprobs,), eps=1e-7, atol=1e-5)


def test_a_clipped_token_has_no_gradient() -> None:
    t = tokens(60)
    result = policy_loss(t, AlgorithmConfig(clip_low=LOW, clip_high=HIGH))
    (gradient,) = torch.autograd.grad(result.loss.sum(), t.logprobs)
    assert (gradient[result.clipped] == 0).all()
    assert (gradient[~result.clipped] != 0).all()


def test_clipping_bounds_only_the_side_that_the_advantage_pushes_to() -> None:
    behaviour = torch.zeros(4, dtype=torch.float64)
    logprobs = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64))
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    t = Tokens(logprobs, behaviour, behaviour, advantages, torch.arange(4))
    result = policy_loss(t, AlgorithmConfig(clip_low=0.2, clip_high=0.28))
    assert result.clipped.tolist() == [True, False, False, True]
    assert result.loss.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8])


@given(st.integers(0, 1000), st.one_of(st.none(), st.floats(1.0, 5.0)))
def test_behaviour_as_the_proximal_policy_is_never_corrected_twice(seed: int, cap: float | None) -> None:
    t = tokens(12, seed=seed, proximal="behaviour", spread=2.0)
    assert (importance_weight(t.proximal, t.behaviour, tis_cap=cap) == 1).all()


@given(st.integers(0, 1000), st.floats(1.0, 5.0))
def test_importance_weight_is_bounded_and_has_no_gradient(seed: int, cap: float) -> None:
    t = tokens(12, seed=seed, spread=2.0)
    weight = importance_weight(t.logprobs, t.behaviour, tis_cap=cap)
    assert ((weight >= 0) & (weight <= cap)).all()
    assert not weight.requires_grad


def test_at_the_first_update_the_gradient_is_the_truncated_policy_gradient() -> None:
    t = tokens(24, seed=3, spread=1.0)
    fresh = Tokens(t.logprobs, t.behaviour, t.logprobs.detach(), t.advantages, t.segments)
    result = policy_loss(fresh, AlgorithmConfig(tis_cap=CAP))
    (gradient,) = torch.autograd.grad(result.loss.sum(), t.logprobs)
    weight = torch.exp(t.logprobs.detach() - t.behaviour).clamp(max=CAP)
    torch.testing.assert_close(gradient, -weight * t.advantages)
    assert not result.clipped.any()
