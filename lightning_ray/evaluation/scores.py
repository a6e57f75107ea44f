"""The scores of an evaluation, from its rollouts: pass rates with intervals, every outcome, two of them compared."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_ray.config import ConfigError
from lightning_ray.evaluation.comparison import compare, mean_with_interval, pass_at_k
from lightning_ray.statistics import pass_rate
from lightning_ray.tasks.swe_smith import repository
from lightning_ray.trajectory.call import Trajectory


class NothingJudged(RuntimeError):
    """No rollout could be run. The message says why."""


def scores(repositories: Mapping[str, str], done: Mapping[str, Sequence[Trajectory]], *, seed: int) -> dict[str, Any]:
    """Pass rates with intervals, in all and per repository, and every outcome. Pure. `NothingJudged` where there is
    none. `infra_failed` is how many rollouts were not judged.
    """
    judged = {name: [each for each in members if each.end != "infra_failed"] for name, members in done.items()}
    judged = {name: members for name, members in judged.items() if members}
    if not judged:
        first = next((each for members in done.values() for each in members), None)
        raise NothingJudged(f"no rollout could be run: {first.reason if first else 'there are no tasks'}")
    by_repository: dict[str, list[list[bool]]] = {}
    for name, members in judged.items():
        by_repository.setdefault(repository(repositories[name]) or "-", []).append([each.passed for each in members])
    ends = [each.end for members in done.values() for each in members]
    return {
        **rates([samples for each in by_repository.values() for samples in each], seed),
        "ends": {end: ends.count(end) for end in ("graded", "harness_failed", "infra_failed")},
        "reasons": dict(Counter(kind_of(each.reason) for members in done.values() for each in members).most_common()),
        "repositories": {name: rates(each, seed) for name, each in sorted(by_repository.items())},
        "instances": {name: [outcome(each) for each in members] for name, members in done.items()},
    }


def rates(passed: Sequence[Sequence[bool]], seed: int) -> dict[str, Any]:
    """`pass@k` for each power of two, of instances with these samples. An instance counts where it has at least k. One
    sample of each has Wilson's interval, several have the bootstrap's over instances."""
    if max(map(len, passed)) == 1:
        return {"pass@1": pass_rate(sum(map(sum, passed)), len(passed))}
    found = {}
    k = 1
    while values := [pass_at_k(len(samples), sum(samples), k) for samples in passed if len(samples) >= k]:
        found[f"pass@{k}"] = {"instances": len(values), **mean_with_interval(values, seed=seed)}
        k *= 2
    return found


def outcome(trajectory: Trajectory) -> dict[str, Any]:
    return {"rollout": trajectory.rollout_id, "end": trajectory.end, "passed": trajectory.passed,
            "reason": trajectory.reason, "suspicions": trajectory.suspicions, "calls": len(trajectory.calls),
            "tokens_in": trajectory.tokens_prompt, "tokens_out": trajectory.tokens_sampled,
            "seconds": round(sum(trajectory.timings.values()), 3)}


def kind_of(reason: str) -> str:
    """What ended a rollout, without its particulars: `passed`, `tests_failed`, `timeout`, `LimitsExceeded`, ..."""
    return reason.partition(":")[0].strip() or "-"


def compare_files(first: Path, second: Path) -> dict[str, Any]:
    """`comparison.compare` of two results.json. Raises `ConfigError` where they are not of the same instances."""
    rates = []
    hashes = []
    for path in (first, second):
        try:
            results = json.loads(path.read_text())
            hashes.append(results["data"]["sha256"])
            members = {name: [each for each in outcomes if each["end"] != "infra_failed"]
                       for name, outcomes in results["instances"].items()}
            rates.append({name: fmean(each["passed"] for each in kept) for name, kept in members.items() if kept})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"compare: {path} is no results.json of an evaluation ({error}). Make one with "
                              "lightning-ray evaluate") from None
    if hashes[0] != hashes[1]:
        raise ConfigError(f"compare: {first} and {second} were measured on different tasks. Evaluate both on the same "
                          "files")
    try:
        return compare(*rates)
    except ValueError as error:
        raise ConfigError(f"compare: {error}. Evaluate again") from None


def lines(results: Mapping[str, Any]) -> list[str]:
    """The results for a terminal."""
    shown = []
    for name, value in results.items():
        if name.startswith("pass@"):
            rate, (low, high) = value.get("rate", value.get("mean")), value["ci95"]
            shown.append(f"{name} {rate:.1%} [{low:.1%}, {high:.1%}]")
    ends, costs = results["ends"], results["bill"]
    shown.append(", ".join(f"{count} {end}" for end, count in ends.items()))
    cost = "" if costs["cost"] is None else f"; cost {costs['cost']:.4f}"
    shown.append(f"tokens in {costs['tokens_in']:,} (cached {costs['tokens_in_cached']:,}), out "
                 f"{costs['tokens_out']:,}; {costs['device_s']:.0f} device-seconds{cost}")
    return shown
