"""Losses against a plain loop over tokens, and their gradients against finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.config import AlgorithmConfig
from lightning_ray.learner.logprobs import LogprobHead
from lightning_ray.learner.losses import LOSSES, Tokens, importance_weight, k3, policy_loss

LOW, HIGH, CAP = 0.2, 0.28, 2.0


def tokens(n: int, seed: int = 0, proximal: str = "recomputed", spread: float = 0.3) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return spread * torch.randn(n, generator=generator, dtype=torch.float64)

    behaviour = -torch.rand(n, generator=generator, dtype=torch.float64) * 4 - 0.1
    prox = behaviour.clone() if proximal == "behaviour" else behaviour + noise()
    segments = torch.arange(n) * 8 // n
    advantages = torch.tensor([1.3, -0.7, 0.4, 1.1, -1.2, -0.3, 0.9, -0.8], dtype=torch.float64)[segments]
    drift = 0.5 * spread * torch.tensor([1, -1, 0.1, -1, 1, -0.1, 1, -1], dtype=torch.float64)[segments]
    return Tokens((prox + noise() + drift).requires_grad_(), behaviour, prox, advantages, segments, prox + noise())


def with_logprobs(t: Tokens, logprobs: torch.Tensor) -> Tokens:
    return Tokens(logprobs, t.behaviour, t.proximal, t.advantages, t.segments, t.reference)


def config(**fields) -> AlgorithmConfig:
    return AlgorithmConfig(**{"clip_low": LOW, "clip_high": HIGH, "tis_cap": CAP} | fields)


def surrogate(ratio: float, advantage: float) -> tuple[float, bool]:
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH) * advantage
    return -min(ratio * advantage, clipped), clipped < ratio * advantage


def loop_ppo_clip(t: Tokens, i: int) -> tuple[float, bool]:
    return surrogate(math.exp(t.logprobs[i].item() - t.proximal[i].item()), t.advantages[i].item())


def loop_gspo(t: Tokens, i: int) -> tuple[float, bool]:
    own = [j for j in range(len(t.segments)) if t.segments[j] == t.segments[i]]
    mean = sum(t.logprobs[j].item() - t.proximal[j].item() for j in own) / len(own)
    return surrogate(math.exp(mean), t.advantages[i].item())


def loop_cispo(t: Tokens, i: int) -> tuple[float, bool]:
    ratio = math.exp(t.logprobs[i].item() - t.proximal[i].item())
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    return -bounded * t.advantages[i].item() * t.logprobs[i].item(), bounded != ratio


def loop_reinforce(t: Tokens, i: int) -> tuple[float, bool]:
    return -t.advantages[i].item() * t.logprobs[i].item(), False


REFERENCES = {"ppo_clip": loop_ppo_clip, "gspo": loop_gspo, "cispo": loop_cispo, "reinforce": loop_reinforce}


def test_every_loss_has_a_reference() -> None:
    assert REFERENCES.keys() == LOSSES.keys()


@pytest.mark.parametrize("proximal", ["recomputed", "behaviour"])
@pytest.mark.parametrize("name", REFERENCES)
def test_loss_equals_the_loop_over_tokens(name: str, proximal: str) -> None:
    t = tokens(80, proximal=proximal)
    result = policy_loss(t, config(loss=name))
    for i in range(80):
        loss, clipped = REFERENCES[name](t, i)
        weight = min(math.exp(t.proximal[i].item() - t.behaviour[i].item()), CAP)
        assert result.loss[i].item() == pytest.approx(weight * loss, rel=1e-9, abs=1e-12)
        assert bool(result.clipped[i]) == clipped
    assert name == "reinforce" or (result.clipped.any() and not result.clipped.all())


# `cispo` holds its ratio fixed by definition: its gradient is tested below
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("proximal", ["recomputed", "behaviour"])
@pytest.mark.parametrize("name", ["ppo_clip", "reinforce"])
def test_gradient_equals_finite_differences(name: str, proximal: str, kl_coef: float) -> None:
    t = tokens(24, seed=1, proximal=proximal)
    settings = config(loss=name, kl_coef=kl_coef)
    assert torch.autograd.gradcheck(
        lambda logprobs: policy_loss(with_logprobs(t, logprobs), settings).loss, (t.logprobs,), eps=1e-7, atol=1e-5
    )


def test_gspo_has_the_gradient_of_its_sequence_objective_by_finite_differences() -> None:
    t = tokens(24, seed=1)
    (gradient,) = torch.autograd.grad(policy_loss(t, config(loss="gspo", tis_cap=None)).loss.sum(), t.logprobs)

    def objective(logprobs: torch.Tensor) -> float:
        """Eq. 5: sum over sequences; a sequence counts once for each of its tokens, as in the sum over tokens."""
        return sum(loop_gspo(with_logprobs(t, logprobs), i)[0] for i in range(24))

    for i in range(24):
        step = torch.zeros(24, dtype=torch.float64)
        step[i] = 1e-6
        slope = (objective(t.logprobs.detach() + step) - objective(t.logprobs.detach() - step)) / 2e-6
        assert gradient[i].item() == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_cispo_gives_every_token_its_bounded_policy_gradient() -> None:
    t = tokens(60)
    result = policy_loss(t, config(loss="cispo", tis_cap=None))
    (gradient,) = torch.autograd.grad(result.loss.sum(), t.logprobs)
    ratio = torch.exp(t.logprobs.detach() - t.proximal)
    torch.testing.assert_close(gradient, -ratio.clamp(1 - LOW, 1 + HIGH) * t.advantages)
    assert (gradient[result.clipped] != 0).all()


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_a_clipped_token_has_no_gradient(name: str) -> None:
    t = tokens(60)
    result = policy_loss(t, config(loss=name))
    (gradient,) = torch.autograd.grad(result.loss.sum(), t.logprobs)
    assert (gradient[result.clipped] == 0).all()
    assert (gradient[~result.clipped] != 0).all()


def test_clipping_bounds_only_the_side_that_the_advantage_pushes_to() -> None:
    behaviour = torch.zeros(4, dtype=torch.float64)
    logprobs = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64))
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    t = Tokens(logprobs, behaviour, behaviour, advantages, torch.arange(4))
    result = policy_loss(t, config())
    assert result.clipped.tolist() == [True, False, False, True]
    assert result.loss.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8])


CAPS = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"tis_cap": st.floats(1.0, 5.0)}),
    st.fixed_dictionaries({"mis_cap": st.floats(1.01, 5.0)}),
)


@given(st.integers(0, 1000), CAPS)
def test_behaviour_as_the_proximal_policy_is_never_corrected_twice(seed: int, caps: dict[str, float]) -> None:
    t = tokens(12, seed=seed, proximal="behaviour", spread=2.0)
    weight, capped = importance_weight(t.proximal, t.behaviour, **caps)
    assert (weight == 1).all() and not capped.any()


@given(st.integers(0, 1000), st.floats(1.0, 5.0))
def test_a_truncated_weight_is_bounded_and_has_no_gradient(seed: int, cap: float) -> None:
    t = tokens(12, seed=seed, spread=2.0)
    weight, capped = importance_weight(t.logprobs, t.behaviour, tis_cap=cap)
    exact = torch.exp(t.logprobs.detach() - t.behaviour)
    assert not weight.requires_grad
    assert (weight[capped] == cap).all() and (exact[capped] > cap).all()
    assert (weight[~capped] == exact[~capped]).all()


@given(st.integers(0, 1000), st.floats(1.01, 5.0))
def test_a_masked_token_does_not_train(seed: int, cap: float) -> None:
    t = tokens(12, seed=seed, spread=2.0)
    result = policy_loss(t, config(tis_cap=None, mis_cap=cap))
    weight = torch.exp(t.proximal - t.behaviour)
    assert (result.capped == ((weight < 1 / cap) | (weight > cap))).all()
    assert (result.loss[result.capped] == 0).all()


def test_at_the_first_update_the_gradient_is_the_truncated_policy_gradient() -> None:
    t = tokens(24, seed=3, spread=1.0)
    fresh = Tokens(t.logprobs, t.behaviour, t.logprobs.detach(), t.advantages, t.segments)
    weight = torch.exp(t.logprobs.detach() - t.behaviour).clamp(max=CAP)
    for name in LOSSES:
        result = policy_loss(fresh, config(loss=name))
        (gradient,) = torch.autograd.grad(result.loss.sum(), t.logprobs)
        torch.testing.assert_close(gradient, -weight * t.advantages)
        assert not result.clipped.any()


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_a_divergence(logprob: float, reference: float) -> None:
    value = k3(torch.tensor(logprob, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)).item()
    ratio = math.exp(reference - logprob)
    assert value >= 0
    assert value == pytest.approx(ratio - math.log(ratio) - 1, rel=1e-9, abs=1e-9)


def test_the_kl_penalty_is_added_whatever_the_importance_weight() -> None:
    t = tokens(30)
    plain, penalised = (policy_loss(t, config(kl_coef=coef)) for coef in (0.0, 0.5))
    torch.testing.assert_close(penalised.loss - plain.loss, 0.5 * k3(t.logprobs, t.reference))
    torch.testing.assert_close(penalised.kl, k3(t.logprobs, t.reference).detach())
    assert not plain.kl.any()


# --- gradients of a tiny model's parameters ---

VOCABULARY, WIDTH, N = 7, 3, 16


class TinyModel(torch.nn.Module):
    """Two-token context, one hidden layer, and the learner's own head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.hidden = torch.nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)
        self.head = LogprobHead(torch.nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64))

    def forward(self, context: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(context).flatten(1))), targets, 0.8)[0]


def objective(name: str, now: Tokens, start: Tokens, settings: AlgorithmConfig) -> float:
    """The function whose gradient a loss gives at `start`, in a loop. What a loss holds fixed is taken from there."""
    total = 0.0
    for i in range(N):
        if name == "cispo":  # its ratio is held fixed
            ratio = math.exp(start.logprobs[i].item() - start.proximal[i].item())
            loss = -min(max(ratio, 1 - LOW), 1 + HIGH) * now.advantages[i].item() * now.logprobs[i].item()
        else:
            loss, _ = REFERENCES[name](now, i)
        weight = min(math.exp(now.proximal[i].item() - now.behaviour[i].item()), CAP)
        log_ratio = now.reference[i].item() - now.logprobs[i].item()
        total += weight * loss + settings.kl_coef * (math.exp(log_ratio) - log_ratio - 1)
    return total


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("name", REFERENCES)
def test_a_models_gradient_equals_finite_differences(name: str, kl_coef: float) -> None:
    model, settings = TinyModel(), config(loss=name, kl_coef=kl_coef)
    generator = torch.Generator().manual_seed(2)
    context, targets = (torch.randint(VOCABULARY, shape, generator=generator) for shape in ((N, 2), (N,)))
    start = model(context, targets).detach()

    def noise() -> torch.Tensor:
        return 0.4 * torch.randn(N, generator=generator, dtype=torch.float64)

    proximal, segments = start + noise(), torch.arange(N) * 4 // N
    # a weight that differs between the tokens of a sample has no sequence objective: `gspo` is tested without
    behaviour = proximal.clone() if name == "gspo" else proximal + noise()
    advantages = torch.tensor([1.3, -0.7, 0.4, -1.1], dtype=torch.float64)[segments]
    reference = start + noise()

    def tokens_now() -> Tokens:
        return Tokens(model(context, targets), behaviour, proximal, advantages, segments, reference)

    at_start = tokens_now()
    policy_loss(at_start, settings).loss.sum().backward()
    gradients = {id(parameter): parameter.grad.clone() for parameter in model.parameters()}
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients.values())
    with torch.no_grad():
        for parameter in model.parameters():
            for index in range(parameter.numel()):
                values = []
                for step in (1e-6, -1e-6):
                    parameter.view(-1)[index] += step
                    values.append(objective(name, tokens_now(), at_start, settings))
                    parameter.view(-1)[index] -= step
                slope = (values[0] - values[1]) / 2e-6
                assert gradients[id(parameter)].view(-1)[index].item() == pytest.approx(slope, rel=1e-4, abs=1e-6)
