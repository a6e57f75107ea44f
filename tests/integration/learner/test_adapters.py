"""LoRA in the learner: only adapters are trained, and what leaves the learner is an ordinary, merged model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_ray.config import AlgorithmConfig, Config, ConfigError, LearnerConfig
from lightning_ray.preflight import check_adapter
from tests.integration.learner.common import (
    STEPS,
    Plain,
    everyone,
    make_everywhere,
    make_learner,
    make_samples,
    run,
    settings,
    unpack,
)

pytestmark = pytest.mark.timeout(600)


def with_lora(**fields) -> LearnerConfig:
    lora = {"rank": 4, "alpha": 8.0} | fields.pop("lora", {})
    return settings(**{"lora": lora, "lr": 2e-2, "warmup_steps": 0} | fields)


def test_only_the_targets_change_and_by_no_more_than_the_rank(models: dict[str, Path]) -> None:
    start = unpack(make_learner(models["llama"], settings()).bucket("float32").arrays)
    learner = make_learner(models["llama"], with_lora(lora={"target_modules": ["q_proj", "down_proj"]}))
    facts = learner.facts()
    assert 0 < facts["trained_parameters"] < facts["parameters"] / 10
    untrained = unpack(learner.bucket("float32").arrays)
    assert untrained.keys() == start.keys()
    assert all(torch.equal(untrained[name], start[name]) for name in start)  # B starts at zero
    _, weights = run(learner, make_samples())
    for name, tensor in unpack(weights).items():
        change = tensor - start[name]
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            assert change.abs().max() > 1e-3, name
            assert torch.linalg.matrix_rank(change, rtol=1e-4) <= 4, name
        else:
            assert not change.any(), name


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_merged_weights_are_what_the_learner_computes_with(
    models: dict[str, Path], tmp_path: Path, zero_stage: int
) -> None:
    samples = make_samples()
    learner = make_learner(models["qwen3"], with_lora(zero_stage=zero_stage, gradient_checkpointing=True))
    before = learner.logprobs(samples)
    _, weights = run(learner, samples)
    after = learner.logprobs(samples)
    assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True)) > 0.05
    learner.export(tmp_path)
    plain = Plain(tmp_path, settings(), AlgorithmConfig())
    merged, read = unpack(weights), dict(plain.model.named_parameters())
    assert merged.keys() == read.keys()
    assert all(torch.equal(merged[name], read[name]) for name in merged)
    for sample, found in zip(samples, after, strict=True):
        wanted = plain.logprobs(sample).detach().numpy()
        np.testing.assert_allclose(found[sample.loss_mask], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_loaded_learner_goes_on_as_if_uninterrupted(models: dict[str, Path], tmp_path: Path, zero_stage: int) -> None:
    config, samples = with_lora(zero_stage=zero_stage), make_samples()
    learner = make_learner(models["qwen3"], config)
    learner.step(samples, 0)
    learner.save(tmp_path)
    learner.step(samples, 1)
    resumed = make_learner(models["qwen3"], config)
    resumed.load(tmp_path)
    resumed.step(samples, 1)
    mine, theirs = learner.bucket().arrays, resumed.bucket().arrays
    for (name, (raw, _, _)), (other, _, _) in zip(mine.items(), theirs.values(), strict=True):
        assert raw.tobytes() == other.tobytes(), name
    saved = sum(file.stat().st_size for file in tmp_path.rglob("*.pt"))
    assert saved < 4 * learner.facts()["parameters"], "the frozen weights are in the checkpoint"


def test_the_reference_of_the_kl_penalty_is_the_policy_without_adapters(models: dict[str, Path]) -> None:
    samples, algorithm = make_samples(), AlgorithmConfig(kl_coef=0.1)
    start = make_learner(models["qwen3"], settings()).logprobs(samples)
    learner = make_learner(models["qwen3"], with_lora(zero_stage=3), algorithm)
    assert learner.reference is None
    assert learner.step(samples, 0)["kl_mean"] == 0
    learner.step(samples, 1)
    now = learner.logprobs(samples)
    difference = np.concatenate([(a - b)[s.loss_mask] for a, b, s in zip(start, now, samples, strict=True)])
    measured = learner.step(samples, 2)["kl_mean"]
    assert measured == pytest.approx((np.expm1(difference) - difference).mean(), rel=1e-3)
    assert measured > 1e-4


def test_dropout_is_for_learning_only(models: dict[str, Path]) -> None:
    samples = make_samples()
    learner = make_learner(models["qwen3"], with_lora(lora={"dropout": 0.5}))
    learner.step(samples, 0)
    first, second = learner.logprobs(samples), learner.logprobs(samples)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    noisy = learner.step(samples, 1)["loss"]
    quiet = make_learner(models["qwen3"], with_lora())
    quiet.step(samples, 0)
    assert quiet.step(samples, 1)["loss"] != noisy


def test_bfloat16_adapters_of_a_bfloat16_model(models: dict[str, Path]) -> None:
    learner = make_learner(models["qwen3"], with_lora(dtype="bfloat16"))
    samples = make_samples()
    before = learner.logprobs(samples)
    for version in range(STEPS):
        learner.step(samples, version)
    assert max(np.abs(a - b).max() for a, b in zip(before, learner.logprobs(samples), strict=True)) > 0.05


def test_two_ranks_equal_one(models: dict[str, Path], two_ranks: list) -> None:
    samples = make_samples(count=9)
    make_everywhere(two_ranks, models["llama"], with_lora(zero_stage=3, ranks=2, threads=1))
    alone = make_learner(models["llama"], with_lora(zero_stage=3))
    for version in range(2):
        one, two = everyone(two_ranks, "step", samples, version)
        wanted = alone.step(samples, version)
        for name in ("loss", "grad_norm"):
            assert one[name] == two[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("target", ["query", "lm_head", "proj"])
def test_a_target_that_is_no_layer_is_refused_with_its_name(models: dict[str, Path], target: str) -> None:
    with pytest.raises(ConfigError, match=rf"learner.lora.target_modules: '{target}'.*down_proj.*q_proj"):
        make_learner(models["qwen3"], with_lora(lora={"target_modules": ["q_proj", target]}))


def test_such_a_target_is_found_before_anything_starts(models: dict[str, Path]) -> None:
    def run(*targets: str) -> Config:
        return Config(policy={"path": models["qwen3"]}, learner={"lora": {"target_modules": targets}})

    check_adapter(run("q_proj", "self_attn.o_proj"))
    with pytest.raises(ConfigError, match=r"learner.lora.target_modules: 'query'"):
        check_adapter(run("q_proj", "query"))
