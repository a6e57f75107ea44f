"""The generators behind a proxy: which one takes a call, and what happens when one dies.

A rollout stays with one generator, because that one has its prefix in the cache; it is given the least loaded at its
first call, and moves when its own is far busier than the least loaded. A generator whose process died is left alone for
a while, then asked again; a call goes on with another one meanwhile, or waits where there is none. Where its engine
died alone, it goes on from the tokens that were known. The harness waits, it never sees an error.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ray.exceptions import RayActorError, RayError

from lightning_ray.generator.request import GenerateRequest, Generation, Progress

logger = logging.getLogger(__name__)

SLACK = 8
"""So many calls more than the least loaded generator has are worth a warm prefix cache."""
RETRY_S = 0.5
SHUN_S = 5.0
"""How long a generator that just died gets no call that another one can take."""


class GeneratorDied(Exception):
    """The generator's process is gone, or cannot be reached at the moment."""


class Generator(Protocol):
    """Tokens in, tokens out."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises `GeneratorDied` where the process is gone."""

    async def abort(self, request_id: str) -> None:
        """End that generation; `generate` then returns what it has."""

    async def claim(self, request_id: str) -> Generation | None:
        """What was sampled for a caller that died before it got it; ended now where it still runs."""


class RayGenerator:
    """A `GeneratorWorker` actor as a `Generator`."""

    def __init__(self, handle) -> None:
        self.handle = handle

    async def generate(self, request: GenerateRequest) -> Generation:
        try:
            return await self.handle.generate.remote(request)
        except RayActorError as error:
            raise GeneratorDied(str(error)) from error

    async def abort(self, request_id: str) -> None:
        try:
            await self.handle.abort.remote(request_id)
        except RayActorError:
            logger.info("abort of %s: its generator is gone", request_id)

    async def claim(self, request_id: str) -> Generation | None:
        try:
            return await self.handle.claim.remote(request_id)
        except RayError as error:
            logger.warning("a generator is gone, and what it sampled for %s with it: %s", request_id, error)
            return None


@dataclass(slots=True, eq=False)
class Seat:
    """A generator and how many calls it has."""

    generator: Generator
    load: int = 0
    shunned_until: float = 0.0


class Engine:
    """The pool."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        if not generators:
            raise ValueError("a proxy needs at least one generator")
        self.seats = [Seat(generator) for generator in generators]
        self.home: dict[str, Seat] = {}
        self.running: dict[str, Seat] = {}
        self.aborted: set[str] = set()
        """Requests that were aborted while no generator had them."""

    def choose(self, rollout_id: str, now_s: float) -> Seat:
        least = min(self.seats, key=lambda seat: (seat.shunned_until > now_s, seat.load))
        home = self.home.get(rollout_id)
        if home is None or home.load > 2 * least.load + SLACK or home.shunned_until > now_s:
            home = self.home[rollout_id] = least
        return home

    async def generate(self, rollout_id: str, request: GenerateRequest) -> Generation:
        """Sample. Waits out generators that are gone. An abort meanwhile gives a generation of no tokens.

        Raises what the generator raises for a request that it cannot serve.
        """
        progress = Progress(request, len(request.prompt_ids) + request.max_tokens)
        clock = asyncio.get_running_loop().time
        while request.request_id not in self.aborted:
            seat = self.choose(rollout_id, clock())
            seat.load += 1
            self.running[request.request_id] = seat
            try:
                piece = await seat.generator.generate(progress.next_request())
                if piece.finish_reason == "abort":
                    progress.cancel()
                progress.add(piece)
                if progress.done:
                    return progress.generation()
            except GeneratorDied as error:
                logger.warning("a generator is gone, %s will be sent again: %s", request.request_id, error)
            finally:
                seat.load -= 1
                self.running.pop(request.request_id, None)
            seat.shunned_until = clock() + SHUN_S
            await asyncio.sleep(RETRY_S)
        self.aborted.discard(request.request_id)
        progress.cancel()
        return progress.generation()

    async def abort(self, request_id: str) -> None:
        """End a generation, whether it is with a generator or about to be sent to one."""
        seat = self.running.get(request_id)
        if seat is None:
            self.aborted.add(request_id)
        else:
            await seat.generator.abort(request_id)

    async def claim(self, request_id: str) -> list[Generation]:
        """What was sampled, by whichever generator, for an earlier process of this proxy; ended now where it still
        runs."""
        found = await asyncio.gather(*(seat.generator.claim(request_id) for seat in self.seats))
        return [one for one in found if one is not None]

    def forget(self, rollout_id: str) -> None:
        """The rollout is over; nothing of it is generated any more."""
        self.home.pop(rollout_id, None)
        self.aborted = {name for name in self.aborted if not name.startswith(rollout_id + "/")}
