"""What one rollout has been asked and has answered, arranged so that a new prompt finds the call it continues.

`History` is pure bookkeeping over digests of conversations (`conversation.py`). `find` gives the answered calls whose
whole conversation (messages and answer) begins the new one, longest first; `relation` names how a new conversation
relates to what is known. Whether a candidate is really continued is decided on the rendered text
(`continuation.py`).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ray.proxy.codec import Answer
from lightning_ray.proxy.conversation import LEADING_ROLES, message_digest, texts

QUOTED_ANSWER = 40
"""A new conversation whose messages quote an earlier answer of at least so many characters is a compaction of it."""


@dataclass(slots=True)
class Answered:
    """One answered call, as later prompts meet it."""

    call: int
    """Index of the call in the rollout."""
    messages: int
    """How many messages its conversation has, the answer included."""
    prompt_length: int
    """Characters of its rendered prompt; -1 where it was given as token ids."""
    prompt_digest: bytes
    """Digest of its rendered prompt."""
    sampled_text: str
    """All sampled tokens as text, special tokens included."""
    end: str
    """Text of the end token that was sampled last, or empty where the answer was cut."""
    stopped_by_text: bool
    """A stop string ended it: the harness saw less than what was sampled."""
    answer: Answer
    children: int = 0
    """How many calls have continued it."""


@dataclass(slots=True)
class History:
    """All answered calls of one rollout."""

    answered: dict[int, Answered] = field(default_factory=dict)
    """By index of the call."""
    ends: dict[bytes, list[Answered]] = field(default_factory=dict)
    """Digest of a conversation with its answer -> the calls that ended so."""
    known: dict[bytes, int] = field(default_factory=dict)
    """Digest of every prefix of every conversation -> length in messages of the longest conversation through it."""
    prompts: set[bytes] = field(default_factory=set)
    """Digests of whole prompts."""
    raw: list[Answered] = field(default_factory=list)
    """Calls whose prompt was no conversation."""
    said: set[bytes] = field(default_factory=set)
    """Digests of the answers by themselves."""
    quotes: list[str] = field(default_factory=list)
    """The first long line of each answer, to recognise summaries."""

    def add_prompt(self, chain: Sequence[bytes]) -> None:
        """A prompt was answered (or is being answered): its prefixes are known from now on."""
        self._know(chain)
        self.prompts.add(chain[-1])

    def _know(self, chain: Sequence[bytes]) -> None:
        length = len(chain) - 1
        # The longer a prefix, the fewer conversations go through it: those with no longer one are the last of a chain.
        first = bisect_left(chain, True, lo=1, key=lambda digest: self.known.get(digest, 0) < length)
        self.known.update(dict.fromkeys(chain[first:], length))

    def add_child(self, parent: int | None) -> None:
        """A call goes on from `parent`."""
        if parent is not None:
            self.answered[parent].children += 1

    def add_raw(self, answered: Answered) -> None:
        """An answer to a prompt that was no conversation."""
        self.answered[answered.call] = answered
        self.raw.append(answered)

    def add_answer(self, digest: bytes, chain: Sequence[bytes], answered: Answered) -> None:
        """An answer was given; `digest` names its conversation with the answer appended."""
        self.answered[answered.call] = answered
        self.ends.setdefault(digest, []).append(answered)
        self._know([*chain, digest])
        self.said.add(message_digest(answered.answer.message()))
        if len(answered.answer.content) >= QUOTED_ANSWER:
            self.quotes.append(answered.answer.content.strip()[:4 * QUOTED_ANSWER])

    def find(self, chain: Sequence[bytes], messages: Sequence[dict[str, Any]]) -> list[tuple[int, list[Answered]]]:
        """(position, calls) for every prefix of the conversation that ends in an answer of ours, longest first.

        Where several calls ended alike, those whose tool-call ids the harness sent back come first, then those that
        nothing continues yet, then the earlier ones.
        """
        found = []
        for position in range(len(chain) - 1, 0, -1):
            calls = self.ends.get(chain[position])
            if calls and len(calls) == 1:
                found.append((position, calls))
            elif calls:
                sent = [call.get("id") for call in messages[position - 1].get("tool_calls") or []]
                found.append((position, sorted(calls, key=lambda one: (
                    [call.id for call in one.answer.tool_calls] != sent, one.children > 0, one.call,
                ))))
        return found

    def relation(
        self, chain: Sequence[bytes], messages: Sequence[dict[str, Any]], continued: Answered | None, refused: str
    ) -> str:
        """How the conversation relates to what is known.

        `continued` is the call whose tokens it goes on from, if any; `refused` says why the longest candidate was
        not continued (empty where there was none).
        """
        if refused:
            return refused
        shared = next((k for k in range(len(chain) - 1, 0, -1) if chain[k] in self.known), 0)
        if chain[-1] in self.prompts:
            return "resampled"
        if continued is not None:
            rest = messages[continued.messages:]
            if any(message.get("role") == "assistant" for message in rest):
                return "rewritten_history"
            return "continued" if shared == continued.messages and not continued.children else "forked"
        leading = 0
        while leading < len(messages) and messages[leading].get("role") in LEADING_ROLES:
            leading += 1
        if shared > leading:
            return "compacted" if len(messages) < self.known[chain[shared]] else "rewritten_history"
        if any(message.get("role") == "assistant" and message_digest(message) in self.said for message in messages):
            return "rewritten_history"  # an answer of ours, behind a system prompt or a question that is another now
        written = "\n".join(text for message in messages[leading:] for text in texts(message.get("content")))
        return "compacted" if any(quote in written for quote in self.quotes) else "new_conversation"
