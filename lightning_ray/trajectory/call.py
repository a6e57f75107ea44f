"""What one rollout leaves behind: its calls, its reward, its end.

A `Call` is one model request and its answer, in tokens. It is written once, by the proxy, when the answer is
known, and never changed. A `Trajectory` is all calls of one rollout in the order in which they were answered,
with the verdict on the rollout. Both are plain data: they travel through Ray's object store and into Parquet.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

End = Literal["graded", "harness_failed", "infra_failed"]
"""`harness_failed` is data (its exit, timeout, limits; reward 0). `infra_failed` is ours: retried, never trained."""


@dataclass(frozen=True, slots=True)
class Call:
    """One model request and its answer. Arrays of one answer all have length S, the number of sampled tokens."""

    index: int
    """Position among the calls of the rollout, in the order in which answers were recorded."""
    prompt_ids: np.ndarray
    """int32 [P]: the prompt exactly as the engine saw it."""
    sampled_ids: np.ndarray
    """int32 [S]: the tokens that the engine sampled, end-of-turn token included where it was sampled."""
    logprobs: np.ndarray
    """float32 [S]: behaviour log-probs, recorded when each token was sampled."""
    versions: np.ndarray
    """int32 [S]: policy version that sampled each token."""
    finish_reason: str
    """`stop`, `length` or `abort` (the client went away)."""
    dialect: str = "chat"
    """`chat`, `completions`, `responses` or `messages`."""
    parent: int | None = None
    """Index of the call that this one continues token for token, or None where a branch begins."""
    relation: str = "new_conversation"
    """Why the prompt was built as it was: `continued`, `new_conversation`, `rewritten_history`, ..."""
    masked: str | None = None
    """The reason why none of its tokens is trained (`constrained`, `cancelled`, ...), or None."""
    system: str = ""
    """The system prompt, for rules that select branches."""
    text: str = ""
    """The sampled tokens as text, for readers."""
    messages: str = ""
    """JSON: the messages that this call added to the conversation it continues, for readers."""
    overridden: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that the harness asked for and training pinned to other values."""
    started_s: float = 0.0
    """Seconds from the start of the rollout to the arrival of the request."""
    finished_s: float = 0.0
    """Seconds from the start of the rollout to the answer."""


@dataclass(slots=True)
class Trajectory:
    """All calls of one rollout, its reward, its end."""

    rollout_id: str
    group_id: str
    task_id: str
    calls: list[Call]
    end: End
    reason: str = ""
    """Why it ended so: the harness's exit status, the grader's verdict, or the failure."""
    reward: float = 0.0
    passed: bool = False
    """The grader's verdict, before any shaping of the reward."""
    patch: str = ""
    """The agent's diff, as it was taken from the workspace."""
    suspicions: list[str] = field(default_factory=list)
    """What the grader refused or found suspicious."""
    discarded_tokens: int = 0
    """Tokens sampled in earlier attempts of this rollout, which failed for reasons of ours and were run again."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by stage: `init`, `run`, `grade`."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What else is worth keeping: resource limits in force, grader report, attempts."""

    @property
    def tokens_sampled(self) -> int:
        return sum(len(call.sampled_ids) for call in self.calls)

    @property
    def tokens_prompt(self) -> int:
        return sum(len(call.prompt_ids) for call in self.calls)

    def _repr_html_(self) -> str:
        from lightning_ray.observe.html import rollout_html

        return rollout_html(self)
