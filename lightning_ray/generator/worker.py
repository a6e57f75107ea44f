"""`GeneratorWorker`: vLLM's `AsyncLLM` in an async Ray actor. Tokens in; tokens, log-probs and versions out.

* `generate` runs in a concurrency group of its own, thousands at once; every other call runs in `control`, so that
  waiting generations cannot starve them. Ray gives each group an event loop in a thread of its own, and the engine
  belongs to one loop: `generate`'s. Control calls hop to it (`_on_engine_loop`).
* `freeze` stops sampling and keeps the KV cache of what runs; `thaw` goes on. Requests that arrive while frozen
  wait here, and no caller notices. A generation that had no token yet when the engine froze is taken back and sent
  again after the thaw: it then belongs wholly to the new weights.
* Prefix cache: every request is salted with the policy version it is sent under, so that a request never builds on
  KV that older weights computed, while generations that run on keep theirs. Stale blocks age out of the cache.
* Log-probs are those of the distribution that was sampled from (`processed_logprobs`): the behaviour policy.

Errors: `ready` raises what the engine raised when it could not start; `generate` raises ValueError for a request
that the engine refuses (a prompt longer than the context), and `GeneratorDied` when the engine is gone.
"""

import asyncio
import os
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import ray

from lightning_ray.config import GeneratorConfig, PolicyConfig
from lightning_ray.generator.request import GenerateRequest, Generation, Progress, versions_of

FIRST_AND_LAST = 1 << 30
"""vLLM's `stream_interval`: only the first token and the end are reported; the first says that sampling began."""


class GeneratorDied(RuntimeError):
    """The engine's process is gone; this generator answers no more."""


@ray.remote(concurrency_groups={"generate": 4096, "control": 64})
class GeneratorWorker:
    """One engine. `version` is the policy version of the weights in `model_dir` (0 for the start weights)."""

    def __init__(self, model_dir: str, config: GeneratorConfig, policy: PolicyConfig, seed: int, version: int = 0):
        self._model_dir = model_dir
        self._config = config
        self._policy = policy
        self._seed = seed
        self._version = version
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = asyncio.Event()
        self._flights: dict[str, _Flight] = {}
        self._facts: dict[str, Any] = {}

    # --- the generate group: these run on the loop that owns the engine ---

    @ray.method(concurrency_group="generate")
    async def ready(self) -> dict[str, Any]:
        """Start the engine. Returns facts: `start_s`, `max_model_len`, `kv_tokens`, `vocabulary`, `version`."""
        if self._engine is None:
            self._loop = asyncio.get_running_loop()
            started = time.monotonic()
            self._engine = _start_engine(self._model_dir, self._config, self._policy, self._seed)
            await self._engine.update_weight_version(str(self._version))
            cache, model = self._engine.vllm_config.cache_config, self._engine.model_config
            self._facts = {
                "start_s": time.monotonic() - started,
                "max_model_len": model.max_model_len,
                "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
                "vocabulary": model.get_vocab_size(),
            }
            self._open.set()
        return {**self._facts, "version": self._version}

    @ray.method(concurrency_group="generate")
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample up to `request.max_tokens` tokens after the prompt."""
        if request.request_id in self._flights:
            raise ValueError(f"request id {request.request_id!r} is in flight already")
        flight = self._flights[request.request_id] = _Flight(request)
        try:
            while not flight.progress.done and not flight.progress.cancelled:
                if not self._open.is_set():
                    await _first_of(self._open.wait(), flight.cancelled.wait())
                    continue
                flight.progress.add(await self._sample(flight))
            return flight.progress.generation()
        finally:
            del self._flights[request.request_id]

    async def _sample(self, flight: "_Flight") -> Generation:
        """One piece: from the engine's taking the request until it ends or is aborted."""
        from vllm.v1.engine.exceptions import EngineDeadError

        request = flight.progress.next_request()
        flight.started = False
        token_ids: list[int] = []
        logprobs: list[float] = []
        prompt = {"prompt_token_ids": request.prompt_ids, "cache_salt": str(self._version)}
        try:
            async for output in self._engine.generate(prompt, _sampling_params(request), request.request_id):
                completion = output.outputs[0]
                flight.started = True
                token_ids.extend(completion.token_ids)
                logprobs.extend(_sampled_logprobs(completion.logprobs))
        except EngineDeadError as error:
            raise GeneratorDied(f"the engine of {self._model_dir} died; its log says why") from error
        return Generation(
            np.array(token_ids, np.int32), np.array(logprobs, np.float32),
            versions_of(((s.version, s.start, s.end) for s in completion.weight_versions or ()), len(token_ids)),
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
            await self._engine.abort(request_id)

    @ray.method(concurrency_group="control")
    async def freeze(self) -> None:
        """Stop sampling, keep the KV cache. Idempotent."""
        await self._on_engine_loop(self._freeze())

    async def _freeze(self) -> None:
        self._open.clear()
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        await self._engine.abort([id_ for id_, flight in self._flights.items() if flight.waits_for_first_token])

    @ray.method(concurrency_group="control")
    async def thaw(self) -> None:
        """Go on sampling. Idempotent."""
        await self._on_engine_loop(self._thaw())

    async def _thaw(self) -> None:
        await self._engine.resume_generation()
        self._open.set()

    @ray.method(concurrency_group="control")
    async def health(self) -> dict[str, Any]:
        """`version`, `frozen`, `in_flight`; raises `GeneratorDied` when the engine is gone."""
        return await self._on_engine_loop(self._health())

    async def _health(self) -> dict[str, Any]:
        if self._engine.errored:
            raise GeneratorDied(f"the engine of {self._model_dir} died; its log says why")
        return {"version": self._version, "frozen": not self._open.is_set(), "in_flight": len(self._flights)}

    async def _on_engine_loop(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            call.close()
            raise RuntimeError("the generator has not been started: call ready() first")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))


class _Flight:
    """One request that is here: its progress, and whether the engine has begun to sample for it."""

    def __init__(self, request: GenerateRequest):
        self.progress = Progress(request)
        self.cancelled = asyncio.Event()
        self.started: bool | None = None
        """None: not with the engine yet."""

    @property
    def waits_for_first_token(self) -> bool:
        return self.started is False


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _sampling_params(request: GenerateRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.max_tokens, temperature=request.temperature, seed=request.seed, stop=request.stop or None,
        stop_token_ids=request.stop_token_ids or None, detokenize=bool(request.stop), logprobs=0, flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA, stream_interval=FIRST_AND_LAST, skip_clone=True, **request.params,
    )


def _sampled_logprobs(flat: Any) -> list[float]:
    """The sampled token's log-prob at each position: vLLM puts it first (`logprobs=0` asks for no other)."""
    return [flat.logprobs[start] for start in flat.start_indices]


def _start_engine(model_dir: str, config: GeneratorConfig, policy: PolicyConfig, seed: int) -> Any:
    """An `AsyncLLM`. vLLM reads its environment at import, so that comes first."""
    os.environ.update({
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(config.threads),
    })
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    settings: dict[str, Any] = {
        "model": model_dir, "dtype": config.dtype, "seed": seed, "max_model_len": policy.max_context,
        "max_num_seqs": config.max_num_seqs, "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel, "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_prefix_caching": True, "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True, "enable_log_requests": False,
    }
    if current_platform.is_cpu():
        settings["kv_cache_memory_bytes"] = config.kv_cache_gib << 30
        if config.tensor_parallel == 1:
            # The model then runs in the engine's own process: one process less, and no hop between them.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            settings["distributed_executor_backend"] = "uni"
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**{**settings, **config.extra}))
