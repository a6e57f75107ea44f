"""One rollout while it runs: requests become calls of the engine, answers are recorded and handed to who waits.

`Capture` is the moving part around the bookkeeping in `session.py`: it owns the tasks of one rollout and its gate.
A request that waits for an answer may go away. If nobody comes back for it within the retry grace, its generation is
aborted; what it sampled is recorded and masked as `cancelled`. So is what generators sampled for an earlier process of
this proxy that never got it: the next one claims it from them. (What a generator that died had sampled, nobody knows.)
"""

import asyncio
import logging
import time
from hashlib import blake2b

from vllm.exceptions import VLLMValidationError

from lightning_ray.generator.request import GenerateRequest, Generation
from lightning_ray.proxy.codec import Answer, Codec
from lightning_ray.proxy.continuation import Prompt, build_prompt
from lightning_ray.proxy.conversation import system_prompt
from lightning_ray.proxy.dialect import Asked
from lightning_ray.proxy.engine import Engine
from lightning_ray.proxy.errors import BadRequest, ContextLength, ProxyError
from lightning_ray.proxy.gate import Gate
from lightning_ray.proxy.raw_prompt import build_raw_prompt
from lightning_ray.proxy.reading import Request, read
from lightning_ray.proxy.sampling import Sampling, call_seed, choose, clamp
from lightning_ray.proxy.session import Choice, Exchange, Sampled, Sent, Session

logger = logging.getLogger(__name__)

OFF_LOOP_BYTES = 40_000
"""Bodies longer than this are rendered in a thread, so that others are answered meanwhile."""
ABORT_TIMEOUT_S = 30
"""So long a generation may take to come back after it was aborted."""


class Capture:
    """A running rollout."""

    def __init__(
        self, session: Session, codec: Codec, engine: Engine, gate: Gate, *, retry_grace_s: float, began: float,
        life: str,
    ) -> None:
        """`began` is the wall-clock time (seconds since the epoch) at which the rollout began; `life` tells request
        ids of this process from those of one that died."""
        self.session = session
        self.gate = gate
        self.codec = codec
        self.engine = engine
        self.retry_grace_s = retry_grace_s
        self.life = life
        self.began = time.monotonic() - (time.time() - began)
        self.tasks: dict[int, asyncio.Task] = {}
        self.requests: dict[int, list[str]] = {}
        self.recovering: set[asyncio.Task] = set()

    def now(self) -> float:
        """Seconds since the rollout began."""
        return time.monotonic() - self.began

    def begin(self, asked: Asked, body: bytes, dialect: str, *, retried: bool) -> tuple[Exchange, asyncio.Task]:
        """The exchange that answers a request, and the task that ends when it is answered.

        Raises `RolloutEnded`; the task raises `ProxyError`. Call `arrive` and `leave` around waiting for it.
        """
        key = blake2b(body, digest_size=16, key=dialect.encode()).digest()
        calls = asked.n * max(1, len(asked.prompts))
        exchange, new = self.session.admit(key, calls=calls, retried=retried, now_s=self.now())
        if exchange.ordinal not in self.tasks:  # one that is not new was answered by an earlier process of this proxy
            answer = self._answer(exchange, asked, len(body), dialect) if new else asyncio.sleep(0)
            self.tasks[exchange.ordinal] = asyncio.create_task(answer)
        return exchange, self.tasks[exchange.ordinal]

    def arrive(self, exchange: Exchange) -> None:
        exchange.waiting += 1

    def leave(self, exchange: Exchange, *, delivered: bool) -> None:
        """A connection no longer waits: it has the whole answer, or it is gone."""
        exchange.waiting -= 1
        if delivered:
            self.session.deliver(exchange)
        if not exchange.delivered and not exchange.waiting and not self.gate.closed:
            asyncio.get_running_loop().call_later(self.retry_grace_s, self._abandoned, exchange)

    def _abandoned(self, exchange: Exchange) -> None:
        task = self.tasks.get(exchange.ordinal)
        if not exchange.waiting and not exchange.delivered and task is not None and not task.done():
            self.session.fail(exchange, counts=exchange.ordinal in self.requests)
            self._abort(exchange.ordinal, task)

    def _abort(self, ordinal: int, task: asyncio.Task) -> None:
        requests = self.requests.get(ordinal)
        if not requests:
            task.cancel()
        for request_id in requests or ():
            abort = asyncio.ensure_future(self.engine.abort(request_id))
            abort.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def finish(self) -> None:
        """Close the gate, abort what runs, wait until all of it is recorded."""
        self.gate.close()
        running = {ordinal: task for ordinal, task in self.tasks.items() if not task.done()}
        for ordinal, task in running.items():
            self._abort(ordinal, task)
        waiting = {*running.values(), *self.recovering}
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=ABORT_TIMEOUT_S)
            for task in late:
                logger.warning("rollout %s: a generation did not end after its abort", self.session.opened.rollout_id)
                task.cancel()
        self.engine.forget(self.session.opened.rollout_id)

    def recover(self, lives: list[str]) -> None:
        """Find what generators sampled for earlier processes (`lives`) that never got it. `finish` waits for it."""
        for exchange in self.session.lost():
            for number in range(len(exchange.choices), exchange.calls):
                for life in lives:
                    task = asyncio.create_task(self._recover(exchange, exchange.sent, number, life))
                    self.recovering.add(task)
                    task.add_done_callback(self.recovering.discard)

    async def _recover(self, exchange: Exchange, sent: Sent, number: int, life: str) -> None:
        """Record it as cancelled: nobody received it, and the harness has asked again."""
        parent, new_ids, relation = sent.prompts[number * len(sent.prompts) // exchange.calls]
        for generation in await self.engine.claim(self.request_id(life, exchange, number)):
            ids = generation.token_ids
            if not len(ids):
                continue
            text = self.codec.decode(ids.tolist(), new_ids.tolist())
            self.session.record(Sampled(
                ordinal=exchange.ordinal, parent=parent, new_ids=new_ids,
                choice=Choice(Answer(text), "length", None, ids, generation.logprobs), versions=generation.versions,
                finish_reason="abort", dialect=sent.dialect, relation=relation, masked="cancelled", system="",
                text=text, end="", added=[], overridden={}, finished_s=self.now(), prompt_tokens=len(new_ids),
                chain=[], text_length=0, text_digest=b"", raw=False,
            ))

    async def _answer(self, exchange: Exchange, asked: Asked, body_bytes: int, dialect: str) -> None:
        try:
            async with self.gate.turns:
                await self._ask(exchange, asked, body_bytes, dialect)
        except (ProxyError, asyncio.CancelledError):
            self.session.fail(exchange, counts=bool(exchange.choices))
            raise
        except Exception as error:
            self.session.fail(exchange, counts=bool(exchange.choices))
            self.session.fault()
            logger.exception("rollout %s: a request could not be served", self.session.opened.rollout_id)
            raise ProxyError("The proxy failed on this request.") from error
        finally:
            self.requests.pop(exchange.ordinal, None)

    async def _ask(self, exchange: Exchange, asked: Asked, body_bytes: int, dialect: str) -> None:
        """Build the prompts, have them answered, record the answers. Whatever was sampled is recorded, also where
        another choice of the same request failed."""
        opened = self.session.opened
        prompts = await self._prompts(asked, body_bytes)
        prompt_ids = [self._ids(prompt) for prompt in prompts]
        longest = max(map(len, prompt_ids))
        if longest >= self.codec.max_context:
            raise ContextLength(self.codec.max_context, longest)
        adjusted = self.codec.adjust(asked.request, free=opened.mode == "train") if asked.messages else asked.request
        constraint = adjusted.extract_structured_outputs()
        sampling = choose(asked.request, opened, constraint)
        for prompt in prompts:
            self.session.history.add_prompt(prompt.chain)
        requests = [
            GenerateRequest(
                request_id=self.request_id(self.life, exchange, number * asked.n + index), prompt_ids=ids,
                max_tokens=clamp(sampling, opened, len(ids), self.codec.max_context, self.session.tokens_sampled),
                temperature=sampling.temperature, stop=sampling.stop, stop_token_ids=sampling.stop_token_ids,
                seed=call_seed(opened, exchange.key, exchange.repeat, number * asked.n + index), params=sampling.params,
            )
            for number, ids in enumerate(prompt_ids) for index in range(asked.n)
        ]
        self.session.send(exchange, Sent(dialect, [
            (prompt.continues.call if prompt.continues else None, prompt.new_ids, prompt.relation) for prompt in prompts
        ]))
        self.requests[exchange.ordinal] = [request.request_id for request in requests]
        if len(requests) == 1:
            results = [await self._generate(requests[0])]
        else:
            results = await asyncio.gather(*map(self._generate, requests))
        for number, result in enumerate(results):
            if isinstance(result, Generation):
                at = number // asked.n
                self.session.record(self._sampled(
                    exchange, asked, prompts[at], prompt_ids[at], result, sampling, dialect, adjusted,
                    masked="constrained" if constraint is not None else None, prompt_tokens=sum(map(len, prompt_ids)),
                ))
        for result in results:
            if isinstance(result, ValueError):
                raise BadRequest(f"The engine refused the request: {result}")
            if isinstance(result, Exception):
                raise result

    async def _generate(self, request: GenerateRequest) -> Generation | Exception:
        try:
            return await self.engine.generate(self.session.opened.rollout_id, request)
        except Exception as error:  # raised by `_ask`, once what others sampled is recorded
            return error

    def request_id(self, life: str, exchange: Exchange, number: int) -> str:
        """The engine's name for one choice of an exchange."""
        return f"{self.session.opened.rollout_id}/{life}/{exchange.ordinal}/{number}"

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.session.prompt_ids(prompt.continues.call if prompt.continues else None, prompt.new_ids).tolist()

    async def count(self, asked: Asked) -> int:
        """How many tokens the prompt of a request has; nothing is recorded."""
        (prompt,) = await self._prompts(asked, OFF_LOOP_BYTES + 1)
        return len(self._ids(prompt))

    async def _prompts(self, asked: Asked, body_bytes: int) -> list[Prompt]:
        try:
            return await asyncio.to_thread(self._build, asked) if body_bytes > OFF_LOOP_BYTES else self._build(asked)
        except VLLMValidationError as error:
            raise BadRequest(str(error), param=error.parameter or "messages") from None

    def _build(self, asked: Asked) -> list[Prompt]:
        if asked.messages:
            return [build_prompt(asked.request, asked.messages, self.session.history, self.codec)]
        return [
            build_raw_prompt(prompt, self.session, self.codec, add_special=asked.request.add_special_tokens)
            for prompt in asked.prompts
        ]

    def _sampled(
        self, exchange: Exchange, asked: Asked, prompt: Prompt, prompt_ids: list[int], generation: Generation,
        sampling: Sampling, dialect: str, adjusted: Request, *, masked: str | None, prompt_tokens: int,
    ) -> Sampled:
        reading = read(self.codec, adjusted, prompt_ids, generation)
        answer = reading.answer
        named = getattr(asked.request, "tool_choice", None) not in (None, "none", "auto", "required")
        finish = "length" if generation.finish_reason == "abort" else generation.finish_reason
        finish = "tool_calls" if answer.tool_calls and not named else finish
        choice = Choice(
            answer=answer, finish_reason=finish, stop_reason=generation.stop_reason,
            token_ids=generation.token_ids, logprobs=generation.logprobs,
        )
        return Sampled(
            ordinal=exchange.ordinal, parent=prompt.continues.call if prompt.continues else None,
            new_ids=prompt.new_ids, choice=choice, versions=generation.versions,
            finish_reason=generation.finish_reason, dialect=dialect, relation=prompt.relation,
            masked="cancelled" if generation.finish_reason == "abort" else masked,
            system=system_prompt(asked.messages), text=reading.sampled_text, end=reading.end,
            added=list(map(dict, prompt.added)), overridden=sampling.overridden, finished_s=self.now(),
            prompt_tokens=prompt_tokens, chain=prompt.chain, text_length=prompt.text_length,
            text_digest=prompt.text_digest, raw=prompt.raw,
        )
