"""Which weights one engine holds, and the publish under way. Owned by `GeneratorWorker`, on the loop of its engine.

A publish is `load` for each bucket, in order: the first begins it, the last ends it. Each raises `PublishFailed` where
the engine does not hold what was sent. From the first on `whole` is False until a publish succeeds.
"""

import asyncio
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
        self.under_way = False
        self._began = 0.0

    async def load(self, engine: Any, version: int, ref_box: list[ray.ObjectRef], *, first: bool,
                   last: bool) -> dict[str, Any]:
        """After the `last`: of `weights.Report` all but `wrong`, and `version` and `seconds`. Else {}."""
        if first:
            self.whole, self.under_way, self._began = False, True, time.monotonic()
        self.parcel = ref_box
        try:
            with self._errors(version):
                calls = [engine.collective_rpc("take_bucket", args=(first, last))]
                if last:  # in the same trip; where it fails nothing is sampled until a later publish stamps its own
                    calls.append(engine.update_weight_version(str(version)))
                reports, *_ = await asyncio.gather(*calls)
        finally:
            self.parcel = []
        if not last:
            return {}
        self.under_way = False
        for report in reports:
            if wrong := report.pop("wrong"):
                raise PublishFailed(f"publishing policy version {version}: {wrong}")
        self.version, self.whole = version, True
        self.count += 1
        return {**reports[0], "version": self.version, "seconds": time.monotonic() - self._began}

    @contextmanager
    def _errors(self, version: int) -> Iterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM's worker names it in the text of a bare Exception
            raise PublishFailed(f"publishing policy version {version}: {error}") from error
