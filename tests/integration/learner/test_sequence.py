"""Sequence parallelism: two ranks that split each sequence learn what one rank learns from whole ones."""

from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from lightning_ray.config import AlgorithmConfig, ConfigError
from tests.integration.learner.common import (
    everyone,
    make_everywhere,
    make_learner,
    make_samples,
    settings,
    unpack,
)
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("architecture", "zero_stage", "checkpointing", "algorithm"),
    [
        ("qwen3", 0, False, {"loss": "gspo", "clip_low": 0.01, "clip_high": 0.01}),
        ("llama", 3, True, {"kl_coef": 0.1}),
    ],
)
def test_two_ranks_that_split_each_sequence_equal_one(
    models: dict[str, Path], two_ranks: list, architecture: str, zero_stage: int, checkpointing: bool, algorithm: dict
) -> None:
    shared = {"zero_stage": zero_stage, "gradient_checkpointing": checkpointing, "threads": 1, "updates_per_step": 2}
    algorithm = AlgorithmConfig(**algorithm)
    samples = make_samples(count=9)
    split = settings(ranks=2, sequence_parallel=2, **shared)
    make_everywhere(two_ranks, models[architecture], split, algorithm)
    alone = make_learner(models[architecture], settings(**shared), algorithm)
    scores = everyone(two_ranks, "logprobs", samples)
    for mine, theirs, wanted in zip(*scores, alone.logprobs(samples), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-5)
    shared_samples = ray.put(samples)
    for version in range(2):  # whose tokens are among the samples
        one, two = everyone(two_ranks, "step", shared_samples, version)
        wanted = alone.step(samples, version)
        for name in ("loss", "grad_norm", "entropy_mean", "kl_mean", "clip_fraction", "logprob_gap_max", "tokens"):
            assert one[name] == two[name], name
            assert one[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    published = unpack(everyone(two_ranks, "bucket", "float32")[0].arrays)
    for name, tensor in unpack(alone.bucket("float32").arrays).items():
        torch.testing.assert_close(published[name], tensor, rtol=1e-4, atol=2e-5)


def test_recurrent_layers_cannot_be_split(tmp_path: Path) -> None:
    from lightning_ray.learner.model import UnsupportedModel, load_scorer
    from lightning_ray.learner.sequence import Team

    team = Team(1)
    team.size = 2
    with pytest.raises(UnsupportedModel, match=r"learner.sequence_parallel is 2, and qwen3_5_text has recurrent"):
        load_scorer(tiny_model(tmp_path, "qwen3_5"), dtype=torch.float32, team=team)


def test_heads_that_cannot_be_split_are_refused(models: dict[str, Path]) -> None:
    from transformers import AutoConfig

    from lightning_ray.learner.sequence import Team

    team = Team(1)
    team.size = 3
    with pytest.raises(ConfigError, match=r"learner.sequence_parallel: 3 .* 4 attention heads"):
        team.attend(AutoConfig.from_pretrained(models["qwen3"]))
