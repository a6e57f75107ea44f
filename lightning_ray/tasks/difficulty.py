"""How difficult tasks are for a policy, and which of them are worth training on. Pure.

A group whose rollouts all pass, or all fail, teaches nothing: its rewards are equal. A task's weight is the chance that
a group has both, `1 - p^G - (1 - p)^G` for a group of G rollouts (Bernoulli trials) and the pass rate p, estimated as
(passed + 1/2) / (judged + 1) (Jeffreys' prior), so that four failures of four do not mean never.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ray.tasks.base import Task

Verdict = Literal["mixed", "always_failing", "always_passing", "not_judged"]
WHY = {
    "mixed": "some rollouts pass: kept",
    "always_failing_kept": "none passes: the share that is kept all the same",
    "always_failing": "none passes: dropped",
    "always_passing": "all pass: dropped, nothing is left to learn",
    "not_judged": "no rollout could be run or judged: not decided, tried again at the next start",
}


@dataclass(frozen=True, slots=True)
class Tally:
    """A task's rollouts so far. Those that failed for reasons of ours are no rollouts."""

    passed: int = 0
    judged: int = 0

    @property
    def verdict(self) -> Verdict:
        if self.judged == 0:
            return "not_judged"
        if self.passed in (0, self.judged):
            return "always_passing" if self.passed else "always_failing"
        return "mixed"

    def weight(self, group_size: int) -> float:
        p = (self.passed + 0.5) / (self.judged + 1)
        return 1 - p**group_size - (1 - p) ** group_size


@dataclass(frozen=True, slots=True)
class Selection:
    """What became of each task, in the order of the data."""

    kept: list[Task]
    """With their `weight`."""
    rates: list[dict[str, Any]]
    """Of every task: `instance_id, passed, judged, pass_rate, verdict, kept, weight`."""
    counts: dict[str, int]
    """By the keys of `WHY`."""


def tallied(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Tally]:
    """Instance id -> tally, from outcomes with `instance_id`, `end` and `passed`."""
    found: dict[str, Tally] = {}
    for each in outcomes:
        before = found.get(each["instance_id"], Tally())
        if each["end"] != "infra_failed":
            found[each["instance_id"]] = Tally(before.passed + bool(each["passed"]), before.judged + 1)
    return found


def select(tasks: Sequence[Task], tallies: Mapping[str, Tally], *, keep_failing: float, group_size: int,
           seed: int) -> Selection:
    """Keeps the mixed tasks and a share of the always-failing ones, which the seed decides: a larger share keeps the
    same and more."""
    failing = [task.instance_id for task in tasks if tallies.get(task.instance_id, Tally()).verdict == "always_failing"]
    chosen = set(sorted(failing, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())
                 [: round(keep_failing * len(failing))])
    kept, rates, counts = [], [], dict.fromkeys(WHY, 0)
    for task in tasks:
        tally = tallies.get(task.instance_id, Tally())
        keeps = tally.verdict == "mixed" or task.instance_id in chosen
        counts["always_failing_kept" if task.instance_id in chosen else tally.verdict] += 1
        weight = round(tally.weight(group_size), 6) if keeps else 0.0
        if keeps:
            kept.append(task.model_copy(update={"weight": weight}))
        rates.append({
            "instance_id": task.instance_id, "passed": tally.passed, "judged": tally.judged,
            "pass_rate": tally.passed / tally.judged if tally.judged else None, "verdict": tally.verdict, "kept": keeps,
            "weight": weight})
    return Selection(kept, rates, counts)
