"""The order in which training tasks are handed out: a fresh shuffle for every pass over the data. Pure."""

import random
from collections import deque
from collections.abc import Iterable, Sequence

from lightning_ray.tasks.base import Task


class TaskStream:
    """Endless, decided by the seed and resumable from `cursor` and `requeued`. Requeued tasks go first."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, cursor: int = 0, requeued: Iterable[str] = ()):
        if not tasks:
            raise ValueError("there is no task to train on")
        self._tasks = tasks
        self._by_id = {task.instance_id: task for task in tasks}
        self._seed = seed
        self._requeued = deque(requeued)
        self.cursor = cursor

    @property
    def requeued(self) -> list[str]:
        return list(self._requeued)

    def requeue(self, task_id: str) -> None:
        """The task's group was dropped: it is run again before any other."""
        self._requeued.append(task_id)

    def next(self) -> Task:
        if self._requeued:
            return self._by_id[self._requeued.popleft()]
        epoch, position = divmod(self.cursor, len(self._tasks))
        self.cursor += 1
        return self._tasks[self._order(epoch)[position]]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
