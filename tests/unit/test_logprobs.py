"""Chunked log-probs and entropy against the whole logits, with their gradients."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ray import memory
from lightning_ray.learner import logprobs as subject
from lightning_ray.learner.logprobs import LogprobHead

POSITIONS, HIDDEN, VOCABULARY = 37, 12, 50


def make(dtype: torch.dtype, bias: bool = False) -> tuple[LogprobHead, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = LogprobHead(nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype))
    hidden = (2 * torch.randn(POSITIONS, HIDDEN)).to(dtype).requires_grad_()
    return head, hidden, torch.randint(VOCABULARY, (POSITIONS,))


def plain(head: LogprobHead, hidden: torch.Tensor, targets: torch.Tensor, temperature: float):
    logits = nn.functional.linear(hidden, head.weight, head.bias) / temperature
    table = logits.log_softmax(-1)
    return table[torch.arange(len(targets)), targets], -(table.exp() * table).sum(-1)


@pytest.fixture(params=[1, 7, 1000], ids=lambda rows: f"{rows}_rows")
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "CHUNK_LOGITS", request.param * VOCABULARY)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_equal_the_whole(chunk: None, temperature: float, bias: bool) -> None:
    head, hidden, targets = make(torch.float64, bias)
    weights = torch.randn(POSITIONS, dtype=torch.float64)
    wanted, wanted_entropy = plain(head, hidden, targets, temperature)
    got, entropy = head(hidden, targets, temperature)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(entropy, wanted_entropy)
    leaves = [hidden, *head.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad((got * weights).sum(), leaves),
        torch.autograd.grad((wanted * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_gradient_equals_finite_differences() -> None:
    head, hidden, targets = make(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: _with(head, h, w, targets), (hidden, head.weight))


def _with(head: LogprobHead, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return subject._Logprobs.apply(hidden, weight, None, targets, 1 / 0.8)[0]


def test_bfloat16_weights_give_float32_logprobs() -> None:
    head, hidden, targets = make(torch.bfloat16)
    got, entropy = head(hidden, targets, 1.0)
    assert got.dtype == entropy.dtype == torch.float32
    wide = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    wide.weight.data = head.weight.data.float()
    wanted, wanted_entropy = plain(LogprobHead(wide), hidden.float(), targets, 1.0)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(entropy, wanted_entropy)
    got.sum().backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made, in the forward or in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_never_exist_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(subject, "CHUNK_LOGITS", 20 * VOCABULARY)
    head, hidden, targets = make(dtype)
    with LargestTensor() as largest:
        head(hidden, targets, 0.7)[0].sum().backward()
    assert hidden.grad.abs().max() > 0 and head.weight.grad.abs().max() > 0
    assert largest.elements == 20 * VOCABULARY  # more than the weight has, less than POSITIONS * VOCABULARY


def test_the_projection_is_shared_not_copied() -> None:
    projection = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    assert LogprobHead(projection).weight is projection.weight


def test_the_estimate_of_memory_knows_how_many_logits_are_held_at_once():
    assert memory.CHUNK_LOGITS == subject.CHUNK_LOGITS
