"""How vLLM is started and asked: its environment, its engine arguments, its sampling parameters.

On the CPU the model runs in the engine's own process (one process and one hop less than vLLM's default), on as many
threads as `generator.threads` says. On GPUs one tensor-parallel rank runs in the engine's process too, on the GPU
that Ray gave the actor; several ranks are Ray actors of vLLM's in the bundles of the placement group.
"""

import json
import os
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_ray.config import ConfigError, GeneratorConfig, PolicyConfig
from lightning_ray.generator.request import GenerateRequest
from lightning_ray.generator.text_only import allow_text_only

FIRST_AND_LAST = 1 << 30
"""vLLM's `stream_interval`: only the first token and the end are reported; the first says that sampling began."""

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": "-all",
    "PYTHONWARNINGS": "ignore", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Quiet unless something is wrong. The last one keeps vLLM from replacing "uni" by "mp" on the CPU; `AsyncLLM` has a
process of its own either way. A variable that is set already stays as it is."""


def start_engine(model_dir: str, config: GeneratorConfig, policy: PolicyConfig, seed: int, sockets: Path) -> Any:
    """A running `AsyncLLM`; its sockets, which vLLM leaves behind, are in the directory `sockets`. Raises `ConfigError`
    for engine arguments that do not exist, else what vLLM raises when it cannot start (no such model, no memory, ...).

    vLLM and torch read their environment when they are imported, so this must be the first to import them.
    """
    allow_text_only()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_RPC_BASE_PATH"] = str(sockets)
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.engine.async_llm import AsyncLLM
    return AsyncLLM.from_engine_args(engine_arguments(model_dir, config, policy, seed))


def engine_arguments(model_dir: str, config: GeneratorConfig, policy: PolicyConfig, seed: int) -> Any:
    """vLLM's `AsyncEngineArgs`; what `generator.extra` gives wins."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    from lightning_ray.generator.weights import BACKEND, WORKER_EXTENSION

    settings: dict[str, Any] = {
        "model": model_dir, "dtype": config.dtype, "seed": seed, "max_model_len": policy.max_context,
        "max_num_seqs": config.max_num_seqs, "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel, "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_prefix_caching": True, "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True, "enable_log_requests": False, "use_tqdm_on_load": False,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND), "worker_extension_cls": WORKER_EXTENSION,
    }
    if current_platform.is_cpu():
        _check_dtype(model_dir, config)
        settings["kv_cache_memory_bytes"] = config.kv_cache_gib << 30
        settings["distributed_executor_backend"] = "uni" if config.tensor_parallel == 1 else "mp"
    else:
        settings["enable_sleep_mode"] = config.in_flight == "resend"
        if config.tensor_parallel > 1:
            settings["distributed_executor_backend"] = "ray"
    unknown = set(config.extra) - {field.name for field in fields(AsyncEngineArgs)}
    if unknown:
        raise ConfigError(f"generator.extra: vLLM has no engine argument {', '.join(sorted(unknown))}. See `vllm serve "
                          "--help`, with underscores for dashes")
    return AsyncEngineArgs(**{**settings, **config.extra})


def _check_dtype(model_dir: str, config: GeneratorConfig) -> None:
    """vLLM's gated delta nets on the CPU compute in bfloat16 only; the engine would die at its first request."""
    settings = json.loads((Path(model_dir) / "config.json").read_text())
    layers = settings.get("text_config", settings).get("layer_types") or []
    if "linear_attention" in layers and config.dtype != "bfloat16":
        raise ConfigError(f"generator.dtype: {config.dtype!r} is not computed on a CPU by vLLM's gated delta nets, "
                          f"which this {settings.get('model_type')} has. Take bfloat16")


def keeps_seeds(scheduler: Any) -> bool:
    """Whether requests can have random seeds of their own. `scheduler`: vLLM's `SchedulerConfig`.

    A request with one kills vLLM 0.32's engine on the CPU as soon as its prompt is processed in pieces ("CPU Generator
    does not use offset"): there it takes `generator.extra: {enable_chunked_prefill: false}`, else requests share the
    engine's own random stream.
    """
    from vllm.platforms import current_platform

    return not (current_platform.is_cpu() and scheduler.enable_chunked_prefill)


def sampling_params(request: GenerateRequest, *, seeded: bool) -> Any:
    """vLLM's `SamplingParams`, with the request's seed where `seeded`. Text is made only where stop strings ask for
    it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.max_tokens, temperature=request.temperature,
        seed=request.seed if seeded else None, stop=request.stop or None,
        stop_token_ids=request.stop_token_ids or None, detokenize=bool(request.stop), logprobs=0, flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA, stream_interval=FIRST_AND_LAST, skip_clone=True, **request.params,
    )


def rescued_output(engine: Any, request_id: str) -> Any:
    """Of an engine whose process died: all that it had reported of a request, as its last output (`CompletionOutput`);
    None where the request had not reached it.

    vLLM hands over nothing any more itself. What it received before is in its output processor, which makes an output
    from there as it does when a request is aborted; nothing of it counts as handed over already.
    """
    from vllm.v1.engine import FinishReason

    states = engine.output_processor.request_states.values()
    state = next((state for state in states if state.external_req_id == request_id), None)
    if state is None:
        return None
    state.sent_tokens_offset = 0
    output = state.make_request_output([], None, FinishReason.ABORT, None)
    return output.outputs[0]


def sampled_logprobs(flat: Any) -> list[float]:
    """The sampled token's log-prob at each position: vLLM puts it first (`logprobs=0` asks for no other)."""
    return [flat.logprobs[start] for start in flat.start_indices]
