"""A request for tokens, what came of it, and how a generation goes on after it was cut short. Plain data, pure.

A generation is durable: the engine may give it back unfinished for reasons of ours (weights change, memory is given
up, the engine restarts). `Progress` then turns the request and the tokens so far into the next request, and joins
the pieces, so that the caller sees one generation of full length whose tokens each carry their log-prob and the
policy version that sampled them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

CONTINUABLE = frozenset({
    "allowed_token_ids", "ignore_eos", "include_stop_str_in_output", "logit_bias", "min_p", "min_tokens",
    "repetition_penalty", "skip_special_tokens", "spaces_between_special_tokens", "top_k", "top_p",
})
"""Sampling parameters whose effect depends on nothing but the token ids so far, prompt included (and `min_tokens`,
which is counted down). With any other one the engine keeps state that a new request cannot be given (a grammar's
position, counts over the output alone), so the generation is begun again instead of continued."""

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Tokens wanted. `request_id` is unique among the requests that one generator has in flight."""

    request_id: str
    prompt_ids: list[int]
    """P token ids, P >= 1."""
    max_tokens: int
    """Most tokens to sample, >= 1. The engine stops at the context length if that comes first."""
    temperature: float
    """0 is greedy."""
    seed: int | None = None
    """Makes sampling repeatable as far as the engine's batching allows; None draws from the engine's own generator."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the generation; they need detokenisation, so leave them out where token ids do."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end the generation, beside the model's own end-of-sequence tokens. The token is returned."""
    params: dict[str, Any] = field(default_factory=dict)
    """More of vLLM's `SamplingParams`, by its own names (`top_p`, `structured_outputs`, ...)."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampled tokens. The arrays all have length S, the end-of-sequence or stop token included where sampled."""

    token_ids: np.ndarray
    """int32 [S]."""
    logprobs: np.ndarray
    """float32 [S]: log-probs under the distribution that was sampled from (temperature and truncation applied)."""
    versions: np.ndarray
    """int32 [S]: policy version that sampled each token."""
    finish_reason: str
    """`stop`, `length`, `abort` (the caller aborted it; the arrays hold what was sampled until then), or `interrupted`
    (the engine died; the arrays hold what it was known to have sampled, and any generator can go on from there)."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for the model's own end-of-sequence token."""


def versions_of(spans: Iterable[tuple[str, int, int]], length: int) -> np.ndarray:
    """int32 [length]: the version of each token, from spans `(version, start, end)` over token indexes.

    Raises ValueError where the spans do not cover the tokens exactly, in order, or a version is no integer.
    """
    versions = np.empty(length, np.int32)
    covered = 0
    for version, start, end in spans:
        if start != covered or end < start:
            raise ValueError(f"version spans leave a gap or overlap at token {covered}: next span is [{start}, {end})")
        versions[start:end] = int(version)
        covered = end
    if covered != length:
        raise ValueError(f"version spans cover {covered} of {length} tokens")
    return versions


def join(pieces: list[Generation], finish_reason: str, stop_reason: str | int | None = None) -> Generation:
    """One generation from pieces in order; no piece at all gives one of length 0."""

    def column(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *(getattr(piece, name) for piece in pieces)]).astype(dtype)

    return Generation(column("token_ids", np.int32), column("logprobs", np.float32), column("versions", np.int32),
                      finish_reason, stop_reason)


class Progress:
    """One generation under way: the request and the tokens so far. `max_context` is the engine's, in tokens.

    Send `next_request()` to an engine and `add` what comes back, until `done`; then `generation()` is the answer.
    A piece that ended `stop` or `length` finishes it; one that ended `abort` or `interrupted` does so only after
    `cancel()`, and otherwise leaves the rest to the next request.
    """

    def __init__(self, request: GenerateRequest, max_context: int):
        if not request.prompt_ids:
            raise ValueError(f"request {request.request_id}: the prompt has no tokens")
        if request.max_tokens < 1:
            raise ValueError(f"request {request.request_id}: max_tokens is {request.max_tokens}, must be at least 1")
        self.request = request
        self.max_context = max_context
        self.pieces: list[Generation] = []
        self.cancelled = False
        self.finish: tuple[str, str | int | None] | None = None

    @property
    def sampled(self) -> int:
        """How many tokens there are so far."""
        return sum(len(piece.token_ids) for piece in self.pieces)

    @property
    def done(self) -> bool:
        return self.finish is not None

    def cancel(self) -> None:
        """The caller wants no more: from now on an abort is the end of it."""
        self.cancelled = True

    def add(self, piece: Generation) -> None:
        """Take what the engine returned for the last `next_request()`."""
        if piece.finish_reason not in ("abort", "interrupted") or self.cancelled:
            self.pieces.append(piece)
            self.finish = ("abort" if piece.finish_reason == "interrupted" else piece.finish_reason, piece.stop_reason)
            return
        kept = self._kept(len(piece.token_ids))
        if kept:
            self.pieces.append(replace(piece, token_ids=piece.token_ids[:kept], logprobs=piece.logprobs[:kept],
                                       versions=piece.versions[:kept]))
        if self.sampled >= min(self.request.max_tokens, self.max_context - len(self.request.prompt_ids)):
            self.finish = ("length", None)

    def _kept(self, length: int) -> int:
        """How many of a cut-off piece's tokens the next request can build on. A stop string may have begun in the
        last tokens, where the engine would not look again: as many as the string has bytes are sampled once more.
        How many are dropped does not depend on what they are, so that nothing is favoured."""
        if set(self.request.params) - CONTINUABLE:
            return 0
        overlap = max((len(text.encode()) for text in self.request.stop), default=0)
        return max(0, length - overlap)

    def next_request(self) -> GenerateRequest:
        """What to send now: the tokens so far stand at the end of the prompt, the budget is what is left of it."""
        sampled = self.sampled
        if not sampled:
            return self.request
        seed, params = self.request.seed, self.request.params
        if seed is not None:  # the same seed again would draw the same random numbers as at the beginning
            seed = (seed + sampled * _GOLDEN) % 2**63
        if "min_tokens" in params:
            params = {**params, "min_tokens": max(0, params["min_tokens"] - sampled)}
        so_far = [int(token) for piece in self.pieces for token in piece.token_ids]
        return replace(self.request, prompt_ids=[*self.request.prompt_ids, *so_far],
                       max_tokens=self.request.max_tokens - sampled, seed=seed, params=params)

    def interrupted(self) -> Generation:
        """What there is of a generation that cannot go on here."""
        return join(self.pieces, "interrupted")

    def generation(self) -> Generation:
        """The whole generation; where it was cancelled before it ended, what there is of it, ended `abort`."""
        if self.finish is None and not self.cancelled:
            raise RuntimeError(f"request {self.request.request_id} is not done")
        return join(self.pieces, *(self.finish or ("abort", None)))
