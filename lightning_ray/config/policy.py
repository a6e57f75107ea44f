"""The policy: where it comes from and how it is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from lightning_ray.config.reading import Part

HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of attention, that vLLM takes on a CPU."""


class WarmStartConfig(Part):
    """A policy made on the spot: random weights and a tokenizer of its own, or those of `model`, then supervised
    warm-up on demonstrations whose choice is random, so that the format is known and the answer is not."""

    model: Path | None = None
    """A model directory in Hugging Face format whose tokenizer knows ChatML's marks; `hidden_size`, `layers` and
    `heads` are not used then."""
    hidden_size: int = Field(default=128, ge=32)
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    steps: int = Field(default=250, ge=0)
    batch_size: int = Field(default=32, ge=1)
    lr: float = Field(default=3e-3, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**32)
    cache: Path = Path("~/.cache/lightning_ray/policies")
    """Warm-started policies are kept here, by the hash of everything that made them."""

    @model_validator(mode="after")
    def heads_that_an_engine_takes(self) -> Self:
        width = self.hidden_size / self.heads
        if self.model is None and width not in HEAD_WIDTHS:
            raise ValueError(f"policy.warm_start.hidden_size ({self.hidden_size}) divided by policy.warm_start.heads "
                             f"({self.heads}) is {width:g}. It must be one of {', '.join(map(str, HEAD_WIDTHS))}")
        return self


class PolicyConfig(Part):
    path: Path | None = None
    """Model directory in Hugging Face format, with a tokenizer that has a chat template."""
    warm_start: WarmStartConfig | None = None
    """Make a policy by supervised warm-up instead of loading one."""
    name: str = "policy"
    """The model name that harnesses use."""
    chat_template: Path | None = None
    """A chat template file, where the tokenizer has none or another is wanted."""
    tool_parser: str | None = None
    """Name of a vLLM tool-call parser (`hermes`, `qwen3_coder`, ...)."""
    reasoning_parser: str | None = None
    """Name of a vLLM reasoning parser (`qwen3`, ...)."""
    max_context: int = Field(default=2048, ge=64)
    """Tokens, prompt and answer together."""

    @model_validator(mode="after")
    def one_origin(self) -> Self:
        if (self.path is None) == (self.warm_start is None):
            raise ValueError("give exactly one of policy.path and policy.warm_start (set the other one to null)")
        return self


class SamplingConfig(Part):
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of one answer; a harness may ask for fewer."""


class GeneratorConfig(Part):
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    replicas: int = Field(default=1, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    kv_cache_gib: int = Field(default=1, ge=1)
    """KV cache on the CPU."""
    max_num_seqs: int = Field(default=64, ge=1)
    in_flight: Literal["auto", "keep", "resend"] = "auto"
    """What becomes of generations while the learner works. `keep`: they are frozen with their KV cache. `resend`:
    learner and generator have the memory of their devices by turns. While the learner works, the generator's weights
    and KV cache leave it, and generations are sent again afterwards with the tokens that they have; while the generator
    works, the learner's states are in host memory.
    `auto`: `resend` on GPUs (`keep` where learner.zero_stage is 0), `keep` on the CPU."""
    transport: Literal["object_store", "ipc"] = "object_store"
    """How weights get from the learner to the generators. `object_store`: through Ray's shared memory on the host, or
    over the network. `ipc`: within the memory of each GPU, from the learner rank to the generator that share it."""
    bucket_mb: int = Field(default=512, ge=1)
    """The memory that a publish needs: weights travel in buckets of half as many MB at most, of which one is gathered
    while another is loaded. A layer is never split; one that is larger is a bucket of its own, and travels alone where
    two have no room."""
    enforce_eager: bool = True
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine."""
    extra: dict[str, Any] = {}
    """More `AsyncEngineArgs`, by vLLM's own names."""
