"""The optimizer on the CPU: what was saved and loaded goes on bit for bit."""

import copy

import pytest
import torch

from lightning_ray.config import LearnerConfig
from lightning_ray.learner.optimizer import make_optimizer

SAVED, STEPS = 30, 40
"""From update 27 on the running product of 0.99 differs from its power in the last bit."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def made(values):
    parameter = torch.nn.Parameter(values.clone())
    return parameter, make_optimizer([parameter], LearnerConfig(lr=1e-2), on_gpu=False)


def train(parameter, optimizer, first, last):
    for number in range(first, last):
        parameter.grad = torch.randn(1000, generator=torch.Generator().manual_seed(number))
        optimizer.step()


def test_law9_a_resumed_optimizer_makes_the_same_updates_bit_for_bit():
    whole, optimizer = made(torch.linspace(-1, 1, 1000))
    train(whole, optimizer, 0, SAVED)
    resumed, another = made(whole.detach())
    another.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(whole, optimizer, SAVED, STEPS)
    train(resumed, another, SAVED, STEPS)
    assert torch.equal(whole, resumed)


def test_an_update_is_adamws():
    ours, optimizer = made(torch.linspace(-1, 1, 1000))
    theirs = torch.nn.Parameter(ours.detach().clone())
    settings = LearnerConfig(lr=1e-2)
    reference = torch.optim.AdamW([theirs], lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0)
    train(ours, optimizer, 0, 5)
    train(theirs, reference, 0, 5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
