"""One rollout while it runs: requests become calls of the engine, answers are recorded and handed to who waits.

`Capture` is the moving part around the bookkeeping in `session.py`: it owns the tasks of one rollout and its gate.
A request that waits for an answer may go away. If nobody comes back for it within the retry grace, its generation is
aborted; what it sampled is recorded and masked as `cancelled`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from hashlib import blake2b

from vllm.exceptions import VLLMValidationError

from lightning_ray.generator.request import GenerateRequest, Generation
from lightning_ray.proxy.codec import Codec
from lightning_ray.proxy.continuation import Prompt, build_prompt
from lightning_ray.proxy.dialect import Asked
from lightning_ray.proxy.endpoint import OpenRollout
from lightning_ray.proxy.engine import Engine
from lightning_ray.proxy.errors import BadRequest, ContextLength, ProxyError, RolloutEnded
from lightning_ray.proxy.gate import Gate
from lightning_ray.proxy.raw_prompt import build_raw_prompt
from lightning_ray.proxy.reading import read
from lightning_ray.proxy.sampling import Sampling, call_seed, choose, clamp
from lightning_ray.proxy.session import Choice, Exchange, LimitReached, Session

logger = logging.getLogger(__name__)

OFF_LOOP_BYTES = 40_000
"""Bodies longer than this are rendered in a thread, so that others are answered meanwhile."""
ABORT_TIMEOUT_S = 30
"""So long a generation may take to come back after it was aborted."""


class Capture:
    """A running rollout."""

    def __init__(
        self, opened: OpenRollout, codec: Codec, engine: Engine, *, most_running: int, retry_grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = Session(opened)
        self.gate = Gate(most_running)
        self.codec = codec
        self.engine = engine
        self.retry_grace_s = retry_grace_s
        self.clock = clock
        self.began = clock()
        self.tasks: dict[int, asyncio.Task] = {}
        self.requests: dict[int, list[str]] = {}

    def now(self) -> float:
        """Seconds since the rollout began."""
        return self.clock() - self.began

    def begin(self, asked: Asked, body: bytes, dialect: str, *, retried: bool) -> tuple[Exchange, asyncio.Task]:
        """The exchange that answers a request, and the task that ends when it is answered.

        The task raises `ProxyError`. Call `arrive` and `leave` around waiting for it.
        """
        key = blake2b(body, digest_size=16, key=dialect.encode()).digest()
        try:
            calls = asked.n * max(1, len(asked.prompts))
            exchange, new = self.session.admit(key, calls=calls, retried=retried, now_s=self.now())
        except LimitReached as limit:
            raise RolloutEnded(f"This rollout has ended: {limit}.") from None
        if new:
            self.tasks[exchange.ordinal] = asyncio.create_task(self._answer(exchange, asked, len(body), dialect))
        return exchange, self.tasks[exchange.ordinal]

    def arrive(self, exchange: Exchange) -> None:
        exchange.waiting += 1

    def leave(self, exchange: Exchange, *, delivered: bool) -> None:
        """A connection no longer waits: it has the whole answer, or it is gone."""
        exchange.waiting -= 1
        exchange.delivered = exchange.delivered or delivered
        if not exchange.delivered and not exchange.waiting and not self.gate.closed:
            asyncio.get_running_loop().call_later(self.retry_grace_s, self._abandoned, exchange)

    def _abandoned(self, exchange: Exchange) -> None:
        task = self.tasks.get(exchange.ordinal)
        if not exchange.waiting and not exchange.delivered and task is not None and not task.done():
            exchange.failed = True
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
        if running:
            _, late = await asyncio.wait(running.values(), timeout=ABORT_TIMEOUT_S)
            for task in late:
                logger.warning("rollout %s: a generation did not end after its abort", self.session.opened.rollout_id)
                task.cancel()
        self.engine.forget(self.session.opened.rollout_id)

    async def _answer(self, exchange: Exchange, asked: Asked, body_bytes: int, dialect: str) -> None:
        try:
            async with self.gate.turn():
                await self._ask(exchange, asked, body_bytes, dialect)
        except (ProxyError, asyncio.CancelledError):
            self.session.fail(exchange)
            raise
        except Exception as error:
            self.session.fail(exchange)
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
        exchange.prompt_tokens = sum(map(len, prompt_ids))
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
                request_id=f"{opened.rollout_id}/{exchange.ordinal}/{number}/{index}", prompt_ids=ids,
                max_tokens=clamp(sampling, opened, len(ids), self.codec.max_context, self.session.tokens_sampled),
                temperature=sampling.temperature, stop=sampling.stop, stop_token_ids=sampling.stop_token_ids,
                seed=call_seed(opened, exchange.key, exchange.repeat, number * asked.n + index), params=sampling.params,
            )
            for number, ids in enumerate(prompt_ids) for index in range(asked.n)
        ]
        self.requests[exchange.ordinal] = [request.request_id for request in requests]
        results = await asyncio.gather(
            *(self.engine.generate(opened.rollout_id, request) for request in requests), return_exceptions=True
        )
        for number, result in enumerate(results):
            if isinstance(result, Generation):
                at = number // asked.n
                exchange.choices.append(self._record(
                    exchange, asked, prompts[at], prompt_ids[at], result, sampling, dialect, adjusted,
                    masked="constrained" if constraint is not None else None,
                ))
        for result in results:
            if isinstance(result, ValueError):
                raise BadRequest(f"The engine refused the request: {result}")
            if isinstance(result, BaseException):
                raise result

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

    def _record(
        self, exchange: Exchange, asked: Asked, prompt: Prompt, prompt_ids: list[int], generation: Generation,
        sampling: Sampling, dialect: str, adjusted, *, masked: str | None,
    ) -> Choice:
        reading = read(self.codec, adjusted, prompt_ids, generation)
        answer = reading.answer
        named = getattr(asked.request, "tool_choice", None) not in (None, "none", "auto", "required")
        finish = "length" if generation.finish_reason == "abort" else generation.finish_reason
        finish = "tool_calls" if answer.tool_calls and not named else finish
        choice = Choice(
            answer=answer, finish_reason=finish, stop_reason=generation.stop_reason, token_ids=generation.token_ids,
            logprobs=generation.logprobs,
        )
        self.session.record(
            exchange, prompt, asked.messages, choice, versions=generation.versions,
            engine_finish=generation.finish_reason, sampled_text=reading.sampled_text, end=reading.end, dialect=dialect,
            masked="cancelled" if generation.finish_reason == "abort" else masked,
            overridden=sampling.overridden, now_s=self.now(),
        )
        return choice
