"""`GeneratorWorker`: vLLM's `AsyncLLM` in an async Ray actor. Tokens in; tokens, log-probs and versions out.

* `generate` runs in a concurrency group of its own, thousands at once; every other call runs in `control`, so that
  waiting generations cannot starve them. Ray gives each group an event loop in a thread of its own, and the engine
  belongs to one loop: `generate`'s. Control calls hop to it (`_on_engine_loop`).
* `freeze` stops sampling and keeps the KV cache of what runs, or gives up the memory of weights and KV cache
  (`give_up_memory`); `thaw` goes on. Requests that arrive while frozen wait here, and no caller notices. A generation
  that lost its KV cache is sent again with the tokens that it has. One that had no token yet when the engine froze is
  taken back and sent again after the thaw: it then belongs wholly to the new weights.
* The actor's process may die and be started again by Ray. It then starts its engine by itself and waits, with all
  requests that arrive meanwhile, for weights (those in `model_dir` may be old) and a thaw; where nobody will send any
  (`fixed`), for its engine alone.
* Prefix cache: every request is salted with the publish it is sent under, so that a request never builds on KV that
  other weights computed, while generations that run on keep theirs. Stale blocks age out of the cache.
* Log-probs are those of the distribution that was sampled from (`processed_logprobs`): the behaviour policy.

Errors: `ready` raises what vLLM raises when it cannot start; `generate` raises ValueError for a request that cannot
be served (a prompt longer than the context, an unknown parameter). When the engine's process dies, its generations are
given back `interrupted`, with the tokens that it was known to have sampled, and the actor ends: to its callers a
generator is there or, by Ray's `RayActorError`, it is not.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import numpy as np
import ray

from lightning_ray.config import GeneratorConfig, PolicyConfig
from lightning_ray.generator.claims import Ended
from lightning_ray.generator.engine import keeps_seeds, rescued_output, sampled_logprobs, sampling_params, start_engine
from lightning_ray.generator.publishing import PublishFailed, Publishing
from lightning_ray.generator.request import GenerateRequest, Generation, Progress, join, versions_of
from lightning_ray.scratch import Scratch, sweep

NOT_STARTED = "the generator has not been started: call ready() first"
CLAIM_LOOK_S = 0.01
"""How often it is looked whether a generation that is claimed has ended."""
DRAIN_LOOK_S = 0.01
"""How often a draining generator looks whether its engine is done."""
ENGINE_STOP_S = 1.0
"""How long the engine's process may take to end by itself."""
HAND_OVER_S = 0.5
"""How long this process outlives its engine, so that Ray can deliver what the engine's generations were given back."""
START_RETRIES = 3
"""How often in a row the process may die while its engine starts."""


class Restarted(RuntimeError):
    """This process was started again, and no weights have been published to it since."""


class _Flight:
    """One request that is here: its progress, and whether the engine has sampled for it since it was last sent."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.cancelled = asyncio.Event()
        self.with_engine = False
        self.started = False

    @property
    def runs(self) -> bool:
        return self.with_engine and self.started

    @property
    def waits_for_first_token(self) -> bool:
        return self.with_engine and not self.started


@ray.remote(concurrency_groups={"generate": 4096, "control": 64})
class GeneratorWorker:
    """One engine. `version` is the policy version of the weights in `model_dir` (0 for the start weights); `fixed`:
    they are the only ones that it will ever have."""

    def __init__(self, model_dir: str, config: GeneratorConfig, policy: PolicyConfig, seed: int, version: int = 0,
                 fixed: bool = False):
        self._model_dir = model_dir
        self._config = config
        self._policy = policy
        self._seed = seed
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._facts: dict[str, Any] = {}
        self._starting = asyncio.Lock()
        self._flights: dict[str, _Flight] = {}
        self._lately = Ended()
        self._open = asyncio.Event()
        self._ended = asyncio.Event()
        self._seeded = False
        here = ray.get_runtime_context()
        self._restarted = here.was_current_actor_reconstructed
        self._weights = Publishing(version, whole=fixed or not self._restarted)
        self._fixed = fixed
        self._asleep: list[str] = []
        if self._restarted:
            here.current_actor.ready.remote()

    # --- the generate group, on the loop that owns the engine ---

    @ray.method(concurrency_group="generate", max_task_retries=START_RETRIES)
    async def ready(self) -> dict[str, Any]:
        """Start the engine. Returns `start_s`, `max_model_len`, `kv_tokens`, `vocabulary`, `version`, and `pid` of the
        actor. Idempotent.

        Asked of an actor that is being restarted, it waits for the new process.
        """
        async with self._starting:
            if not self._facts:
                await self._start()
        return {**self._facts, "version": self._weights.version}

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started = time.monotonic()
        sweep()  # an earlier process of this actor may have been killed
        self._sockets = Scratch(private=True)
        self._engine = start_engine(self._model_dir, self._config, self._policy, self._seed, self._sockets.path)
        await self._engine.update_weight_version(str(self._weights.version))
        await self._connect_transfer()
        self._seeded = keeps_seeds(self._engine.vllm_config.scheduler_config)
        cache, model = self._engine.vllm_config.cache_config, self._engine.model_config
        self._facts = {
            "start_s": time.monotonic() - started,
            "max_model_len": model.max_model_len,
            "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
            "vocabulary": model.get_vocab_size(),
            "pid": os.getpid(),
        }
        if self._weights.whole:
            self._open.set()

    async def _connect_transfer(self) -> None:
        from ray import cloudpickle
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        here = ray.get_runtime_context()
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={
            "ray_address": here.gcs_address, "namespace": here.namespace,
            "source": cloudpickle.dumps(here.current_actor),
        }))

    @ray.method(concurrency_group="generate")
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample up to `request.max_tokens` tokens after the prompt."""
        if not self._facts:
            if not self._restarted:
                raise RuntimeError(NOT_STARTED)
            self._loop = asyncio.get_running_loop()
        if request.request_id in self._flights:
            raise ValueError(f"request id {request.request_id!r} is in flight already")
        progress = Progress(request, self._facts.get("max_model_len", self._policy.max_context))
        flight = self._flights[request.request_id] = _Flight(progress)
        try:
            while not progress.done and not progress.cancelled:
                if self._ended.is_set():
                    return progress.interrupted()
                if self._open.is_set():
                    progress.add(await self._sample(flight))
                else:
                    await _first_of(self._open.wait(), self._ended.wait(), flight.cancelled.wait())
            return self._lately.keep(request.request_id, progress.generation())
        finally:
            del self._flights[request.request_id]

    async def _sample(self, flight: _Flight) -> Generation:
        """One piece: from the engine's taking the request until it ends or is aborted."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        request = flight.progress.next_request()
        token_ids: list[int] = []
        logprobs: list[float] = []
        try:
            prompt = tokens_input(request.prompt_ids, cache_salt=str(self._weights.count))
            outputs = self._engine.generate(prompt, sampling_params(request, seeded=self._seeded),
                                            request.request_id)
            flight.with_engine, flight.started = True, False
            async for output in outputs:
                flight.started = True
                completion = output.outputs[0]
                token_ids.extend(completion.token_ids)
                logprobs.extend(sampled_logprobs(completion.logprobs))
        except EngineDeadError:
            self._end()
            completion = rescued_output(self._engine, request.request_id)
            if completion is None:
                return join([], "interrupted")
            token_ids, logprobs = list(completion.token_ids), sampled_logprobs(completion.logprobs)
        except (VLLMClientError, TypeError) as error:
            raise ValueError(f"request {request.request_id}: {error}") from error
        finally:
            flight.with_engine = False
        if completion.finish_reason == "error":
            raise RuntimeError(f"request {request.request_id}: the engine failed on it; its log says why")
        spans = ((span.version, span.start, span.end) for span in completion.weight_versions or ())
        return Generation(
            np.array(token_ids, np.int32), np.array(logprobs, np.float32), versions_of(spans, len(token_ids)),
            completion.finish_reason, completion.stop_reason,
        )

    # --- the control group ---

    @ray.method(concurrency_group="control")
    async def abort(self, request_id: str) -> None:
        """End a generation with what it has. Unknown ids (it may have just ended) are no error."""
        await self._on_engine_loop(self._abort(request_id))

    async def _abort(self, request_id: str) -> None:
        if flight := self._flights.get(request_id):
            flight.progress.cancel()
            flight.cancelled.set()
            await self._take_back(lambda some: some is flight and some.with_engine)

    @ray.method(concurrency_group="control")
    async def claim(self, request_id: str) -> Generation | None:
        """What was sampled for a caller that died before it got it, ended now where it still runs. None where nothing
        is known of it any more (`claims.py`)."""
        return await self._on_engine_loop(self._claim(request_id))

    async def _claim(self, request_id: str) -> Generation | None:
        await self._abort(request_id)
        while request_id in self._flights:
            await asyncio.sleep(CLAIM_LOOK_S)
        return self._lately.take(request_id)

    @ray.method(concurrency_group="control")
    async def drain(self) -> None:
        """Finish what the engine has, however long it takes. Requests that arrive from now on wait here until `thaw`,
        as they do while frozen. Idempotent."""
        self._check_weights()
        await self._on_engine_loop(self._drain())

    async def _drain(self) -> None:
        self._open.clear()
        while any(flight.with_engine for flight in self._flights.values()):
            await asyncio.sleep(DRAIN_LOOK_S)

    @ray.method(concurrency_group="control")
    async def freeze(self, give_up_memory: bool = False) -> None:
        """Stop sampling, and keep the KV cache. Idempotent.

        `give_up_memory`: weights and KV cache leave the GPU (on the CPU, where vLLM cannot do that, the cache is only
        emptied); what runs is taken out of the engine, and sent again after the thaw with the tokens that it has.
        """
        self._check_weights()
        await self._on_engine_loop(self._freeze(give_up_memory))

    async def _freeze(self, give_up_memory: bool) -> None:
        self._open.clear()
        if not give_up_memory:
            # Not `pause_generation`, which sleeps 20 ms for outputs that are under way. Taken back too early, a
            # generation that just got its first token is only sent again with it.
            await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            await self._take_back(lambda flight: flight.waits_for_first_token)
        elif not self._asleep:
            await self._engine.pause_generation(mode="abort", clear_cache=False)
            await self._take_back(lambda flight: flight.with_engine)
            await self._engine.sleep(level=1)
            self._asleep = ["weights", "kv_cache"]

    async def _wake(self, *tags: str) -> None:
        waking = [tag for tag in tags if tag in self._asleep]
        if waking:
            await self._engine.wake_up(waking)
            self._asleep = [tag for tag in self._asleep if tag not in waking]

    async def _take_back(self, which: Callable[[_Flight], bool]) -> None:
        """Abort flights in the engine until none of them is there: one that is still being handed over is unknown to
        it for a moment, and an abort then misses it."""
        while ids := [request_id for request_id, flight in self._flights.items() if which(flight)]:
            await self._engine.abort(ids)
            await asyncio.sleep(0.002)

    @ray.method(concurrency_group="control")
    async def thaw(self) -> None:
        """Go on sampling. Idempotent. Raises `PublishFailed` after a publish that failed."""
        await self._on_engine_loop(self._thaw())

    async def _thaw(self) -> None:
        if not self._weights.whole:
            raise PublishFailed("the last publish failed: publish again before the thaw")
        await self._wake("weights", "kv_cache")
        await self._engine.resume_generation()
        self._open.set()

    @ray.method(concurrency_group="control")
    async def load_bucket(self, version: int, ref_box: list[ray.ObjectRef], first: bool, last: bool) -> dict[str, Any]:
        """Load what the one reference holds (see `weights.py`), a part of policy version `version`, not needed any more
        afterwards. The `first` bucket begins a publish, the `last` ends it: the weights are verified, and the
        version is stamped. Returns then `version`, `seconds`, and of `weights.Report` all but `wrong`.

        The generator must be frozen. Raises `PublishFailed` where the engine does not hold what was sent; it then stays
        frozen until a publish succeeds. Raises `Restarted` where this process has no engine yet, or does not know of
        the buckets before this one.
        """
        if self._restarted and not (self._facts and (first or self._weights.under_way)):
            raise Restarted("this generator was started again, and waits for a publish from the beginning")
        return await self._on_engine_loop(self._load_bucket(version, ref_box, first, last))

    async def _load_bucket(self, version: int, ref_box: list[ray.ObjectRef], first: bool, last: bool) -> dict[str, Any]:
        if self._open.is_set():
            raise RuntimeError("the generator must be frozen while weights are published")
        await self._wake("weights")
        return await self._weights.load(self._engine, version, ref_box, first=first, last=last)

    @ray.method(concurrency_group="control")
    async def parcel(self) -> list[ray.ObjectRef]:
        """The reference of the bucket under way, for the engine's own processes."""
        return self._weights.parcel

    @ray.method(concurrency_group="control")
    async def health(self) -> dict[str, Any]:
        """`version`, `frozen`; `in_flight` requests, those `waiting` for their first token, and `kv_share`: of the KV
        cache what the prompts of the others fill, tokens that they share counted for each."""
        self._check_weights()
        return await self._on_engine_loop(self._health())

    async def _health(self) -> dict[str, Any]:
        if self._engine.errored:
            raise _engine_died()
        held = sum(len(flight.progress.request.prompt_ids) for flight in self._flights.values() if flight.runs)
        return {
            "version": self._weights.version, "frozen": not self._open.is_set(), "in_flight": len(self._flights),
            "waiting": sum(not flight.runs for flight in self._flights.values()),
            "kv_share": held / max(1, self._facts["kv_tokens"]),
        }

    @ray.method(concurrency_group="control")
    async def stop(self) -> None:
        """End the engine's process. The actor can then be killed without leaving anything behind."""
        if self._engine is not None:
            await self._on_engine_loop(self._stop())

    async def _stop(self) -> None:
        self._open.clear()
        self._engine.shutdown(timeout=ENGINE_STOP_S)
        self._sockets.remove()

    def _end(self) -> None:
        """The engine's process is gone and with it all that this actor is for: its end, once its generations have been
        given back. Idempotent."""
        if not self._ended.is_set():
            print(f"generator: the engine that serves {self._model_dir} died", file=sys.stderr, flush=True)
            self._open.clear()
            self._ended.set()
            self._loop.call_later(HAND_OVER_S, self._exit)

    def _exit(self) -> NoReturn:
        self._sockets.remove()
        os._exit(1)

    def _check_weights(self) -> None:
        if self._restarted and not self._fixed and not self._weights.count:
            raise Restarted("this generator was started again and waits for weights")

    async def _on_engine_loop(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            call.close()
            raise RuntimeError(NOT_STARTED)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._to_the_end(call), self._loop))

    async def _to_the_end(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What only an engine could answer is never answered once it died: the callers hear of that from Ray."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError:
            self._end()
            await asyncio.Event().wait()


def _engine_died() -> Exception:
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError()


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
