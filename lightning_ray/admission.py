"""Admission: how many rollouts run at once, from what the generators say. Pure: it owns no task, clock or client.

More rollouts than the generators can hold make each one slower and older: their requests queue for KV cache, or lose
theirs and are computed again. Fewer leave the GPUs thin. The limit doubles until the first sign of pressure, then grows
by a sixteenth at each look while it is what holds rollouts back and nothing waits, and falls by a fifth under pressure
(additive increase, multiplicative decrease; Chiu and Jain 1989).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KV_FULL, KV_ROOM = 0.9, 0.75
"""Shares of the KV cache: above the first there is pressure, below the second there is room for more."""
WAITING_SHARE = 0.25
"""There is pressure when more than this share of the requests waits for its first token."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Of all generators together."""

    in_flight: int
    """Requests."""
    waiting: int
    """Those among them that have no token yet."""
    kv_share: float
    """Of the KV cache that the prompts of the others fill, in the fullest generator."""

    @classmethod
    def of(cls, health: Sequence[Mapping[str, Any]]) -> "Pressure":
        """From what `GeneratorWorker.health` says, one mapping for each generator that serves."""
        return cls(sum(each["in_flight"] for each in health), sum(each["waiting"] for each in health),
                   max((each["kv_share"] for each in health), default=0.0))

    @property
    def high(self) -> bool:
        return self.kv_share > KV_FULL or self.waiting > WAITING_SHARE * self.in_flight

    @property
    def low(self) -> bool:
        return self.kv_share < KV_ROOM and self.waiting == 0


class Admission:
    """`limit` rollouts may run at once, always within [low, high]."""

    def __init__(self, low: int, high: int):
        if not 1 <= low <= high:
            raise ValueError(f"admission needs 1 <= low <= high, not {low} and {high}")
        self.low, self.high, self.limit = low, high, low
        self._doubling = True

    def look(self, pressure: Pressure, running: int) -> int:
        """The limit from now on. `running`: rollouts that run; below the limit it is not the limit that holds back."""
        if pressure.high:
            self._doubling = False
            self.limit = max(self.low, self.limit - max(1, self.limit // 5))
        elif pressure.low and running >= self.limit:
            more = self.limit if self._doubling else max(1, self.limit // 16)
            self.limit = min(self.high, self.limit + more)
        return self.limit
