"""How much of the proxy one rollout may use at once. A gate never refuses what a well-behaved harness does: calls
beyond the bound wait their turn; only a rollout that piles up many times as many is told to slow down."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_ray.proxy.errors import NotFound, TooMany

WAITING = 16
"""So many times the bound may wait."""
BODIES = 8
"""The bodies of all open requests together may be so many times as long as one may be."""


class Gate:
    """Admission to one rollout's endpoint: open requests are counted, running calls bounded, `close` revokes."""

    def __init__(self, most_running: int, most_body: int) -> None:
        """`most_body`: bytes of one request's body."""
        self.most_open = most_running * WAITING
        self.most_bytes = most_body * BODIES
        self.open = 0
        self.bytes = 0
        self.closed = False
        self.turns = asyncio.Semaphore(most_running)
        """`async with` it while a call runs."""

    @contextmanager
    def visit(self) -> Iterator["Visit"]:
        """As long as one request is open. Raises `NotFound` after `close`, `TooMany` where too many are open."""
        if self.closed:
            raise NotFound("This endpoint has been closed.")
        if self.open >= self.most_open:
            raise TooMany(f"{self.open} requests are open at once on this endpoint; the bound is {self.most_open}.")
        self.open += 1
        visit = Visit(self)
        try:
            yield visit
        finally:
            self.open -= 1
            self.bytes -= visit.bytes

    def close(self) -> None:
        self.closed = True


@dataclass(slots=True)
class Visit:
    """One open request, and how many bytes of its body are here."""

    gate: Gate
    bytes: int = 0

    def receive(self, size: int) -> None:
        """More of the body arrived. Raises `TooMany` where the bodies of all open requests are too long together."""
        self.bytes += size
        self.gate.bytes += size
        if self.gate.bytes > self.gate.most_bytes:
            raise TooMany(f"The requests that are open at once on this endpoint exceed {self.gate.most_bytes} bytes.")
