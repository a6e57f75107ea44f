"""The generators of a policy group: which of them serve, and how one whose process died comes back.

    pool.each("freeze")              # of those that serve; one that turns out to be dead is away from then on
    if pool.back():                  # processes that Ray has started again, with engines that are up
        pool.welcome()               # they serve again; the caller publishes weights to all, and thaws

Handles stay valid over a restart, so that whoever holds one only asks again. A generator that is away samples nothing:
an update goes on without it, and it gets the weights of the next publish. One that dies again and again, or whose
engine does not start any more, ends the run with `PartDied`.
"""

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from lightning_ray.calls import PartDied, end, gather
from lightning_ray.generator.worker import Restarted

log = logging.getLogger(__name__)

LIVES = 3
"""How often one generator may die between two updates. An engine that does not start counts."""


class GeneratorPool:
    """`handles` do not change. `away`: number -> the call that starts the engine of the new process."""

    def __init__(self, handles: Sequence[ActorHandle]):
        self.handles = list(handles)
        self.away: dict[int, ray.ObjectRef] = {}
        self._deaths = [0] * len(self.handles)

    @property
    def serving(self) -> list[int]:
        return [number for number in range(len(self.handles)) if number not in self.away]

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """The results of all that serve, in order. Those that died are left out, and away from now on. What a method
        raises comes through."""
        calls = {number: getattr(self.handles[number], method).remote(*arguments) for number in self.serving}
        results = gather({_name(number): ref for number, ref in calls.items()}, survive=(RayActorError, Restarted))
        for number, result in zip(calls, results, strict=True):
            if isinstance(result, (RayActorError, Restarted)):
                self._lose(number, result)
        return [result for result in results if not isinstance(result, (RayActorError, Restarted))]

    def back(self) -> list[int]:
        """Those that are away and whose engines are up again. An engine that did not start is tried again (where the
        learner had the memory of its device, it may do so later), and counts as one more death."""
        ready, _ = ray.wait(list(self.away.values()), num_returns=len(self.away), timeout=0) if self.away else ([], [])
        started = []
        for number in [number for number, ref in self.away.items() if ref in ready]:
            try:
                ray.get(self.away[number])
                started.append(number)
            except (RayActorError, RayTaskError) as error:
                self._lose(number, error)
        return started

    def welcome(self) -> None:
        """Those that are `back` serve again: the next publish is theirs too."""
        for number in self.back():
            del self.away[number]

    def updated(self) -> None:
        """An update went well: the earlier deaths of those that serve no longer count."""
        for number in self.serving:
            self._deaths[number] = 0

    def stop(self, timeout_s: float) -> None:
        """Ends all engines and processes."""
        end(self.handles, timeout_s)
        self.handles, self.away = [], {}

    def _lose(self, number: int, error: Exception) -> None:
        self._deaths[number] += 1
        cause = error.cause if isinstance(error, RayTaskError) else error
        if (times := self._deaths[number]) > LIVES:
            raise PartDied(f"{_name(number)} died {times} times since the last update: {cause}") from error
        log.warning("%s died and is started again: %s", _name(number), type(cause).__name__)
        self.away[number] = self.handles[number].ready.remote()


def _name(number: int) -> str:
    return f"generator {number}"
