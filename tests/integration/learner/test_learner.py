"""The learner on tiny models of real architectures: one rank and two, every ZeRO stage, against plain PyTorch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from lightning_ray.config import AlgorithmConfig
from lightning_ray.learner.batch import whole_versions
from lightning_ray.learner.buckets import plan
from lightning_ray.learner.optimizer import learning_rate
from lightning_ray.learner.worker import LearnerWorker
from tests.integration.learner.common import (
    STEPS,
    TEMPERATURE,
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


# --- one rank ---


@pytest.mark.parametrize(
    ("architecture", "zero_stage"), [("qwen3", 0), ("qwen3", 1), ("qwen3", 2), ("qwen3", 3), ("llama", 2), ("llama", 3)]
)
def test_updates_equal_plain_pytorch(models: dict[str, Path], architecture: str, zero_stage: int) -> None:
    config, algorithm = settings(zero_stage=zero_stage, max_grad_norm=0.05), AlgorithmConfig()
    samples = make_samples()
    metrics, weights = run(make_learner(models[architecture], config), samples)
    plain = Plain(models[architecture], config, algorithm)
    for measured in metrics:
        loss, norm = plain.step(samples)
        assert measured["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert measured["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert measured["grad_norm"] > config.max_grad_norm  # clipping was at work
    wanted = dict(plain.model.named_parameters())
    got = unpack(weights)
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, wanted[name].detach(), rtol=1e-4, atol=2e-5)


def test_behaviour_as_the_proximal_policy_equals_plain_pytorch(models: dict[str, Path]) -> None:
    config, algorithm = settings(), AlgorithmConfig(proximal="behaviour")
    samples = make_samples()
    measured = make_learner(models["qwen3"], config, algorithm).step(samples, 0)
    loss, norm = Plain(models["qwen3"], config, algorithm).step(samples)
    assert measured["loss"] == pytest.approx(loss, rel=1e-4)
    assert measured["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert measured["clip_fraction"] > 0.1


def test_the_loss_does_not_depend_on_the_packing(models: dict[str, Path]) -> None:
    samples = make_samples()
    results = []
    for layout, budget in (("packed", 10_000), ("packed", 64), ("padded", 300)):
        learner = make_learner(models["qwen3"], settings(micro_batch_tokens=budget))
        learner.scorer.layout = layout
        learner.scorer.policy.set_attn_implementation("lightning_ray_packed" if layout == "packed" else "sdpa")
        results.append(learner.step(samples, 0))
    for result in results[1:]:
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-5)
        assert result["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-5)
    assert results[0]["padding_share"] == results[1]["padding_share"] == 0
    assert results[2]["padding_share"] <= 0.05


def test_a_model_with_recurrent_layers_is_padded_and_equals_plain_pytorch(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    linear = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "initializer_range": 0.1}
    AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**shape, **heads, **linear)).save_pretrained(tmp_path)
    samples = make_samples()
    learner = make_learner(tmp_path, settings(micro_batch_tokens=512))
    assert learner.facts()["layout"] == "padded"
    metrics, weights = run(learner, samples)
    plain = Plain(tmp_path, settings(), AlgorithmConfig())
    for measured in metrics:
        loss, norm = plain.step(samples)
        assert measured["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert measured["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert measured["padding_share"] <= 0.05
    assert unpack(weights).keys() == dict(plain.model.named_parameters()).keys()


def test_gradient_checkpointing_changes_nothing(models: dict[str, Path]) -> None:
    samples = make_samples()
    for zero_stage in (2, 3):
        plain, checkpointed = (
            make_learner(models["qwen3"], settings(zero_stage=zero_stage, gradient_checkpointing=flag)).step(samples, 0)
            for flag in (False, True)
        )
        assert checkpointed["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert checkpointed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("zero_stage", "offload"), [(1, {}), (2, {}), (3, {"offload_params": True})], ids=["zero1", "zero2", "zero3"]
)
def test_offloading_changes_nothing(models: dict[str, Path], zero_stage: int, offload: dict[str, bool]) -> None:
    from lightning_ray.learner.engine import _deepspeed_settings

    samples, config = make_samples(), settings(zero_stage=zero_stage, offload_optimizer=True, **offload)
    asked = _deepspeed_settings(config, torch.bfloat16)["zero_optimization"]
    assert asked["offload_optimizer"]["device"] == "cpu"
    assert (asked.get("offload_param") or {}).get("device") == ("cpu" if offload else None)
    measured, weights = run(make_learner(models["qwen3"], config), samples)
    wanted, same = run(make_learner(models["qwen3"], settings(zero_stage=zero_stage)), samples)
    assert [m["loss"] for m in measured] == pytest.approx([m["loss"] for m in wanted], rel=1e-5)
    for name, tensor in unpack(weights).items():
        torch.testing.assert_close(tensor, unpack(same)[name], rtol=1e-5, atol=1e-6)


def test_logprobs_and_gap_are_those_of_the_weights_before_the_step(models: dict[str, Path]) -> None:
    samples = make_samples()
    learner = make_learner(models["qwen3"], settings())
    before = learner.logprobs(samples)
    plain = Plain(models["qwen3"], settings(), AlgorithmConfig())
    gaps = []
    for sample, found in zip(samples, before, strict=True):
        wanted = plain.logprobs(sample).detach().numpy()
        np.testing.assert_allclose(found[sample.loss_mask], wanted, rtol=1e-4, atol=1e-5)
        assert not found[~sample.loss_mask].any()
        fresh = whole_versions(sample.versions)[sample.loss_mask] == 1
        gaps.append(np.abs(wanted - sample.logprobs[sample.loss_mask])[fresh])
    gaps = np.concatenate(gaps)
    metrics = learner.step(samples, version=1)
    assert metrics["logprob_gap_tokens"] == len(gaps) > 0
    assert metrics["logprob_gap_mean"] == pytest.approx(gaps.mean(), rel=1e-4)
    assert metrics["logprob_gap_max"] == pytest.approx(gaps.max(), rel=1e-4)
    assert metrics["tokens"] == sum(sample.trained for sample in samples)


def test_a_kl_penalty_holds_the_policy_near_its_start(models: dict[str, Path]) -> None:
    samples = make_samples()
    kl = {}
    for coef in (1e-9, 2.0):
        learner = make_learner(models["qwen3"], settings(warmup_steps=0), AlgorithmConfig(kl_coef=coef))
        measured = [learner.step(samples, version)["kl_mean"] for version in range(6)]
        assert measured[0] == pytest.approx(0, abs=1e-9)  # the policy is still the reference
        kl[coef] = measured[-1]
    assert 0 < kl[2.0] < kl[1e-9] / 2


def test_without_fresh_tokens_no_gap_is_reported(models: dict[str, Path]) -> None:
    metrics = make_learner(models["qwen3"], settings()).step(make_samples(), version=7)
    assert metrics["logprob_gap_mean"] is None and metrics["logprob_gap_max"] is None


def test_law9_the_same_samples_give_the_same_weights_bit_for_bit(models: dict[str, Path]) -> None:
    samples = make_samples()
    first, second = (run(make_learner(models["qwen3"], settings(updates_per_step=2)), samples)[1] for _ in range(2))
    for name, (raw, _, _) in first.items():
        assert raw.tobytes() == second[name][0].tobytes(), name


def test_several_updates_split_the_rollouts_and_clip_from_where_the_step_began(models: dict[str, Path]) -> None:
    samples = make_samples()
    learner = make_learner(models["qwen3"], settings(updates_per_step=5, lr=3e-2, warmup_steps=0))
    before = learner.logprobs(samples)
    metrics = learner.step(samples, 0)
    assert metrics["updates"] == 5 and learner.updates == 5
    assert metrics["tokens"] == sum(sample.trained for sample in samples)
    # the weights moved far in the first updates, so that the last ones clip; with one update nothing is clipped
    assert metrics["clip_fraction"] > 0
    assert make_learner(models["qwen3"], settings(lr=3e-2)).step(samples, 0)["clip_fraction"] == 0
    moved = [np.abs(a - b).max() for a, b in zip(before, learner.logprobs(samples), strict=True)]
    assert max(moved) > 0.1


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_loaded_learner_goes_on_as_if_uninterrupted(models: dict[str, Path], tmp_path: Path, zero_stage: int) -> None:
    config, samples = settings(zero_stage=zero_stage), make_samples()
    learner = make_learner(models["qwen3"], config)
    learner.step(samples, 0)
    learner.save(tmp_path)
    learner.step(samples, 1)
    resumed = make_learner(models["qwen3"], config)
    resumed.load(tmp_path)
    metrics = resumed.step(samples, 1)
    assert metrics["lr"] == pytest.approx(learning_rate(1, config, 10))
    mine, theirs = learner.bucket().arrays, resumed.bucket().arrays
    for (name, (raw, _, _)), (other, _, _) in zip(mine.items(), theirs.values(), strict=True):
        assert raw.tobytes() == other.tobytes(), name


def test_loading_from_nowhere_is_an_error(models: dict[str, Path], tmp_path: Path) -> None:
    from lightning_ray.learner.engine import LearnerError

    with pytest.raises(LearnerError, match="holds no checkpoint"):
        make_learner(models["qwen3"], settings()).load(tmp_path / "nothing")


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_an_export_is_an_ordinary_checkpoint(models: dict[str, Path], tmp_path: Path, zero_stage: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for architecture, model in models.items():
        learner = make_learner(model, settings(zero_stage=zero_stage))
        learner.step(make_samples(), 0)
        learner.export(tmp_path / architecture)
        read = dict(AutoModelForCausalLM.from_pretrained(tmp_path / architecture).named_parameters())
        for name, tensor in unpack(learner.bucket("float32").arrays).items():
            assert torch.equal(tensor, read[name]), name
        assert AutoTokenizer.from_pretrained(tmp_path / architecture).chat_template
        del learner


def test_published_weights_leave_out_what_is_tied(models: dict[str, Path]) -> None:
    assert "lm_head.weight" not in make_learner(models["qwen3"], settings()).bucket().arrays
    weights = make_learner(models["llama"], settings()).bucket().arrays
    assert weights["lm_head.weight"][1:] == ("bfloat16", (512, 64))
    assert weights["lm_head.weight"][0].nbytes == 512 * 64 * 2


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_bfloat16_weights_with_a_float32_optimizer(models: dict[str, Path], zero_stage: int) -> None:
    samples = make_samples()
    config = settings(dtype="bfloat16", zero_stage=zero_stage)
    learner = make_learner(models["qwen3"], config)
    metrics, weights = run(learner, samples)
    assert learner.facts()["dtype"] == "bfloat16"
    plain = Plain(models["qwen3"], config, AlgorithmConfig())
    for measured in metrics:
        loss, norm = plain.step(samples)
        # weights are rounded to 8 bits after each update: the first step is close, the later ones similar
        assert measured["loss"] == pytest.approx(loss, rel=0.15, abs=0.01)
        assert measured["grad_norm"] == pytest.approx(norm, rel=0.05)
    # updates too small for bfloat16 are not lost: the optimizer's own copy adds them up
    slow = make_learner(models["qwen3"], settings(dtype="bfloat16", zero_stage=zero_stage, lr=5e-4, warmup_steps=0))
    slow.step(samples, 0)
    assert (unpack(slow.bucket().arrays)["model.norm.weight"] == 1).all()
    for _ in range(12):
        slow.step(samples, 0)
    assert (unpack(slow.bucket().arrays)["model.norm.weight"] != 1).any()
    assert weights.keys() == slow.bucket().arrays.keys()


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(models: dict[str, Path]) -> None:
    from lightning_ray.learner.engine import LearnerError

    learner = make_learner(models["qwen3"], settings())
    start = learner.bucket("float32").arrays
    with pytest.raises(LearnerError, match="loss of update 0 is nan"):
        learner.step([replace(sample, advantage=float("nan")) for sample in make_samples()], 0)
    for name, (raw, _, _) in learner.bucket("float32").arrays.items():
        assert raw.tobytes() == start[name][0].tobytes()


def test_nothing_to_learn_from_is_an_error(models: dict[str, Path]) -> None:
    silent = [replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in make_samples()]
    with pytest.raises(ValueError, match="none of the 10 samples"):
        make_learner(models["qwen3"], settings()).step(silent, 0)


# --- processes of their own ---


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_two_ranks_equal_one(models: dict[str, Path], tmp_path: Path, two_ranks: list, zero_stage: int) -> None:
    config = settings(zero_stage=zero_stage, ranks=2, threads=1)
    samples = make_samples(count=9)  # an uneven share: one rank takes part with an empty micro-batch

    make_everywhere(two_ranks, models["llama"], config)
    reference = make_learner(models["llama"], settings(zero_stage=zero_stage))
    scores = everyone(two_ranks, "logprobs", samples)
    for mine, theirs, wanted in zip(*scores, reference.logprobs(samples), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-5)
    shared = ray.put(samples)
    for step in range(STEPS):
        version = step % 2  # whose tokens are among the samples
        one, two = everyone(two_ranks, "step", shared, version)
        if zero_stage:
            everyone(two_ranks, "offload")
            everyone(two_ranks, "reload")
        alone = reference.step(samples, version)
        for name in ("loss", "grad_norm", "entropy_mean", "logprob_gap_mean", "logprob_gap_max", "tokens", "lr"):
            assert one[name] == two[name], name
            assert one[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
    published, nothing = (part.arrays for part in everyone(two_ranks, "bucket", "float32"))
    assert nothing == {}
    loads = plan(everyone(two_ranks, "parameters")[0], 20_000)
    assert len(loads) > 2
    pieces = [[part.arrays for part in everyone(two_ranks, "bucket", "float32", load.names)] for load in loads]
    assert all(nothing == {} for _, nothing in pieces)
    joined = {name: array for piece, _ in pieces for name, array in piece.items()}
    assert list(joined) == list(published)
    assert all(joined[name][0].tobytes() == published[name][0].tobytes() for name in published)
    wanted = unpack(reference.bucket("float32").arrays)
    for name, tensor in unpack(published).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=2e-5)
    everyone(two_ranks, "save", tmp_path)
    one, _ = everyone(two_ranks, "step", shared, STEPS)
    everyone(two_ranks, "load", tmp_path)
    again, _ = everyone(two_ranks, "step", shared, STEPS)
    assert again["loss"] == one["loss"] and again["grad_norm"] == one["grad_norm"]


def test_the_actor_is_a_learner_in_a_process_of_its_own(ray_session: None, models: dict[str, Path]) -> None:
    config, samples = settings(threads=1), make_samples()
    actor = LearnerWorker.options(num_cpus=0.1).remote(
        str(models["qwen3"]), config, AlgorithmConfig(), TEMPERATURE, 0, 1, 10
    )
    try:
        facts = ray.get(actor.setup.remote(ray.get(actor.address.remote())))
        assert facts["parameters"] > 90_000 and facts["layout"] == "packed" and facts["ranks"] == 1
        learner = make_learner(models["qwen3"], config)
        measured, wanted = ray.get(actor.step.remote(samples, 1)), learner.step(samples, 1)
        assert measured["loss"] == wanted["loss"] and measured["grad_norm"] == wanted["grad_norm"]
        for name, (raw, _, _) in ray.get(actor.bucket.remote()).arrays.items():
            assert raw.tobytes() == learner.bucket().arrays[name][0].tobytes()
    finally:
        ray.kill(actor)
