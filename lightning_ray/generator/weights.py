"""Weights travel to vLLM's workers through Ray's object store: a transfer engine of vLLM's own kind.

A publish is a sequence of buckets (`learner/buckets.py`) in checkpoint names, without a tied `lm_head.weight`, and
each is one call to the engine (`take_bucket`). The worker process (a child of the generator's actor, or on several GPUs
a process of its own), which has joined Ray, asks the actor for the reference and loads straight from shared memory
(`ray.get` is zero-copy on the node). Layers are whole in a bucket, so that nothing of it is held on to afterwards but
a layer that the engine pads (a vocabulary that is no multiple of 64), until the publish ends. With
`generator.transport: ipc` the object is only the address of a bucket in GPU memory (`sharing.py`).

References are handed out by an actor call, never pickled into vLLM's own messages: Ray pins an object for ever when
its reference is pickled outside of Ray.

What is verified after each publish (`Report`): every parameter of the engine was given (quantised engines excepted,
whose parameters have other names); and, where the layout can be read back (unquantised, one tensor-parallel rank),
that the engine computes with exactly the values that the learner counted when it gathered them (`tally.py`,
`checksum.py`), else `unverified` says why. The layer-by-layer
reload must frame the update: the CPU worker repacks weights after loading, and captured graphs keep their addresses.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from lightning_ray.generator import checksum
from lightning_ray.learner import tally
from lightning_ray.learner.buckets import Bucket
from lightning_ray.learner.sharing import SharedBucket

BACKEND = "ray_object_store"
WORKER_EXTENSION = "lightning_ray.generator.weights.TakesBuckets"


@dataclass
class InitInfo(WeightTransferInitInfo):
    ray_address: str
    namespace: str
    source: bytes
    """The pickled handle of the actor whose `parcel()` returns the bucket's reference, in a list."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: which bucket is under way, the actor knows."""


@dataclass
class Report:
    """What one worker can say about the last publish."""

    tensors: int
    bytes: int
    pull_s: float = 0.0
    """Seconds until the buckets were in this process."""
    load_s: float = 0.0
    """Seconds in which the engine took them over: copied, fused, packed."""
    verify_s: float = 0.0
    verified: bool = False
    """The engine computes with the values that were sent, as far as `checksum.py` compares them."""
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
        self._packing = checksum.Packing(self.model)
        self._publishes = 0

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

        self._sent: tally.Tally = {}
        self._dtypes: set[torch.dtype] = set()
        self._publishes += 1
        self._packing.begin(self._publishes)
        self.report = Report(tensors=0, bytes=0)
        self._missing = set(self._parameters)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class ends with `torch.accelerator.synchronize()`, which a CPU lacks.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        import ray

        with self._timed("pull_s"):
            bucket: Bucket | SharedBucket = ray.get(ray.get(self._source.parcel.remote())[0])
            tensors = bucket.open(self.device)
        try:
            with self._timed("load_s"):
                loaded = self.model.load_weights(tensors.items())
        except BaseException:
            self._end_reload()  # or the next publish would find layers that were given some of their parts
            raise
        self._missing -= set(loaded or ())
        tally.merge(self._sent, bucket.tally)
        self._dtypes |= {tensor.dtype for tensor in tensors.values()}
        self.report.tensors += len(tensors)
        self.report.bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish_weight_update(self) -> None:
        with self._timed("load_s"):
            self._end_reload()
            self._repack_tied_head()
        self.report.load_s -= self._packing.seconds  # matrices are looked at while they are loaded
        self.report.verify_s += self._packing.seconds
        with self._timed("verify_s"):
            self._verify()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        setattr(self.report, name, getattr(self.report, name) + time.monotonic() - started)

    def _end_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def _verify(self) -> None:
        report, parallel = self.report, self.parallel_config
        if self._missing and self.model_config.quantization is None:
            report.wrong = f"the learner sent nothing for {', '.join(sorted(self._missing)[:5])}"
        elif parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            report.unverified = "the weights are spread over several ranks"
        elif self._dtypes != {self.model_config.dtype}:
            report.unverified = f"the engine computes in {self.model_config.dtype}, not in what was sent"
        else:
            try:
                report.wrong = tally.difference(self._sent, checksum.tally_held(self.model, self._packing))
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
            if not self._packing.seen(module) and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """There is nothing to release."""


class TakesBuckets:
    """Mixed into vLLM's worker (`worker_extension_cls`); importing this module there registers the engine."""

    def take_bucket(self, first: bool, last: bool) -> dict[str, Any]:
        """Load the bucket under way. The `first` begins a publish, the `last` ends it, and what is returned then is its
        whole `Report`."""
        if first:
            self.start_weight_update()
        self.update_weights({})
        if last:
            self.finish_weight_update()
        return asdict(self.weight_transfer_engine.report)


WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreEngine)
