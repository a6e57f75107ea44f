"""The capture of one rollout: pure bookkeeping that owns no task, clock or client.

An *exchange* is one request of the harness and its answer; with `n > 1` it makes several calls. Requests are named by
a digest of their body. The same body again is

- a **retry**, answered by the exchange that is in flight or recorded already, where nobody has received that
  exchange's answer, or where the SDK says that it retries (`x-stainless-retry-count`);
- otherwise a request of its own: two deliberately identical prompts are two calls.

Every answer that the engine gave is recorded, also where the harness went away; what nobody received is masked as
`cancelled`. Prompts are kept as "the call continued, and the new tokens", so that a long conversation costs its
length once; `calls` gives them whole.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_ray.proxy.codec import Answer
from lightning_ray.proxy.continuation import Prompt
from lightning_ray.proxy.conversation import digest, message_parts, system_prompt
from lightning_ray.proxy.endpoint import OpenRollout
from lightning_ray.proxy.history import Answered, History
from lightning_ray.trajectory.call import Call


class LimitReached(Exception):
    """The rollout has used up its calls or tokens. The text says which."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer, as the harness is told."""

    answer: Answer
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_reason: str | int | None
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(slots=True)
class Exchange:
    """One request of the harness and what was answered."""

    key: bytes
    ordinal: int
    """How many exchanges of this rollout began before it."""
    repeat: int
    """How many of those had the same body."""
    calls: int
    started_s: float
    waiting: int = 0
    """Connections that wait for the answer."""
    delivered: bool = False
    """Somebody received the whole answer."""
    failed: bool = False
    choices: list[Choice] = field(default_factory=list)
    prompt_tokens: int = 0

    def name(self, prefix: str) -> str:
        """An id for the response; the same for a replay."""
        return f"{prefix}{self.key.hex()}{self.ordinal:x}"


@dataclass(slots=True)
class Record:
    """One call as it is kept. See `Call` for what the fields mean."""

    exchange: Exchange
    parent: int | None
    new_ids: np.ndarray
    sampled_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    dialect: str
    relation: str
    masked: str | None
    system: str
    text: str
    added: list[dict[str, Any]]
    """The messages that the continued call did not have."""
    answer: Answer
    overridden: dict[str, Any]
    finished_s: float


@dataclass(slots=True)
class Session:
    """Everything that is known of one rollout."""

    opened: OpenRollout
    history: History = field(default_factory=History)
    records: list[Record] = field(default_factory=list)
    exchanges: dict[bytes, list[Exchange]] = field(default_factory=dict)
    begun: int = 0
    calls_begun: int = 0
    tokens_sampled: int = 0
    limit: str | None = None
    """The limit that ended the rollout, once one was reached."""

    def admit(self, key: bytes, *, calls: int, retried: bool, now_s: float) -> tuple[Exchange, bool]:
        """The exchange that answers a request, and whether it is new.

        Raises `LimitReached` where a new one would exceed the rollout's limits.
        """
        same = self.exchanges.setdefault(key, [])
        alive = [one for one in same if not one.failed]
        for one in reversed(alive):
            if not one.delivered and not one.waiting:
                return one, False
        if retried and alive:
            return alive[-1], False
        self._check_limits(calls)
        exchange = Exchange(key, ordinal=self.begun, repeat=len(same), calls=calls, started_s=now_s)
        same.append(exchange)
        self.begun += 1
        self.calls_begun += calls
        return exchange, True

    def _check_limits(self, calls: int) -> None:
        opened = self.opened
        if self.calls_begun + calls > opened.max_calls:
            self.limit = f"max_calls: the rollout has used its {opened.max_calls} calls"
        elif opened.max_tokens is not None and self.tokens_sampled >= opened.max_tokens:
            self.limit = f"max_tokens: the rollout has sampled its {opened.max_tokens} tokens"
        if self.limit:
            raise LimitReached(self.limit)

    def fail(self, exchange: Exchange) -> None:
        """The request was refused before anything was sampled: it counts for nothing."""
        exchange.failed = True
        self.calls_begun -= exchange.calls

    def prompt_ids(self, continues: int | None, new_ids: Sequence[int]) -> np.ndarray:
        """int32 [P]: a whole prompt, from the call that it continues and its new tokens."""
        parts = [np.asarray(new_ids, np.int32)]
        while continues is not None:
            record = self.records[continues]
            parts += [record.sampled_ids, record.new_ids]
            continues = record.parent
        return np.concatenate(parts[::-1])

    def record(
        self, exchange: Exchange, prompt: Prompt, messages: Sequence[dict[str, Any]], choice: Choice, *,
        versions: np.ndarray, engine_finish: str, sampled_text: str, end: str, dialect: str, masked: str | None,
        overridden: dict[str, Any], now_s: float,
    ) -> int:
        """Keep one answered call and let later prompts find it. Returns its index."""
        index = len(self.records)
        parent = prompt.continues
        self.records.append(Record(
            exchange=exchange, parent=parent.call if parent else None, new_ids=np.asarray(prompt.new_ids, np.int32),
            sampled_ids=np.asarray(choice.token_ids, np.int32), logprobs=np.asarray(choice.logprobs, np.float32),
            versions=np.asarray(versions, np.int32), finish_reason=engine_finish, dialect=dialect,
            relation=prompt.relation, masked=masked, system=system_prompt(messages), text=sampled_text,
            added=prompt.added, answer=choice.answer, overridden=overridden, finished_s=now_s,
        ))
        self.tokens_sampled += len(choice.token_ids)
        if parent is not None:
            parent.children += 1
        if engine_finish not in ("stop", "length"):
            return index
        answered = Answered(
            call=index, messages=len(prompt.chain), prompt_length=prompt.text_length, prompt_digest=prompt.text_digest,
            sampled_text=sampled_text, end=end, stopped_by_text=isinstance(choice.stop_reason, str),
            answer=choice.answer,
        )
        if prompt.raw:
            self.history.raw.append(answered)
        else:
            name = digest([prompt.chain[-1], *message_parts(choice.answer.message())])
            self.history.add_answer(name, prompt.chain, answered)
        return index

    def conversation(self, response: str) -> list[dict[str, Any]] | None:
        """The messages of an earlier exchange, its answer included, by the name of its response (`resp_...`)."""
        for record in reversed(self.records):
            if record.exchange.name("resp_") == response:
                turns: list[list[dict[str, Any]]] = []
                at: Record | None = record
                while at is not None:
                    turns.append([*at.added, at.answer.message()])
                    at = self.records[at.parent] if at.parent is not None else None
                return [message for turn in reversed(turns) for message in turn]
        return None

    def calls(self) -> list[Call]:
        """All recorded calls, in the order in which their answers were recorded."""
        return [
            Call(
                index=index, prompt_ids=self.prompt_ids(record.parent, record.new_ids), sampled_ids=record.sampled_ids,
                logprobs=record.logprobs, versions=record.versions, finish_reason=record.finish_reason,
                dialect=record.dialect, parent=record.parent, relation=record.relation,
                masked=record.masked or (None if record.exchange.delivered else "cancelled"),
                system=record.system, text=record.text, messages=json.dumps(record.added, ensure_ascii=False),
                overridden=record.overridden, started_s=record.exchange.started_s, finished_s=record.finished_s,
            )
            for index, record in enumerate(self.records)
        ]
