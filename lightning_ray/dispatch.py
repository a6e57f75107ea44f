"""Dispatch: which rollout starts now, and on which runner. Pure: it owns no task, clock or client.

Rollouts start in the order in which they were submitted, at most `limit` at once, each on the runner that holds the
fewest. A runner that is down gets none until it is up again; a rollout that its runner lost goes first.
"""

from collections import deque
from dataclasses import dataclass, replace

from lightning_ray.harness.spec import RolloutSpec


@dataclass(frozen=True, slots=True)
class Start:
    """A rollout to be started now."""

    spec: RolloutSpec
    runner: int


class Dispatch:
    """For runners 0 to `runners` - 1, all up."""

    def __init__(self, runners: int):
        self.loads = [0] * runners
        """Rollouts that each runner holds."""
        self.limit: int | None = None
        """Most rollouts that run at once (at least 1). A lower one stops nothing that runs."""
        self._down: set[int] = set()
        self._queue: deque[RolloutSpec] = deque()

    @property
    def running(self) -> int:
        return sum(self.loads)

    @property
    def waiting(self) -> int:
        """Rollouts that were submitted and do not run."""
        return len(self._queue)

    def submit(self, spec: RolloutSpec) -> None:
        self._queue.append(spec)

    def next(self) -> Start | None:
        """The next rollout to start, which then counts as running; None where none can start now."""
        up = [runner for runner in range(len(self.loads)) if runner not in self._down]
        if not self._queue or not up or (self.limit is not None and self.running >= self.limit):
            return None
        runner = min(up, key=self.loads.__getitem__)
        self.loads[runner] += 1
        return Start(self._queue.popleft(), runner)

    def ended(self, start: Start) -> None:
        """It does not run any more."""
        self.loads[start.runner] -= 1

    def lost(self, start: Start) -> None:
        """Its runner died with it: it is to be started again, before any other."""
        self.ended(start)
        self._queue.appendleft(replace(start.spec, lost=start.spec.lost + 1))

    def down(self, runner: int) -> bool:
        """The runner died. Returns whether that is news."""
        news = runner not in self._down
        self._down.add(runner)
        return news

    @property
    def away(self) -> frozenset[int]:
        """Runners that are down."""
        return frozenset(self._down)

    def up(self, runner: int) -> None:
        """The runner can be given rollouts again."""
        self._down.discard(runner)

    def clear(self) -> None:
        """Forgets every rollout."""
        self.loads = [0] * len(self.loads)
        self._queue.clear()
