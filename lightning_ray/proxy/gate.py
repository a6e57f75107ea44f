"""How much of the proxy one rollout may use at once. A gate never refuses what a well-behaved harness does: calls
beyond the bound wait their turn; only a rollout that piles up many times as many is told to slow down."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lightning_ray.proxy.errors import NotFound, TooMany

WAITING = 16
"""So many times the bound may wait."""


class Gate:
    """Admission to one rollout's endpoint: open requests are counted, running calls bounded, `close` revokes."""

    def __init__(self, most_running: int) -> None:
        self.most_open = most_running * WAITING
        self.open = 0
        self.closed = False
        self._turns = asyncio.Semaphore(most_running)

    def enter(self) -> None:
        """A request came in. Raises `NotFound` after `close`, `TooMany` where too many are open."""
        if self.closed:
            raise NotFound("This endpoint has been closed.")
        if self.open >= self.most_open:
            raise TooMany(f"{self.open} requests are open at once on this endpoint; the bound is {self.most_open}.")
        self.open += 1

    def leave(self) -> None:
        self.open -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until fewer calls run than may."""
        async with self._turns:
            yield

    def close(self) -> None:
        self.closed = True
