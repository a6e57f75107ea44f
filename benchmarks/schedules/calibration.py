"""What was seen of real runs (`real.py`), as figures of a schedule and as constants of the simulation. Pure.

The constants come from all runs together:
- decoding: answers of T tokens that took d seconds in which the generator was open, with n requests in flight on
  average: the least squares of d = (T + prefill_steps) * (step_s + step_s_per_sequence * n);
- calls of a rollout, tokens of an answer, seconds that a command slept: quantiles;
- what a rollout needs of the processors: `processor_seconds`;
- the learner: its seconds for each rollout, and the rest of the pause.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.schedules.simulation import GROUP_SIZE, PROBABILITIES, Work

PREFILLS = np.arange(0.0, 200.5, 0.5)
"""Lengths of a prefill, in decoding steps, that are tried."""


class Timeline:
    """When the generator had how many requests, within the steps of one run."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self.wall_s = seen["wall_s"]
        self.pauses = [(stopped, thawed) for _, stopped, thawed in seen["updates"]]
        self.answers = [(self._let_in(line["began"], seen["updates"]), line["ended"], line["tokens"])
                        for line in seen["lines"] if line["what"] == "answer"]
        changes = sorted([(began, 1) for began, _, _ in self.answers] + [(ended, -1) for _, ended, _ in self.answers])
        marks = sorted({0.0, self.wall_s, *(at for at, _ in changes), *(at for pause in self.pauses for at in pause)})
        self.marks = [at for at in marks if 0 <= at <= self.wall_s]
        opened, loaded, busy, running, next_change = [0.0], [0.0], 0.0, 0, 0
        for at, until in pairwise(self.marks):
            while next_change < len(changes) and changes[next_change][0] <= at:
                running += changes[next_change][1]
                next_change += 1
            passed = 0.0 if self._paused(at) else until - at
            opened.append(opened[-1] + passed)
            loaded.append(loaded[-1] + passed * running)
            busy += passed if running else 0.0
        self.opened, self.loaded, self.busy_s = opened, loaded, busy
        self.learning_s = sum(thawed - stopped for stopped, thawed in self.pauses)

    @staticmethod
    def _let_in(asked: float, updates: Sequence[Sequence[float]]) -> float:
        """A request that arrives while weights change, or while those before it are finished, waits for the thaw."""
        return next((thawed for began, _, thawed in updates if began <= asked < thawed), asked)

    def _paused(self, at: float) -> bool:
        return any(stopped <= at < thawed for stopped, thawed in self.pauses)

    @property
    def idle(self) -> float:
        """The share of time in which the devices neither sampled nor learned."""
        return 1 - (self.busy_s + self.learning_s) / self.wall_s

    @property
    def sequences(self) -> float:
        """Requests in flight on average, while there were any."""
        return self.loaded[-1] / self.busy_s

    def decoding(self) -> list[tuple[int, float, float]]:
        """Of each answer that ended within the steps: tokens, seconds in the open generator, requests in flight."""
        found = []
        for began, ended, tokens in self.answers:
            if ended <= self.wall_s:
                first, last = (np.interp([began, ended], self.marks, values) for values in (self.opened, self.loaded))
                if first[1] > first[0]:
                    found.append((tokens, first[1] - first[0], (last[1] - last[0]) / (first[1] - first[0])))
        return found


def decoding_rate(measured: Sequence[tuple[int, float, float]]) -> tuple[float, float, float]:
    """`step_s`, `step_s_per_sequence`, `prefill_steps` of (tokens, seconds, requests in flight)."""
    tokens, seconds, running = np.array(measured, float).T
    best = (np.inf, 0.0, 0.0, 0.0)
    for prefill in PREFILLS:
        columns = np.stack([tokens + prefill, (tokens + prefill) * running], 1)
        solution, *_ = np.linalg.lstsq(columns, seconds, rcond=None)
        step, more = np.maximum(solution, 0.0)
        error = float(np.sum((columns @ np.array([step, more]) - seconds) ** 2))
        best = min(best, (error, float(step), float(more), float(prefill)))
    return best[1:]


def quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.quantile(values, PROBABILITIES))


def figures(seen: dict[str, Any]) -> dict[str, float]:
    """A real run in the terms of `Simulation.run`, and what is real only."""
    timeline, metrics = Timeline(seen), seen["metrics"]
    trained = sum(line["groups_trained"] for line in metrics)
    stale = sum(line["groups_dropped"] for line in metrics)
    return {
        "wall_s": seen["wall_s"], "tokens_per_s": seen["tokens"] / seen["wall_s"], "idle": timeline.idle,
        "sequences": timeline.sequences, "stale": stale / (stale + trained), "age": seen["age"],
        "tokens_trained": sum(line["tokens_trained"] for line in metrics), "groups_trained": trained,
        "heldout": seen["heldout"]["rate"], "heldout_ci95": seen["heldout"]["ci95"], "errors": errors(seen)}


def errors(seen: dict[str, Any]) -> int:
    """Requests of rollouts that ended which were answered by an error or not at all, or were made again."""
    good = Counter(line["rollout"] for line in seen["lines"] if line["what"] == "answer" and line["status"] == 200)
    return sum(line["requests"] - min(good[line["rollout"]], seen["calls"].get(line["rollout"], line["requests"]))
               for line in seen["lines"] if line["what"] == "rollout")


def constants(runs: Sequence[dict[str, Any]]) -> Work:
    """Of all runs together."""
    timelines = [Timeline(seen) for seen in runs]
    step, more, prefill = decoding_rate([answer for each in timelines for answer in each.decoding()])
    lines = [line for seen in runs for line in seen["lines"]]
    answers = [line["tokens"] for line in lines if line["what"] == "answer"]
    updates = [metrics for seen in runs for metrics in seen["metrics"] if "pause_s" in metrics]
    start, turn, end = processor_seconds(runs)
    calls = [count for seen in runs for count in seen["calls"].values()]
    return Work(
        step_s=step, step_s_per_sequence=more, prefill_steps=prefill, calls=quantiles(calls), most_calls=max(calls),
        answers=quantiles(answers), most_tokens=max(answers),
        tools=quantiles([line["slept"] for line in lines if line["what"] == "tool"]),
        start_s=start, turn_s=turn, end_s=end, processors=1,
        learn_gpu_s=sum(one["learn_s"] for one in updates) / (
            GROUP_SIZE * sum(one["groups_trained"] for one in updates)),
        change_s=fmean(one["pause_s"] - one["freeze_s"] - one["learn_s"] for one in updates))


def processor_seconds(runs: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Of one rollout: before its first call, for each call, and after the last one.

    Processor time that everything but engine and learner used, for each rollout, shared out as the medians of the times
    that these stages took, and divided by the processors that engine and learner left over.
    """
    used = sum(seen["cpu"]["rollouts"] for seen in runs)
    rollouts = sum(sum(at < seen["wall_s"] for at in seen["returned"].values()) for seen in runs)
    others = sum(seen["cpu"]["engine"] + seen["cpu"]["learner"] for seen in runs)
    left = runs[0]["cores"] - others / sum(seen["wall_s"] for seen in runs)
    timings = [stages for seen in runs for stages in seen["timings"].values()]
    start = median(stages["init"] for stages in timings if "init" in stages)
    end = median(stages.get("grade", 0.0) for stages in timings)
    turn = median(line["ended"] - line["began"] - line["slept"] for seen in runs for line in seen["lines"]
                  if line["what"] == "tool")
    calls = fmean(count for seen in runs for count in seen["calls"].values())
    scale = used / rollouts / left / (start + calls * turn + end)
    return start * scale, turn * scale, end * scale
