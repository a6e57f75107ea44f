"""What a runner tells a proxy about a rollout, and what it gets back.

Plain data that travels between processes, so this file imports nothing heavy: a runner never pays for vLLM.
"""

from dataclasses import dataclass
from typing import Literal

from lightning_ray.config import SamplingConfig


@dataclass(frozen=True, slots=True)
class OpenRollout:
    """A rollout that is about to begin. `sampling.temperature` is pinned in training and a default in evaluation."""

    rollout_id: str
    mode: Literal["train", "evaluate"]
    sampling: SamplingConfig
    seed: int
    max_calls: int
    """Calls, each answer of `n > 1` counted; the next one is refused and ends the rollout."""
    max_tokens: int | None = None
    """Sampled tokens of the whole rollout; when they are used up, the next call is refused and ends the rollout."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rollout's harness finds its model."""

    base_url: str
    """Without `/v1`: OpenAI clients take `base_url + "/v1"`, Anthropic clients `base_url`."""
    token: str
    api_key: str = "none"
    """What a Python harness sends as its key, outside the sandbox. Our own proxy asks for none."""
