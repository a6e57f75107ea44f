"""A discrete-event simulation of one schedule on the trainer's own buffer and task stream.

What starts, waits, is taken, is dropped or runs again is decided by `GroupBuffer` and `TaskStream`; simulated are the
clock, the engines, the harnesses, the processors that they run on, and the learner. Rollouts are the same in all
schedules: rollout n of task m makes the same calls with the same lengths and tool times.
"""

import heapq
import math
import random
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from lightning_ray.buffer import GroupBuffer
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.stream import TaskStream
from lightning_ray.trajectory.call import Call, Trajectory

TAIL = math.log(15) / 2.326
"""Sigma of a log-normal distribution with p99 / p50 = 15."""
GROUP_SIZE = 8
TIMES_IN_FLIGHT = 4
"""Groups in flight of the asynchronous schedules in a real run, as a multiple of those that an update trains."""
TASKS = 5000
MAX_STALENESS = 4
EMPTY = np.zeros(0, np.int32)
SCHEDULES = ("synchronous", "drain", "continue")


PROBABILITIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
"""Of the quantiles by which a measured distribution is given."""

Shape = tuple[float, ...]
"""A distribution: median and sigma of a log-normal one, or as many quantiles as there are `PROBABILITIES`."""


@dataclass(frozen=True, slots=True)
class Work:
    """A machine and what is done on it. The defaults are assumed, not measured: a 9 B policy on 80 GB GPUs, harnesses
    on software tasks."""

    step_s: float = 0.015
    """A decoding step of one sequence ..."""
    step_s_per_sequence: float = 0.00015
    """... and what each further one adds. Sequences are spread evenly over the GPUs."""
    prefill_steps: float = 0.0
    """A call's prompt takes as long as so many tokens."""
    calls: Shape = (20, 0.6)
    most_calls: int = 100
    answers: Shape = (400.0, TAIL)
    """Tokens."""
    most_tokens: int = 16384
    tools: Shape = (1.5, TAIL)
    """Seconds after each call."""
    start_s: float = 3.0
    """A processor's work before a rollout's first call ..."""
    turn_s: float = 0.0
    """... for each call, beside the tool's own time ..."""
    end_s: float = 0.0
    """... and after the last one: the patch, grading."""
    processors: float = math.inf
    """For each GPU; infinite: no rollout waits for one."""
    learn_gpu_s: float = 4.0
    """For each rollout. The learner has all GPUs to itself."""
    change_s: float = 8.0
    """From sampling to learning, publishing, and back."""


class Engines:
    """All generators as one processor-sharing queue. `served` is how many tokens each sequence that was there from the
    beginning would have by now; a request ends when it has grown by the request's length."""

    def __init__(self, gpus: int, work: Work) -> None:
        self.gpus, self.work, self.clock, self.served = gpus, work, 0.0, 0.0
        self.running: list[tuple[float, int, object]] = []
        self.frozen = False
        self.sampling_s = self.sequence_s = 0.0
        self._count = 0

    @property
    def rate(self) -> float:
        """Tokens/s of each sequence."""
        return 1 / (self.work.step_s + self.work.step_s_per_sequence * max(1.0, len(self.running) / self.gpus))

    def advance(self, now: float) -> None:
        passed, self.clock = now - self.clock, now
        if self.running and not self.frozen:
            self.served += passed * self.rate
            self.sampling_s += passed
            self.sequence_s += passed * len(self.running) / self.gpus

    def add(self, tokens: int, owner: object) -> None:
        self._count += 1
        heapq.heappush(self.running, (self.served + tokens, self._count, owner))

    def next_end(self) -> float:
        if not self.running or self.frozen:
            return math.inf
        return self.clock + max(0.0, self.running[0][0] - self.served) / self.rate

    def end_one(self) -> object:
        return heapq.heappop(self.running)[2]


@dataclass(slots=True)
class Rollout:
    rollout_id: str
    group_id: str
    task_id: str
    calls: deque[tuple[int, float]]
    """(tokens, seconds of the tool after it)."""
    tokens: int
    oldest: int | None = None
    ending: bool = False


def drawn(rng: random.Random, shape: Shape) -> float:
    if len(shape) == len(PROBABILITIES):
        return float(np.interp(rng.random(), PROBABILITIES, shape))
    return rng.lognormvariate(math.log(shape[0]), shape[1])


def bounded(rng: random.Random, shape: Shape, most: int) -> int:
    return min(most, max(1, round(drawn(rng, shape))))


def rollout(task: str, group_id: str, member: int, work: Work) -> Rollout:
    rng = random.Random(f"{task}/{member}")
    calls = deque((bounded(rng, work.answers, work.most_tokens), drawn(rng, work.tools))
                  for _ in range(bounded(rng, work.calls, work.most_calls)))
    return Rollout(f"{group_id}-r{member}", group_id, task, calls, sum(tokens for tokens, _ in calls))


class Simulation:
    """One run of one schedule."""

    def __init__(self, schedule: str, gpus: int, per_step: int, in_flight: int, steps: int, work: Work,
                 seed: int = 0) -> None:
        """`per_step` and `in_flight`: groups; the synchronous schedule has no more in flight than it trains."""
        self.work, self.per_step = work, per_step
        self.buffer = GroupBuffer(
            groups_per_step=per_step, max_staleness=MAX_STALENESS, stale_limit=1000,
            groups_in_flight=per_step if schedule == "synchronous" else in_flight)
        tasks = [Task(instance_id=f"t{number}", problem_statement="simulated") for number in range(TASKS)]
        self.stream = TaskStream(tasks, seed=seed)
        self.engines, self.drains, self.steps = Engines(gpus, work), schedule == "drain", steps
        self.events: list[tuple[float, int, object]] = []
        self.processors = [0.0] * round(gpus * work.processors) if math.isfinite(work.processors) else None
        self.now, self.version, self.groups, self.stale = 0.0, 0, 0, 0
        self.waiting: deque[Rollout] = deque()
        self.updating = self.closed = False
        self.learning_s = 0.0
        self.trained_tokens, self.ages = 0, []
        self.tokens: dict[str, int] = {}
        self.left: Counter[str] = Counter()
        self._count = 0

    def run(self) -> dict[str, float]:
        self.fill()
        while self.version < self.steps:
            event, end = self.events[0][0] if self.events else math.inf, self.engines.next_end()
            self.now = min(event, end)
            self.engines.advance(self.now)
            if end <= event:
                self.answered(self.engines.end_one())
            else:
                self.happened(heapq.heappop(self.events)[2])
        idle = 1 - (self.engines.sampling_s + self.learning_s) / self.now
        return {"wall_s": self.now, "tokens_per_s": self.trained_tokens / self.now, "idle": max(0.0, idle),
                "sequences": self.engines.sequence_s / self.engines.sampling_s,
                "stale": self.stale / (self.stale + self.steps * self.per_step), "age": float(np.mean(self.ages))}

    def fill(self) -> None:
        for _ in range(self.buffer.vacancies):
            task, group_id = self.stream.next(), f"g{self.groups}"
            self.groups += 1
            members = [rollout(task.instance_id, group_id, member, self.work) for member in range(GROUP_SIZE)]
            self.left[group_id] = GROUP_SIZE
            self.buffer.start(group_id, task.instance_id, [one.rollout_id for one in members])
            for one in members:
                self.tokens[one.rollout_id] = one.tokens
                self.work_for(one, self.work.start_s)

    def work_for(self, one: Rollout, seconds: float, then_s: float = 0.0) -> None:
        """A processor works for a rollout, in turn; something that needs none, as a tool's own time, follows."""
        if self.processors is None:
            self.later(seconds + then_s, one)
            return
        done = max(self.now, heapq.heappop(self.processors)) + seconds
        heapq.heappush(self.processors, done)
        self.later(done - self.now + then_s, one)

    def later(self, seconds: float, what: object) -> None:
        self._count += 1
        heapq.heappush(self.events, (self.now + seconds, self._count, what))

    def happened(self, what: object) -> None:
        if what == "updated":
            self.learning_s += self.engines.clock - self.learning_since
            self.version += 1
            self.updating = self.closed = self.engines.frozen = False
            while self.waiting:
                self.ask(self.waiting.popleft())
            self.fill()
            self.decide()
        elif what.calls:
            self.ask(what)
        elif self.work.end_s and not what.ending:
            what.ending = True
            self.work_for(what, self.work.end_s)
        else:
            self.ended(what)

    def ask(self, one: Rollout) -> None:
        """Its harness sends a request: it waits while weights change, or while older requests are finished."""
        if self.closed or self.engines.frozen:
            self.waiting.append(one)
            return
        if one.oldest is None:
            one.oldest = self.version
        self.engines.add(one.calls[0][0] + self.work.prefill_steps, one)

    def answered(self, one: Rollout) -> None:
        self.work_for(one, self.work.turn_s, one.calls.popleft()[1])
        if self.closed and not self.engines.running:
            self.learn()

    def ended(self, one: Rollout) -> None:
        versions = np.array([one.oldest], np.int32)
        call = Call(0, EMPTY, versions, versions.astype(np.float32), versions, "stop")
        self.buffer.finish(Trajectory(one.rollout_id, one.group_id, one.task_id, [call], "graded"))
        self.left[one.group_id] -= 1
        if not self.left[one.group_id]:
            self.decide()

    def decide(self) -> None:
        """What the trainer does when a rollout ended and no update is under way."""
        if self.updating:
            return
        for drop in self.buffer.drop_unusable(self.version):
            self.stale += 1
            self.stream.requeue(drop.group.task_id)
        self.fill()
        groups = self.buffer.take()
        if groups is None:
            return
        self.ages += [self.version - group.oldest_version for group in groups]
        self.trained_tokens += sum(self.tokens[rollout_id] for group in groups for rollout_id in group.rollout_ids)
        self.updating = True
        if self.drains and self.engines.running:
            self.closed = True
        else:
            self.learn()

    def learn(self) -> None:
        self.closed, self.engines.frozen = False, True
        self.learning_since = self.now
        rollouts = self.per_step * GROUP_SIZE
        self.later(self.work.change_s + self.work.learn_gpu_s * rollouts / self.engines.gpus, "updated")
