"""How a call is sampled: pinned in training, as the harness asks in evaluation.

In training the distribution is the policy's own: the configured temperature, no truncation, no penalties, no bias, a
seed of ours. What the harness asked for instead is returned as `overridden`. Stop strings and token limits shape no
distribution and are honoured; a constraint (forced tool choice, JSON schema) is honoured too, and the call is masked.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from lightning_ray.proxy.endpoint import OpenRollout
from lightning_ray.proxy.errors import BadRequest

NEUTRAL: dict[str, Any] = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "logit_bias": None, "bad_words": [], "allowed_token_ids": None, "min_tokens": 0,
    "ignore_eos": False, "repetition_detection": None,
}
"""vLLM's sampling parameters that change the distribution, and the values that leave it alone."""

IGNORED: dict[str, Any] = {"thinking_token_budget": None, "watermarking": None}
"""Wishes of harnesses that no engine here fulfils; they are recorded and otherwise left alone."""

UNSUPPORTED: dict[str, Any] = {
    "use_beam_search": False, "echo": False, "prompt_logprobs": None, "top_logprobs": 0, "logprob_token_ids": None,
    "truncate_prompt_tokens": None, "best_of": None, "suffix": None, "prompt_embeds": None, "chat_template": None,
}
"""Fields that would change the result and cannot be honoured, and their harmless values."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the engine is asked, beside the prompt."""

    max_tokens: int | None
    """As the harness asked; `clamp` makes it what fits."""
    temperature: float
    stop: list[str]
    stop_token_ids: list[int]
    params: dict[str, Any]
    overridden: dict[str, Any]


def asked(request: Any, names: dict[str, Any]) -> dict[str, Any]:
    """The fields of `request` among `names` that were set to something else than their neutral value."""
    found = {}
    for name, neutral in names.items():
        value = getattr(request, name, None)
        if value is not None and value != neutral and not (name == "top_k" and value == -1):
            found[name] = value
    return found


def choose(request: Any, opened: OpenRollout, constraint: Any) -> Sampling:
    """The sampling of a Chat Completions or Completions request (vLLM's protocol objects).

    Raises `BadRequest` for fields that cannot be honoured.
    """
    for name in asked(request, UNSUPPORTED):
        raise BadRequest(f"`{name}` is not supported by this endpoint.", param=name)
    wanted = asked(request, NEUTRAL)
    temperature = request.temperature
    overridden = asked(request, IGNORED)
    if opened.mode == "train":
        overridden, wanted = overridden | wanted, {}
        if temperature is not None and temperature != opened.sampling.temperature:
            overridden["temperature"] = temperature
        if request.seed is not None:
            overridden["seed"] = request.seed
        temperature = None
    limit = getattr(request, "max_completion_tokens", None)
    limit = request.__dict__.get("max_tokens") if limit is None else limit
    if limit is not None and limit < 1:
        raise BadRequest("`max_tokens` must be at least 1.", param="max_tokens")
    if limit is not None and limit > opened.sampling.max_tokens:
        overridden["max_tokens"] = limit
    if constraint is not None:
        wanted["structured_outputs"] = constraint
    stop = request.stop or []
    return Sampling(
        max_tokens=limit, temperature=opened.sampling.temperature if temperature is None else temperature,
        stop=[stop] if isinstance(stop, str) else list(stop), stop_token_ids=list(request.stop_token_ids or []),
        params=wanted, overridden=overridden,
    )


def clamp(sampling: Sampling, opened: OpenRollout, prompt_tokens: int, max_context: int, already_sampled: int) -> int:
    """Most tokens to sample: what was asked, what is configured, and what fits. At least 1 where the prompt fits."""
    limits = [opened.sampling.max_tokens, max_context - prompt_tokens]
    if sampling.max_tokens is not None:
        limits.append(sampling.max_tokens)
    if opened.max_tokens is not None:
        limits.append(max(1, opened.max_tokens - already_sampled))
    return min(limits)


def call_seed(opened: OpenRollout, key: bytes, repeat: int, choice: int) -> int:
    """A seed (63 bits) that depends on the rollout's seed, the request, and how often it was made, on nothing else."""
    name = f"{opened.seed}/{repeat}/{choice}/".encode() + key
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >> 1
