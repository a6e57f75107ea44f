"""Three schedules of the same work: synchronous, asynchronous that drains before updates, asynchronous that goes on.

    python benchmarks/schedule.py                     # the table
    python benchmarks/schedule.py --json FILE         # the same as data
    python benchmarks/schedule.py --rows 8x64,8x256 --steps 20
    python benchmarks/schedule.py --answers 600,1.2   # a policy that thinks: longer answers, a longer tail

A discrete-event simulation. What starts, waits, is taken, is dropped or runs again is decided by the trainer's own
`GroupBuffer` and `TaskStream`; simulated are the clock, the engines, the harnesses and the learner. Each row is one
machine: G GPUs, R rollouts in flight in the asynchronous schedules, R / 2 rollouts trained in each update. The
synchronous schedule has those R / 2 in flight. Rollouts are the same in all three: rollout n of task m makes the same
calls with the same lengths and tool times.

Assumed, not measured (a 9 B policy on 80 GB GPUs, harnesses on software tasks); change them below:
- a decoding step takes 15 ms and 0.15 ms more for each sequence on its GPU; sequences are spread evenly;
- calls of a rollout: log-normal, median 20, sigma 0.6, at most 100; tokens of an answer: log-normal, median 180, sigma
  0.9, at most 12,288; time of a tool: log-normal, median 1.5 s, p99 / p50 = 15; a sandbox starts in 3 s;
- the learner has all GPUs to itself: 4 GPU-seconds for each rollout, and 8 s to change over and publish.

Columns: trained tokens/s and its ratio to the synchronous schedule; `idle`, the share of time in which the GPUs neither
sample nor learn; `thin`, the mean number of sequences on a GPU while it samples; `stale`, the share of finished groups
that were dropped as too old; `age`, the mean number of policy versions between the oldest token and the update.
"""

import argparse
import heapq
import json
import math
import random
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightning_ray.buffer import GroupBuffer
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.stream import TaskStream
from lightning_ray.trajectory.call import Call, Trajectory

STEP_S, STEP_S_PER_SEQUENCE = 0.015, 0.00015
CALLS = (20, 0.6, 100)
ANSWERS, MOST_TOKENS = (180.0, 0.9), 12288
TOOL_MEDIAN_S, TOOL_SIGMA = 1.5, math.log(15) / 2.326
START_S = 3.0
LEARN_GPU_S, CHANGE_S = 4.0, 8.0
GROUP_SIZE = 8
TASKS = 5000
MAX_STALENESS = 4
EMPTY = np.zeros(0, np.int32)
ROWS = "8x64,8x256,32x1024,128x4096,512x16384"
SCHEDULES = ("synchronous", "drain", "continue")


class Engines:
    """All generators as one processor-sharing queue. `served` is how many tokens each sequence that was there from the
    beginning would have by now; a request ends when it has grown by the request's length."""

    def __init__(self, gpus: int) -> None:
        self.gpus, self.clock, self.served = gpus, 0.0, 0.0
        self.running: list[tuple[float, int, object]] = []
        self.frozen = False
        self.sampling_s = self.sequence_s = 0.0
        self._count = 0

    @property
    def rate(self) -> float:
        """Tokens/s of each sequence."""
        return 1 / (STEP_S + STEP_S_PER_SEQUENCE * max(1.0, len(self.running) / self.gpus))

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


def bounded(rng: random.Random, shape: tuple[float, float, int]) -> int:
    median, sigma, most = shape
    return min(most, max(1, round(rng.lognormvariate(math.log(median), sigma))))


def rollout(task: str, group_id: str, member: int, answers: tuple[float, float]) -> Rollout:
    rng = random.Random(f"{task}/{member}")
    calls = deque((bounded(rng, (*answers, MOST_TOKENS)), rng.lognormvariate(math.log(TOOL_MEDIAN_S), TOOL_SIGMA))
                  for _ in range(bounded(rng, CALLS)))
    return Rollout(f"{group_id}-r{member}", group_id, task, calls, sum(tokens for tokens, _ in calls))


class Simulation:
    """One run of one schedule."""

    def __init__(self, schedule: str, gpus: int, in_flight: int, steps: int, answers: tuple[float, float]) -> None:
        self.answers = answers
        self.per_step = in_flight // 2 // GROUP_SIZE
        self.buffer = GroupBuffer(
            groups_per_step=self.per_step, max_staleness=MAX_STALENESS,
            groups_in_flight=self.per_step if schedule == "synchronous" else in_flight // GROUP_SIZE)
        tasks = [Task(instance_id=f"t{number}", problem_statement="simulated") for number in range(TASKS)]
        self.stream = TaskStream(tasks, seed=0)
        self.engines, self.drains, self.steps = Engines(gpus), schedule == "drain", steps
        self.events: list[tuple[float, int, object]] = []
        self.now, self.version, self.groups, self.stale = 0.0, 0, 0, 0
        self.waiting: deque[Rollout] = deque()
        self.updating = self.closed = False
        self.learning_s = 0.0
        self.trained_tokens, self.ages = 0, []
        self.tokens: dict[str, int] = {}
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
            members = [rollout(task.instance_id, group_id, member, self.answers) for member in range(GROUP_SIZE)]
            self.buffer.start(group_id, task.instance_id, [one.rollout_id for one in members])
            for one in members:
                self.tokens[one.rollout_id] = one.tokens
                self.later(START_S, one)

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
        else:
            self.ended(what)

    def ask(self, one: Rollout) -> None:
        """Its harness sends a request: it waits while weights change, or while older requests are finished."""
        if self.closed or self.engines.frozen:
            self.waiting.append(one)
            return
        if one.oldest is None:
            one.oldest = self.version
        self.engines.add(one.calls[0][0], one)

    def answered(self, one: Rollout) -> None:
        self.later(one.calls.popleft()[1], one)
        if self.closed and not self.engines.running:
            self.learn()

    def ended(self, one: Rollout) -> None:
        versions = np.array([one.oldest], np.int32)
        call = Call(0, EMPTY, versions, versions.astype(np.float32), versions, "stop")
        self.buffer.finish(Trajectory(one.rollout_id, one.group_id, one.task_id, [call], "graded"))
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
        self.later(CHANGE_S + LEARN_GPU_S * self.per_step * GROUP_SIZE / self.engines.gpus, "updated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default=ROWS, help=f"GPUSxROLLOUTS, with commas (default {ROWS})")
    parser.add_argument("--steps", type=int, default=12, help="updates of each run (default 12)")
    parser.add_argument("--answers", default="{},{}".format(*ANSWERS), metavar="MEDIAN,SIGMA",
                        help="tokens of an answer, log-normal (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    answers = tuple(map(float, options.answers.split(",")))
    print(f"{'GPUs':>5} {'rollouts':>8}  {'schedule':12} {'tokens/s':>9} {'ratio':>6} {'idle':>5} {'thin':>6} "
          f"{'stale':>6} {'age':>5}")
    results = []
    for row in options.rows.split(","):
        gpus, in_flight = map(int, row.split("x"))
        for schedule in SCHEDULES:
            result = Simulation(schedule, gpus, in_flight, options.steps, answers).run()
            results.append({"gpus": gpus, "rollouts": in_flight, "schedule": schedule, "steps": options.steps,
                            "answers": answers, **result})
            ratio = result["tokens_per_s"] / results[-1 - SCHEDULES.index(schedule)]["tokens_per_s"]
            results[-1]["ratio"] = ratio
            print(f"{gpus:5} {in_flight:8}  {schedule:12} {result['tokens_per_s']:9.0f} {ratio:6.2f} "
                  f"{result['idle']:5.2f} {result['sequences']:6.1f} {result['stale']:6.2f} {result['age']:5.1f}",
                  flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
