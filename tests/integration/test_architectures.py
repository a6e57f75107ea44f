"""Learner and generator agree after updates, for each architecture: the log-probs that vLLM recorded are those that the
learner computes. One engine each, so not part of `make test` (`make test-slow`)."""

import pytest
import ray

from lightning_ray.config import Config, ConfigError, GeneratorConfig
from lightning_ray.policy_group import PolicyGroup
from lightning_ray.proxy.codec import Codec
from tests.integration.conftest import TEMPERATURE
from tests.integration.test_policy_group import sampled
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DTYPES = {"qwen3_5": "bfloat16", "llama": "float32", "qwen3": "float32"}
"""Of the generator: vLLM's gated delta nets compute in bfloat16 on the CPU."""
LARGEST_GAP = {"bfloat16": 0.05, "float32": 0.002}
"""Mean |log-prob of the learner - log-prob recorded| after an update."""


def agrees_after_updates(ray_session, model, architecture, request_for, **learner):
    dtype = DTYPES[architecture]
    config = Config(
        policy={"path": model, "max_context": 512}, sampling={"temperature": TEMPERATURE},
        generator={"dtype": dtype, "max_num_seqs": 8, "extra": {"kv_cache_memory_bytes": 128 << 20}},
        learner={"lr": 3e-3, "warmup_steps": 0, "threads": 1, "dtype": "float32"} | learner,
    )
    group = PolicyGroup.start(config, model, total_steps=10)
    try:
        group.ready()
        for version in range(4):
            metrics = group.update(sampled(group, request_for))
            print(f"{architecture} {learner} version {version}: mean gap {metrics['logprob_gap_mean']:.6f}, largest "
                  f"{metrics['logprob_gap_max']:.6f}, gradient {metrics['grad_norm']:.3f}")
            assert metrics["logprob_gap_tokens"] == 8 * 40
            assert metrics["logprob_gap_mean"] < LARGEST_GAP[dtype]
            assert metrics["weights_verified"] == 1.0 and metrics["grad_norm"] > 0
        answer = ray.get(group.generators[0].generate.remote(request_for(range(30, 60), 8, 0.0)))
        assert set(answer.versions) == {4}
    finally:
        group.shutdown()


@pytest.mark.parametrize("architecture", ["qwen3_5", "llama"])
def test_log_probs_agree_after_updates(ray_session, tmp_path, request_for, architecture):
    agrees_after_updates(ray_session, tiny_model(tmp_path, architecture), architecture, request_for)


def test_log_probs_agree_after_updates_of_adapters(ray_session, tmp_path, request_for):
    model = tiny_model(tmp_path, "qwen3")
    agrees_after_updates(ray_session, model, "qwen3", request_for, lora={"rank": 4, "alpha": 8}, lr=3e-2)


def test_a_text_only_qwen3_5_is_rendered(tmp_path):
    model = tiny_model(tmp_path, "qwen3_5")
    codec = Codec(model, Config(policy={"path": model}).policy)
    assert codec.decode(codec.encode("def add")) == "def add" and codec.end_texts == ("<|im_end|>",)


def test_a_dtype_that_gated_delta_nets_do_not_compute_in_is_refused(tmp_path):
    from lightning_ray.generator.engine import engine_arguments

    model = tiny_model(tmp_path, "qwen3_5")
    with pytest.raises(ConfigError, match=r"generator.dtype: 'float32'.*qwen3_5"):
        engine_arguments(str(model), GeneratorConfig(dtype="float32"), Config(policy={"path": model}).policy, 0)
