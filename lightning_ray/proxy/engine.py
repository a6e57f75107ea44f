"""The generators behind a proxy: which one takes a call, and what happens when one dies.

A rollout stays with one generator, because that one has its prefix in the cache; it is given the least loaded at its
first call, and moves when its own is far busier than the least loaded. A generator whose process died is asked again
until it (or another) answers: the harness waits, it never sees an error.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from lightning_ray.generator.request import GenerateRequest, Generation

logger = logging.getLogger(__name__)

SLACK = 8
"""So many calls more than the least loaded generator has are worth a warm prefix cache."""
RETRY_S = 0.5


class GeneratorDied(Exception):
    """The generator's process is gone, or cannot be reached at the moment."""


class Generator(Protocol):
    """Tokens in, tokens out."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises `GeneratorDied` where the process is gone."""

    async def abort(self, request_id: str) -> None:
        """End that generation; `generate` then returns what it has."""


class RayGenerator:
    """A `GeneratorWorker` actor as a `Generator`."""

    def __init__(self, handle) -> None:
        self.handle = handle

    async def generate(self, request: GenerateRequest) -> Generation:
        from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

        try:
            return await self.handle.generate.remote(request)
        except (ActorDiedError, ActorUnavailableError, RayActorError) as error:
            raise GeneratorDied(str(error)) from error

    async def abort(self, request_id: str) -> None:
        from ray.exceptions import RayActorError

        try:
            await self.handle.abort.remote(request_id)
        except RayActorError:
            logger.info("abort of %s: its generator is gone", request_id)


class Engine:
    """The pool. `load` counts the calls that each generator has."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        if not generators:
            raise ValueError("a proxy needs at least one generator")
        self.generators = list(generators)
        self.load = [0] * len(self.generators)
        self.home: dict[str, int] = {}
        self.running: dict[str, int] = {}

    def choose(self, rollout_id: str) -> int:
        least = min(range(len(self.load)), key=self.load.__getitem__)
        home = self.home.get(rollout_id)
        if home is None or self.load[home] > 2 * self.load[least] + SLACK:
            home = self.home[rollout_id] = least
        return home

    async def generate(self, rollout_id: str, request: GenerateRequest) -> Generation:
        """Sample. Waits out generators that are gone; raises only what the caller's cancellation raises."""
        while True:
            index = self.choose(rollout_id)
            self.load[index] += 1
            self.running[request.request_id] = index
            try:
                return await self.generators[index].generate(request)
            except GeneratorDied as error:
                logger.warning("generator %d is gone, %s will be sent again: %s", index, request.request_id, error)
                self.home.pop(rollout_id, None)
            finally:
                self.load[index] -= 1
                self.running.pop(request.request_id, None)
            await asyncio.sleep(RETRY_S)

    async def abort(self, request_id: str) -> None:
        index = self.running.get(request_id)
        if index is not None:
            await self.generators[index].abort(request_id)

    def forget(self, rollout_id: str) -> None:
        self.home.pop(rollout_id, None)
