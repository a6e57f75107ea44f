"""Which weights one engine holds, and the publish under way. Owned by `GeneratorWorker`, on the loop of its engine.

A publish is `start`, `load` for each bucket, `finish`. Each raises `PublishFailed` where the engine does not hold what
was sent. From `start` on `whole` is False until a publish succeeds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


class PublishFailed(RuntimeError):
    """The engine does not hold the weights that were sent. It stays frozen until a publish succeeds."""


class Publishing:
    """`version`: the policy version of the weights that the engine holds, where they are `whole`."""

    def __init__(self, version: int, *, whole: bool):
        self.version, self.whole = version, whole
        self.count = 0
        """Publishes that succeeded."""
        self.parcel: list[ray.ObjectRef] = []
        """The reference of the bucket under way: vLLM's workers ask for it."""
        self._next = version
        self._began = 0.0

    async def start(self, engine: Any, version: int) -> None:
        self._next, self.whole, self._began = version, False, time.monotonic()
        with self._errors():
            await engine.start_weight_update()

    async def load(self, engine: Any, ref_box: list[ray.ObjectRef]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.parcel = ref_box
        try:
            with self._errors():
                await engine.update_weights(WeightTransferUpdateRequest(update_info={}))
        finally:
            self.parcel = []

    async def finish(self, engine: Any) -> dict[str, Any]:
        """Of `weights.Report` all but `wrong`, and `version` and `seconds`."""
        with self._errors():
            await engine.finish_weight_update()
            reports = await engine.collective_rpc("publish_report")
        for report in reports:
            if wrong := report.pop("wrong"):
                raise PublishFailed(f"publishing policy version {self._next}: {wrong}")
        await engine.update_weight_version(str(self._next))
        self.version, self.whole = self._next, True
        self.count += 1
        return {**reports[0], "version": self.version, "seconds": time.monotonic() - self._began}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM's worker names it in the text of a bare Exception
            raise PublishFailed(f"publishing policy version {self._next}: {error}") from error
