"""The order in which training tasks are handed out: a fresh shuffle for every pass over the data. Pure.

A pass hands out as many tasks as there are. With equal weights that is each one once; else each as often as its share
of all weights says, rounded up or down by the seed (systematic sampling), so that no chance is added between passes.
"""

import bisect
import itertools
import random
from collections import deque
from collections.abc import Iterable, Sequence

from lightning_ray.tasks.base import Task


class TaskStream:
    """Endless, decided by the seed and resumable from `cursor`, `requeued` and `set_aside`. Requeued tasks go first,
    those that are set aside are passed over."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, cursor: int = 0, requeued: Iterable[str] = (),
                 set_aside: Iterable[str] = ()):
        if not any(task.weight for task in tasks):
            raise ValueError("there is no task to train on")
        self._tasks = tasks
        self._by_id = {task.instance_id: task for task in tasks}
        self._weighted = {task.instance_id for task in tasks if task.weight}
        self._seed = seed
        self._requeued = deque(requeued)
        self._set_aside = set(set_aside)
        self._pass: tuple[int, list[int]] = (-1, [])
        self.cursor = cursor

    @property
    def requeued(self) -> list[str]:
        return list(self._requeued)

    def requeue(self, task_id: str) -> None:
        """The task's group was dropped: it is run again before any other, unless the task is set aside."""
        if task_id not in self._set_aside:
            self._requeued.append(task_id)

    @property
    def set_aside(self) -> list[str]:
        return sorted(self._set_aside)

    def put_aside(self, task_id: str) -> None:
        """The task is not handed out any more."""
        self._set_aside.add(task_id)
        self._requeued = deque(each for each in self._requeued if each != task_id)

    @property
    def exhausted(self) -> bool:
        """Every task that has a weight is set aside: `next` has nothing to give."""
        return self._set_aside >= self._weighted

    def next(self) -> Task:
        """Raises ValueError where every task is set aside."""
        if self.exhausted:
            raise ValueError("every task is set aside")
        if self._requeued:
            return self._by_id[self._requeued.popleft()]
        while True:
            epoch, position = divmod(self.cursor, len(self._tasks))
            self.cursor += 1
            task = self._tasks[self._order(epoch)[position]]
            if task.instance_id not in self._set_aside:
                return task

    def _order(self, epoch: int) -> list[int]:
        if self._pass[0] != epoch:
            order = self._drawn(epoch)
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._pass = (epoch, order)
        return self._pass[1]

    def _drawn(self, epoch: int) -> list[int]:
        """The tasks of a pass, in no particular order."""
        count = len(self._tasks)
        if len({task.weight for task in self._tasks}) == 1:
            return list(range(count))
        draw = random.Random(f"{self._seed}/{epoch}/weights")
        order = draw.sample(range(count), count)  # else neighbours in the data would be drawn together
        ends = list(itertools.accumulate(self._tasks[index].weight for index in order))
        step = ends[-1] / count
        start = draw.random() * step
        return [order[min(bisect.bisect_right(ends, start + number * step), count - 1)] for number in range(count)]
