"""What a runner tells a proxy about a rollout, and what it gets back.

Plain data that travels between processes, so this file imports nothing heavy: a runner never pays for vLLM.
"""

import socket
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
class Status:
    """What a proxy knows of how a rollout went."""

    faults: int = 0
    """Requests that the proxy failed on."""
    limit: str | None = None
    """The setting that ended the rollout, with its value, where one did."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rollout's harness finds its model."""

    base_url: str
    """Without `/v1`: OpenAI clients take `base_url + "/v1"`, Anthropic clients `base_url`."""
    api_key: str = "none"
    """What a Python harness sends as its key, outside the sandbox. Our own proxy asks for none."""


def reached_at(host: str) -> str:
    """The address by which others reach a socket that listens on `host`: of every address (0.0.0.0), this machine's
    own towards the network. Nothing is sent. OSError where there is no network."""
    if host != "0.0.0.0":
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737)
        return probe.getsockname()[0]
