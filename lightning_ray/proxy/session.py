"""The capture of one rollout: pure bookkeeping that owns no task, clock or client.

An *exchange* is one request of the harness and its answer; with `n > 1` it makes several calls. Requests are named by
a digest of their body. The same body again is

- a **retry**, answered by the exchange that is in flight or recorded already, where nobody has received that
  exchange's answer, or where the SDK says that it retries (`x-stainless-retry-count`);
- otherwise a request of its own: two deliberately identical prompts are two calls.

Every answer that the engine gave is recorded, also where the harness went away. What nobody received and nothing went
on from is masked as `cancelled`. Prompts are kept as "the call continued, and the new tokens", so that a long
conversation costs its length once; `calls` gives them whole.

Everything that changes a session goes through `log` as a plain tuple before the harness can see its effect, and
`replay` makes the same session from those tuples again.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_ray.proxy.codec import Answer, ToolCall
from lightning_ray.proxy.conversation import chain
from lightning_ray.proxy.endpoint import OpenRollout
from lightning_ray.proxy.errors import RolloutEnded
from lightning_ray.proxy.history import Answered, History
from lightning_ray.proxy.message import Recent
from lightning_ray.trajectory.call import Call


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer, as the harness is told."""

    answer: Answer
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_reason: str | int | None
    token_ids: np.ndarray
    """int32 [S]."""
    logprobs: np.ndarray
    """float32 [S]."""


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
    sent: "Sent | None" = None
    """What the engine was asked, until it has answered."""

    def name(self, prefix: str) -> str:
        """An id for the response; the same for a replay."""
        return f"{prefix}{self.key.hex()}{self.ordinal:x}"


@dataclass(frozen=True, slots=True)
class Sent:
    """The prompts of an exchange as the engine was asked: for each the call that it continues, the tokens after that
    call's, and the relation."""

    dialect: str
    prompts: list[tuple[int | None, np.ndarray, str]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answered call as it is kept, and all that later prompts need of it. See `Call` for most fields."""

    ordinal: int
    """Of its exchange."""
    parent: int | None
    new_ids: np.ndarray
    """int32: the tokens of the prompt after those of the parent and its answer."""
    choice: Choice
    """Its token ids and log-probs are int32 and float32 arrays."""
    versions: np.ndarray
    finish_reason: str
    dialect: str
    relation: str
    masked: str | None
    system: str
    text: str
    """All sampled tokens as text, special tokens included."""
    end: str
    """Text of the end token that was sampled last, or empty."""
    added: list[dict[str, Any]]
    """The messages that the parent did not have."""
    overridden: dict[str, Any]
    finished_s: float
    prompt_tokens: int
    """Of all prompts of the exchange."""
    chain: list[bytes]
    """Empty where nobody will go on from it: it was found again after the proxy's process died."""
    text_length: int
    text_digest: bytes
    raw: bool

    def __reduce__(self) -> tuple:
        """Pickled as plain values and bytes: several times faster than dataclasses of arrays, and half as long."""
        values = [getattr(self, name) for name in self.__slots__]
        choice, answer = self.choice, self.choice.answer
        values[self.__slots__.index("choice")] = (
            answer.content, answer.reasoning, [(call.id, call.name, call.arguments) for call in answer.tool_calls],
            choice.finish_reason, choice.stop_reason, choice.token_ids.tobytes(), choice.logprobs.tobytes(),
        )
        for name in ("new_ids", "versions"):
            values[self.__slots__.index(name)] = getattr(self, name).tobytes()
        return sampled_again, tuple(values)


def sampled_again(*values: Any) -> Sampled:
    """What `Sampled.__reduce__` took apart."""
    fields = dict(zip(Sampled.__slots__, values, strict=True))
    content, reasoning, calls, finish, stop, token_ids, logprobs = fields["choice"]
    fields["choice"] = Choice(
        Answer(content, reasoning, tuple(ToolCall(*call) for call in calls)), finish, stop,
        np.frombuffer(token_ids, np.int32), np.frombuffer(logprobs, np.float32),
    )
    for name in ("new_ids", "versions"):
        fields[name] = np.frombuffer(fields[name], np.int32)
    return Sampled(**fields)


def keep_nothing(*entry: Any) -> None:
    """A `log` that forgets."""


@dataclass(slots=True)
class Session:
    """Everything that is known of one rollout."""

    opened: OpenRollout
    log: Callable[..., None] = keep_nothing
    history: History = field(default_factory=History)
    records: list[Sampled] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    by_key: dict[bytes, list[Exchange]] = field(default_factory=dict)
    calls_begun: int = 0
    tokens_sampled: int = 0
    faults: int = 0
    """Requests that the proxy failed on: the harness was told a server error."""
    limit: str | None = None
    """The setting that ended the rollout: a request was refused because its calls or tokens are used up."""
    recent: Recent = field(default_factory=Recent)
    """Spares work, and is no part of the record."""

    def admit(self, key: bytes, *, calls: int, retried: bool, now_s: float) -> tuple[Exchange, bool]:
        """The exchange that answers a request, and whether it is new.

        Raises `RolloutEnded` where a new one would exceed the rollout's limits; from then on no other is admitted.
        """
        alive = [one for one in self.by_key.get(key, ()) if not one.failed]
        for one in reversed(alive):
            if not one.delivered and not one.waiting:
                return one, False
        if retried and alive:
            return alive[-1], False
        if self.limit is None:
            self.limit = self._reached(calls)
        if self.limit is not None:
            raise RolloutEnded(f"This rollout has ended: {self.limit} are used up.")
        self.log("begin", key, calls, now_s)
        return self._begin(key, calls, now_s), True

    def _begin(self, key: bytes, calls: int, now_s: float) -> Exchange:
        same = self.by_key.setdefault(key, [])
        exchange = Exchange(key, ordinal=len(self.exchanges), repeat=len(same), calls=calls, started_s=now_s)
        same.append(exchange)
        self.exchanges.append(exchange)
        self.calls_begun += calls
        return exchange

    def _reached(self, calls: int) -> str | None:
        opened = self.opened
        if self.calls_begun + calls > opened.max_calls:
            return f"harness.max_calls ({opened.max_calls})"
        if opened.max_tokens is not None and self.tokens_sampled >= opened.max_tokens:
            return f"harness.max_tokens ({opened.max_tokens})"
        return None

    def fail(self, exchange: Exchange, *, counts: bool) -> None:
        """The exchange has no answer to give. `counts`: it used up calls all the same, because tokens were sampled."""
        if not exchange.failed:
            self.log("fail", exchange.ordinal, counts)
            self._fail(exchange, counts)

    def _fail(self, exchange: Exchange, counts: bool) -> None:
        exchange.failed = True
        if not counts:
            self.calls_begun -= exchange.calls

    def send(self, exchange: Exchange, sent: Sent) -> None:
        """The engine is about to be asked."""
        prompts = [(parent, new_ids.tobytes(), relation) for parent, new_ids, relation in sent.prompts]
        self.log("send", exchange.ordinal, sent.dialect, prompts)
        exchange.sent = sent

    def fault(self) -> None:
        """The proxy failed on a request."""
        self.log("fault")
        self.faults += 1

    def deliver(self, exchange: Exchange) -> None:
        """Somebody received the whole answer."""
        if not exchange.delivered:
            self.log("deliver", exchange.ordinal)
            exchange.delivered = True

    def record(self, sampled: Sampled) -> int:
        """Keep one answered call and let later prompts find it. Returns its index."""
        self.log("record", sampled)
        return self._record(sampled)

    def _record(self, sampled: Sampled) -> int:
        index = len(self.records)
        choice = sampled.choice
        exchange = self.exchanges[sampled.ordinal]
        exchange.choices.append(choice)
        exchange.prompt_tokens = sampled.prompt_tokens
        if len(exchange.choices) == exchange.calls:
            exchange.sent = None
        self.records.append(sampled)
        self.tokens_sampled += len(choice.token_ids)
        if not sampled.chain:
            return index
        self.history.add_child(sampled.parent)
        self.history.add_prompt(sampled.chain)
        if sampled.finish_reason not in ("stop", "length"):
            return index
        answered = Answered(
            call=index, messages=len(sampled.chain), prompt_length=sampled.text_length,
            prompt_digest=sampled.text_digest, sampled_text=sampled.text, end=sampled.end,
            stopped_by_text=isinstance(choice.stop_reason, str), answer=choice.answer,
        )
        if sampled.raw:
            self.history.add_raw(answered)
        else:
            (_, name) = chain(sampled.chain[-1], [choice.answer.message()])
            self.history.add_answer(name, sampled.chain, answered)
        return index

    def replay(self, entries: Iterable[tuple]) -> list[Exchange]:
        """Do again what `log` was told. What had begun and was neither answered nor failed has failed now: these are
        returned."""
        for kind, *fields in entries:
            if kind == "begin":
                self._begin(*fields)
            elif kind == "record":
                self._record(*fields)
            elif kind == "fail":
                self._fail(self.exchanges[fields[0]], fields[1])
            elif kind == "deliver":
                self.exchanges[fields[0]].delivered = True
            elif kind == "fault":
                self.faults += 1
            elif kind == "send":
                ordinal, dialect, prompts = fields
                self.exchanges[ordinal].sent = Sent(dialect, [
                    (parent, np.frombuffer(new_ids, np.int32), relation) for parent, new_ids, relation in prompts
                ])
        cut_off = [one for one in self.exchanges if not one.failed and len(one.choices) < one.calls]
        for exchange in cut_off:
            self._fail(exchange, counts=bool(exchange.choices))
        return cut_off

    def lost(self) -> list[Exchange]:
        """Exchanges for which the engine was asked, and whose answers have not all been recorded."""
        return [one for one in self.exchanges if one.sent is not None and len(one.choices) < one.calls]

    def prompt_ids(self, continues: int | None, new_ids: Sequence[int]) -> np.ndarray:
        """int32 [P]: a whole prompt, from the call that it continues and its new tokens."""
        parts = [np.asarray(new_ids, np.int32)]
        while continues is not None:
            record = self.records[continues]
            parts += [record.choice.token_ids, record.new_ids]
            continues = record.parent
        return np.concatenate(parts[::-1])

    def conversation(self, response: str) -> list[dict[str, Any]] | None:
        """The messages of an earlier exchange, its answer included, by the name of its response (`resp_...`)."""
        for record in reversed(self.records):
            if self.exchanges[record.ordinal].name("resp_") == response:
                turns: list[list[dict[str, Any]]] = []
                at: Sampled | None = record
                while at is not None:
                    turns.append([*at.added, at.choice.answer.message()])
                    at = self.records[at.parent] if at.parent is not None else None
                return [message for turn in reversed(turns) for message in turn]
        return None

    def calls(self) -> list[Call]:
        """All recorded calls, in the order in which their answers were recorded."""
        seen = {record.parent for record in self.records}
        calls = []
        for index, record in enumerate(self.records):
            exchange = self.exchanges[record.ordinal]
            received = exchange.delivered or index in seen
            calls.append(Call(
                index=index, prompt_ids=self.prompt_ids(record.parent, record.new_ids),
                sampled_ids=record.choice.token_ids, logprobs=record.choice.logprobs, versions=record.versions,
                finish_reason=record.finish_reason, dialect=record.dialect, parent=record.parent,
                relation=record.relation, masked=record.masked or (None if received else "cancelled"),
                system=record.system, text=record.text, messages=json.dumps(record.added, ensure_ascii=False),
                overridden=record.overridden, started_s=exchange.started_s, finished_s=record.finished_s,
            ))
        return calls
