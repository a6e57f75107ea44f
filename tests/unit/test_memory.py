"""Memory by arithmetic: a model of known size, parts of known size, advice that helps."""

import json
import re
from pathlib import Path

import pytest

from lightning_ray.config import Config, ConfigError, LengthPenaltyConfig
from lightning_ray.doctor import memory_lines
from lightning_ray.memory import GIB, RESERVE, advice, estimate, shape_of

RECIPE = Path(__file__).parents[2] / "jobs" / "swe_qwen3_5_9b.yaml"
QWEN_9B = Path(__file__).parents[1] / "fixtures" / "qwen3_5_9b"
"""A config.json with the values that transformers 5.19's `Qwen3_5TextConfig` has by default: those of the 9B model."""
VARIANTS = dict(re.split(r"\s{2,}", line.removeprefix("#   "), maxsplit=1)
                for line in RECIPE.read_text().splitlines() if re.match(r"#   \S.*  --", line))
LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256,
            "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
QWEN35 = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "vocab_size": 128, "head_dim": 32,
          "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
          "layer_types": ["linear_attention"] * 3 + ["full_attention"], "tie_word_embeddings": True}


def config(**parts):
    settings = {"policy": {"path": "m", "max_context": 8192}, "learner": {"zero_stage": 3, "ranks": 4}}
    for name, values in parts.items():
        settings[name] = {**settings.get(name, {}), **values}
    return Config.build(settings)


def test_llama_8b_has_its_published_size():
    shape = shape_of(LLAMA_8B)
    assert shape.parameters == 8_030_261_248
    assert estimate(shape, config()).kv_bytes_per_token == 2 * 32 * 8 * 128 * 2


def test_hybrid_models_cache_their_attention_layers_only():
    shape = shape_of({"text_config": QWEN35})
    assert shape.cached_layers == 1 and shape.state == 3 * (4 * 16 * 16 + 4 * (2 * 32 + 64))


def test_qwen3_5_9b_has_the_size_that_transformers_gives_it():
    shape = shape_of(json.loads((QWEN_9B / "config.json").read_text()))
    assert shape.parameters == pytest.approx(8_953_803_264, rel=1e-5) and shape.cached_layers == 8
    assert estimate(shape, config()).kv_bytes_per_token == 2 * 8 * 4 * 256 * 2


def test_parts_have_the_sizes_that_zero_gives_them():
    shape = shape_of(LLAMA_8B)
    count = shape.parameters
    whole = estimate(shape, config(learner={"zero_stage": 0})).parts
    assert whole["learner: optimizer"] == 12 * count and whole["learner: weights"] == 2 * count
    third = estimate(shape, config(learner={"zero_stage": 3})).parts
    assert third["learner: optimizer"] == 3 * count and third["learner: weights"] == third["learner: gradients"]
    assert third["learner: weights"] == count // 2
    second = estimate(shape, config(learner={"zero_stage": 2})).parts
    assert second["learner: weights"] == 2 * count and second["learner: gradients"] == count // 2
    offloaded = estimate(shape, config(learner={"offload_optimizer": True}, generator={"in_flight": "keep"}))
    assert offloaded.parts["learner: optimizer"] == 0 and offloaded.host == 14 * count
    assert estimate(shape, config()).parts["reserve"] == RESERVE


def test_adapters_have_small_gradients_and_optimizers():
    shape = shape_of(LLAMA_8B)
    adapters = config(learner={"lora": {"rank": 16}, "zero_stage": 0}, algorithm={"kl_coef": 0.1})
    found = estimate(shape, adapters).parts
    published = 41_943_040  # peft, Llama 3 8B, rank 16, all seven projections
    assert found["learner: optimizer"] == 12 * published and found["learner: gradients"] == 2 * published
    assert "learner: reference" not in found  # the policy without its adapters
    whole = estimate(shape, config(algorithm={"kl_coef": 0.1})).parts
    assert whole["learner: reference"] == 2 * shape.parameters


def test_ranks_that_split_sequences_hold_less_of_them():
    shape = shape_of(LLAMA_8B)
    plain, split = (estimate(shape, config(policy={"max_context": 65536}, learner={"sequence_parallel": n})).parts
                    for n in (1, 4))
    assert split["learner: activations"] * 4 == plain["learner: activations"]


def test_checkpointing_and_tensor_parallelism_help():
    shape = shape_of(LLAMA_8B)
    plain, kept = (estimate(shape, config(learner={"gradient_checkpointing": on})) for on in (False, True))
    assert kept.parts["learner: activations"] < plain.parts["learner: activations"] / 5
    split = estimate(shape, config(generator={"tensor_parallel": 2}))
    assert split.parts["generator: weights"] == plain.parts["generator: weights"] // 2
    assert split.kv_bytes_per_token == plain.kv_bytes_per_token // 2


def test_by_turns_the_device_never_holds_all_parts_and_the_host_holds_the_learners_states():
    shape = shape_of(LLAMA_8B)
    together, turns = (estimate(shape, config(generator={"in_flight": chosen})) for chosen in ("keep", "auto"))
    parts = turns.parts
    assert parts == together.parts and together.total == sum(parts.values())
    kv = parts["generator: KV cache"]
    assert turns.total == max(together.total - kv, parts["generator: weights"] + kv + RESERVE) < together.total
    assert (turns.host, together.host) == (16 * shape.parameters, 0)


def test_advice_names_settings_and_ends_when_all_fits():
    shape = shape_of(LLAMA_8B)
    small = config(generator={"max_num_seqs": 16})
    found = estimate(shape, small)
    said = advice(found, small, 40 * GIB)
    assert any("learner.offload_optimizer" in line for line in said) and "of 40.0" in said[0]
    assert advice(found, small, found.total) == []
    greedy = config(generator={"max_num_seqs": 512},
                    learner={"offload_optimizer": True, "gradient_checkpointing": True})
    assert any("generator.max_num_seqs 512 ->" in line for line in advice(estimate(shape, greedy), greedy, 80 * GIB))


@pytest.mark.parametrize("bad", [{"hidden_size": 1}, {**LLAMA_8B, "num_experts": 8}])
def test_models_that_it_does_not_know_are_refused(bad):
    with pytest.raises(ConfigError, match=r"policy\.path"):
        shape_of(bad)


def test_the_doctors_table_says_what_does_not_fit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    lines, fits = memory_lines(config(policy={"path": tmp_path}), 24.0)
    assert not fits and any("does not fit" in line for line in lines) and any("8.03e9" in line for line in lines)
    lines, fits = memory_lines(config(policy={"path": tmp_path}), 500.0)
    assert fits and lines[-1] == "fits on devices of 500 GiB"
    with pytest.raises(ConfigError, match=r"config\.json"):
        memory_lines(config(policy={"path": tmp_path / "none"}), 80.0)
    lines, fits = memory_lines(Config(), 80.0)
    assert fits and "made on the spot" in lines[0]


def test_the_9b_recipe_loads_with_the_reference_values():
    recipe = Config.load(RECIPE)
    assert (recipe.schedule.group_size, recipe.schedule.groups_per_step, recipe.learner.lr) == (8, 16, 1e-6)
    assert (recipe.algorithm.clip_low, recipe.algorithm.clip_high, recipe.algorithm.kl_coef) == (0.2, 0.28, 0.0)
    assert (recipe.policy.max_context, recipe.harness.timeout_s, recipe.harness.max_calls) == (81920, 5400, 100)
    assert recipe.learner.ranks == recipe.generator.replicas * recipe.generator.tensor_parallel
    assert recipe.runners.resources == {"runner": 1}
    assert recipe.reward.length_penalty == LengthPenaltyConfig() and recipe.sampling.max_tokens == 16384
    assert recipe.harness.settings["config"] == "swebench.yaml"


@pytest.mark.parametrize("words", ["", *VARIANTS.values()], ids=["as it stands", *VARIANTS])
def test_every_variant_of_the_9b_recipe_fits_on_gpus_of_80_gib(words):
    recipe = Config.load(RECIPE, ["--policy.path", str(QWEN_9B), *words.split()])
    lines, fits = memory_lines(recipe, 80.0)
    assert fits, lines
    assert recipe.learner.ranks == recipe.generator.replicas, "one of each on every GPU"
    assert recipe.runners.count * recipe.runners.rollouts >= (
        recipe.schedule.groups_in_flight * recipe.schedule.group_size)


def test_the_doctor_says_what_to_change_on_smaller_gpus():
    recipe = Config.load(RECIPE, ["--policy.path", str(QWEN_9B)])
    lines, fits = memory_lines(recipe, 40.0)
    assert not fits and any("half of policy.max_context" in line for line in lines)
    smaller = Config.load(RECIPE, ["--policy.path", str(QWEN_9B), "--policy.max_context", "16384",
                                   "--learner.micro_batch_tokens", "16384", "--generator.max_num_seqs", "8"])
    assert memory_lines(smaller, 40.0)[1]


def test_the_variants_are_for_4_gpus_8_and_several_nodes_and_both_schedules():
    assert len(VARIANTS) == 4 and {"one node of 4 GPUs", "two nodes of 8 GPUs", "synchronous"} <= set(VARIANTS)
