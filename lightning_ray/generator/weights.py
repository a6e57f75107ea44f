"""Weights travel to vLLM's workers through Ray's object store: a transfer engine of vLLM's own kind.

A publish is a list of object references, its buckets; each holds `{name: (bytes as a uint8 array, dtype name,
shape)}` in checkpoint names, without a tied `lm_head.weight`. The worker process (a child of the generator's actor,
or on several GPUs a process of its own) joins Ray, asks the actor for the references, and loads bucket by bucket
straight from shared memory (`ray.get` is zero-copy on the node): peak extra memory is one bucket plus one layer.

References are handed out by an actor call, never pickled into vLLM's own messages: Ray pins an object for ever when
its reference is pickled outside of Ray.

What is verified after each publish (`Report`): every parameter of the engine was given (quantised engines excepted,
whose parameters have other names); and, where the layout can be read back (unquantised, one tensor-parallel rank),
that the engine computes with exactly the values sent (`checksum.py`), else `unverified` says why. The layer-by-layer
reload must frame the update: the CPU worker repacks weights after loading, and captured graphs keep their addresses.
"""

import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from lightning_ray.generator import checksum

BACKEND = "ray_object_store"
WORKER_EXTENSION = "lightning_ray.generator.weights.WeightReports"

Bucket = dict[str, tuple[np.ndarray, str, tuple[int, ...]]]


@dataclass
class InitInfo(WeightTransferInitInfo):
    ray_address: str
    namespace: str
    source: bytes
    """The pickled handle of the actor whose `parcel()` returns the list of references."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    bucket: int
    """Index into the list of references."""


@dataclass
class Report:
    """What one worker can say about the last publish."""

    tensors: int
    bytes: int
    verified: bool = False
    """The engine computes with exactly the values that were sent."""
    unverified: str = ""
    """Why they could not be compared."""
    wrong: str = ""
    """What the engine holds instead."""


class ObjectStoreEngine(WeightTransferEngine):
    """Runs in vLLM's worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._parameters = {name for name, _ in self.model.named_parameters()}  # a tied weight once

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        import ray
        from ray import cloudpickle

        if not ray.is_initialized():
            ended_by = signal.getsignal(signal.SIGTERM)
            ray.init(address=init_info.ray_address, namespace=init_info.namespace, log_to_driver=False,
                     logging_level="ERROR")
            signal.signal(signal.SIGTERM, ended_by)  # Ray's own handler prints a stack trace when vLLM ends its worker
        self._source = cloudpickle.loads(init_info.source)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._sent: checksum.Tally = {}
        self._tensors = self._bytes = 0
        self._refs: list[Any] | None = None
        self._missing = set(self._parameters)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class ends with `torch.accelerator.synchronize()`, which a CPU lacks.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        import ray

        if self._refs is None:
            self._refs = ray.get(self._source.parcel.remote())
        try:
            loaded = self.model.load_weights(self._tensors_of(ray.get(self._refs[update_info.bucket])))
        except BaseException:
            self._end_reload()  # or the next publish would find layers that were given some of their parts
            raise
        self._missing -= set(loaded or ())

    def _tensors_of(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (raw, dtype, shape) in bucket.items():
            tensor = torch.from_numpy(raw).view(getattr(torch, dtype)).view(shape)
            checksum.add(self._sent, name, tensor.to(self.model_config.dtype))
            self._tensors += 1
            self._bytes += raw.nbytes
            yield name, tensor

    def finish_weight_update(self) -> None:
        self._end_reload()
        self._repack_tied_head()
        self.report = Report(self._tensors, self._bytes)
        self._verify()

    def _end_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._refs = None
        finalize_layerwise_reload(self.model, self.model_config)

    def _verify(self) -> None:
        report, parallel = self.report, self.parallel_config
        if self._missing and self.model_config.quantization is None:
            report.wrong = f"the learner sent nothing for {', '.join(sorted(self._missing)[:5])}"
        elif parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            report.unverified = "the weights are spread over several ranks"
        else:
            try:
                report.wrong = checksum.difference(self._sent, checksum.tally_of(checksum.held(self.model)))
            except checksum.Unreadable as reason:
                report.unverified = str(reason)
            except checksum.Damaged as damage:
                report.wrong = str(damage)
            else:
                report.verified = not report.wrong

    def _repack_tied_head(self) -> None:
        """On the CPU a head that shares the embedding's weight computes with a packed copy of it, which the reload
        does not renew (vLLM 0.32): it loads nothing into the head itself."""
        for module in self.model.modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self._refs = None


class WeightReports:
    """Mixed into vLLM's worker (`worker_extension_cls`); importing this module there registers the engine."""

    def publish_report(self) -> dict[str, Any]:
        return asdict(self.weight_transfer_engine.report)


WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreEngine)
