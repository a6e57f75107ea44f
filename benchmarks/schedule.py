"""Three schedules of the same work: synchronous, asynchronous that drains before updates, asynchronous that goes on.

    python benchmarks/schedule.py                     # the table
    python benchmarks/schedule.py --json FILE         # the same as data
    python benchmarks/schedule.py --rows 8x64/2,8x64/4 --steps 20
    python benchmarks/schedule.py --answers 180,0.9   # a policy that thinks little: shorter answers, a shorter tail
    python benchmarks/schedule.py --work FILE         # another machine or other rollouts: the fields of `Work` as JSON

A discrete-event simulation. What starts, waits, is taken, is dropped or runs again is decided by the trainer's own
`GroupBuffer` and `TaskStream`; simulated are the clock, the engines, the harnesses and the learner. A row `GxR/N` is
one machine: G GPUs, R rollouts in flight in the asynchronous schedules, R / N rollouts trained in each update. The
synchronous schedule has those R / N in flight. Rollouts are the same in all three: rollout n of task m makes the same
calls with the same lengths and tool times.

Assumed, not measured (`Work`: a 9 B policy on 80 GB GPUs, harnesses on software tasks):
- a decoding step takes 15 ms and 0.15 ms more for each sequence on its GPU; sequences are spread evenly;
- calls of a rollout: log-normal, median 20, sigma 0.6, at most 100; tokens of an answer: log-normal, median 400, p99 /
  p50 = 15, at most 16,384; time of a tool: log-normal, median 1.5 s, p99 / p50 = 15; a sandbox starts in 3 s;
- the learner has all GPUs to itself: 4 GPU-seconds for each rollout, and 8 s to change over and publish.

Columns: trained tokens/s, its ratio to the synchronous schedule and to `drain`; `idle`, the share of time in which the
GPUs neither sample nor learn; `thin`, the mean number of sequences on a GPU while it samples; `stale`, the share of
finished groups that were dropped as too old; `age`, the mean number of policy versions between the oldest token and
the update.
"""

import argparse
import heapq
import json
import math
import random
import sys
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightning_ray.buffer import GroupBuffer
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.stream import TaskStream
from lightning_ray.trajectory.call import Call, Trajectory

TAIL = math.log(15) / 2.326
"""Sigma of a log-normal distribution with p99 / p50 = 15."""
GROUP_SIZE = 8
TASKS = 5000
MAX_STALENESS = 4
EMPTY = np.zeros(0, np.int32)
ROWS = "8x64/2,8x64/4,8x256/2,8x256/4,32x1024/4,128x4096/4,512x16384/4"
SCHEDULES = ("synchronous", "drain", "continue")


@dataclass(frozen=True, slots=True)
class Work:
    """A machine and what is done on it. Log-normal distributions are `(median, sigma)`."""

    step_s: float = 0.015
    """A decoding step of one sequence ..."""
    step_s_per_sequence: float = 0.00015
    """... and what each further one adds."""
    calls: tuple[float, float] = (20, 0.6)
    most_calls: int = 100
    answers: tuple[float, float] = (400.0, TAIL)
    """Tokens."""
    most_tokens: int = 16384
    tools: tuple[float, float] = (1.5, TAIL)
    """Seconds after each call."""
    start_s: float = 3.0
    learn_gpu_s: float = 4.0
    """For each rollout."""
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


def bounded(rng: random.Random, shape: tuple[float, float], most: int) -> int:
    return min(most, max(1, round(rng.lognormvariate(math.log(shape[0]), shape[1]))))


def rollout(task: str, group_id: str, member: int, work: Work) -> Rollout:
    rng = random.Random(f"{task}/{member}")
    calls = deque((bounded(rng, work.answers, work.most_tokens),
                   rng.lognormvariate(math.log(work.tools[0]), work.tools[1]))
                  for _ in range(bounded(rng, work.calls, work.most_calls)))
    return Rollout(f"{group_id}-r{member}", group_id, task, calls, sum(tokens for tokens, _ in calls))


class Simulation:
    """One run of one schedule."""

    def __init__(self, schedule: str, gpus: int, per_step: int, in_flight: int, steps: int, work: Work) -> None:
        """`per_step` and `in_flight`: groups; the synchronous schedule has no more in flight than it trains."""
        self.work, self.per_step = work, per_step
        self.buffer = GroupBuffer(
            groups_per_step=per_step, max_staleness=MAX_STALENESS, stale_limit=1000,
            groups_in_flight=per_step if schedule == "synchronous" else in_flight)
        tasks = [Task(instance_id=f"t{number}", problem_statement="simulated") for number in range(TASKS)]
        self.stream = TaskStream(tasks, seed=0)
        self.engines, self.drains, self.steps = Engines(gpus, work), schedule == "drain", steps
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
            members = [rollout(task.instance_id, group_id, member, self.work) for member in range(GROUP_SIZE)]
            self.buffer.start(group_id, task.instance_id, [one.rollout_id for one in members])
            for one in members:
                self.tokens[one.rollout_id] = one.tokens
                self.later(self.work.start_s, one)

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
        rollouts = self.per_step * GROUP_SIZE
        self.later(self.work.change_s + self.work.learn_gpu_s * rollouts / self.engines.gpus, "updated")


def row_of(text: str) -> tuple[int, int, int]:
    """`8x64/2` -> GPUs, groups trained in each update, groups in flight."""
    gpus, rest = text.split("x")
    rollouts, part = map(int, rest.split("/"))
    return int(gpus), rollouts // part // GROUP_SIZE, rollouts // GROUP_SIZE


def number(value: float | None) -> str:
    return " " * 6 if value is None else f"{value:6.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default=ROWS, help=f"GPUSxROLLOUTS/PARTS, with commas (default {ROWS})")
    parser.add_argument("--steps", type=int, default=12, help="updates of each run (default 12)")
    parser.add_argument("--answers", metavar="MEDIAN,SIGMA", help="tokens of an answer, log-normal")
    parser.add_argument("--work", type=Path, metavar="FILE", help="constants as JSON, the fields of `Work`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    given = json.loads(options.work.read_text()) if options.work else {}
    if options.answers:
        given["answers"] = tuple(map(float, options.answers.split(",")))
    work = Work(**given)
    print(f"{'row':>14}  {'schedule':12} {'tokens/s':>9} {'ratio':>6} {'/drain':>6} {'idle':>5} {'thin':>6} "
          f"{'stale':>6} {'age':>5}")
    results = []
    for row in options.rows.split(","):
        rates: dict[str, float] = {}
        for schedule in SCHEDULES:
            result = Simulation(schedule, *row_of(row), options.steps, work).run()
            rates[schedule] = rate = result["tokens_per_s"]
            result |= {"ratio": rate / rates["synchronous"],
                       "to_drain": rate / rates["drain"] if "drain" in rates else None}
            results.append({"row": row, "schedule": schedule, "steps": options.steps, "work": asdict(work), **result})
            print(f"{row:>14}  {schedule:12} {rate:9.0f} {result['ratio']:6.2f} {number(result['to_drain'])} "
                  f"{result['idle']:5.2f} {result['sequences']:6.1f} {result['stale']:6.2f} {result['age']:5.1f}",
                  flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
