"""SWE-smith's published data set as training tasks: filters, splits by repository, and a hash of the result. Pure.

Each instance that is left out is counted under one reason, the first that applies, in this order:

    duplicate_id          an instance with this id was seen already
    excluded_repository   its repository is among those that the user excludes (say, those of the evaluation)
    no_statement          its problem statement is empty: the agent would not know what to do
    missing_snapshot      its branch is not among the snapshots that exist (checked where a list of them is given)
    no_failing_test       nothing tells a solution from none
    too_many_tests        more than `max_tests` tests: grading would take longer than the rollout
    duplicate_bug         the same change to the same repository was seen already

The reference recipe drops 18,033 of 59,136 instances for want of a statement and 1,265 whose branch is missing, and
those with more than 200 tests.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ray.config import ConfigError
from lightning_ray.tasks.files import test_list

Row = dict[str, Any]

WHY = {
    "duplicate_id": "an instance with the same id came earlier",
    "excluded_repository": "the repository is excluded",
    "no_statement": "the problem statement is empty",
    "missing_snapshot": "no snapshot of the repository holds this bug",
    "no_failing_test": "FAIL_TO_PASS is empty",
    "too_many_tests": "more tests than the limit",
    "duplicate_bug": "the same change to the same repository came earlier",
}
COMMIT = re.compile(r"\.[0-9a-f]{7,40}\Z")


@dataclass(frozen=True, slots=True)
class Filters:
    max_tests: int = 200
    """FAIL_TO_PASS and PASS_TO_PASS together."""
    excluded: frozenset[str] = frozenset()
    """Repositories, in any of the forms that `repository` understands."""
    snapshots: frozenset[str] | None = None
    """Names of the branches that exist (SWE-smith names them after the instance); None: not checked."""


@dataclass(slots=True)
class Report:
    """What became of the instances: `read == kept + sum(dropped.values())`."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        shown = [f"{count:7d}  {reason}: {WHY[reason]}" for reason in WHY if (count := self.dropped[reason])]
        return [f"{self.read:7d}  read", *shown, f"{self.kept:7d}  kept"]


def repository(name: str) -> str:
    """One name for a repository, whatever the form: `swesmith/Owner__name.1fd52536` and `Owner/name` are both
    `owner__name`. All snapshots of a repository share it, so that a split cannot tear them apart."""
    name = COMMIT.sub("", name.strip().lower())
    owner, slash, rest = name.rpartition("/")
    if not slash:
        return name
    return rest if "__" in rest else f"{owner.rpartition('/')[2]}__{rest}"


def filtered(rows: Iterable[tuple[str, Row]], filters: Filters) -> tuple[list[Row], Report]:
    """The instances that are kept, in their order, and what became of all. `rows`: (place, instance), where the place
    names a malformed one in a `ConfigError`."""
    report, kept = Report(), []
    excluded = {repository(name) for name in filters.excluded}
    ids: set[str] = set()
    bugs: set[str] = set()
    for place, row in rows:
        report.read += 1
        try:
            reason = _why_not(row, place, filters, excluded, ids, bugs)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{place}: no SWE-smith instance ({type(error).__name__}: {error}). Correct it or drop "
                              "the line") from None
        if reason is None:
            kept.append(row)
            report.kept += 1
        else:
            report.dropped[reason] += 1
    return kept, report


def _why_not(row: Row, place: str, filters: Filters, excluded: set[str], ids: set[str], bugs: set[str]) -> str | None:
    name = row["instance_id"]
    if name in ids:
        return "duplicate_id"
    ids.add(name)
    if repository(row.get("repo") or "") in excluded:
        return "excluded_repository"
    if not (row.get("problem_statement") or "").strip():
        return "no_statement"
    if filters.snapshots is not None and name not in filters.snapshots:
        return "missing_snapshot"
    failing, passing = (test_list(row.get(name) or [], name, place) for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    if not failing:
        return "no_failing_test"
    if len(failing) + len(passing) > filters.max_tests:
        return "too_many_tests"
    if row.get("patch"):
        bug = hashlib.sha256(f"{repository(row.get('repo') or '')}\0{row['patch']}".encode()).hexdigest()
        if bug in bugs:
            return "duplicate_bug"
        bugs.add(bug)
    return None


@dataclass(frozen=True, slots=True)
class Splits:
    """No repository is in two of them."""

    train: list[Row]
    validation: list[Row]
    test: list[Row]
    unused: int
    """Instances of the validation's and the test's repositories beyond the size that was asked for: they cannot be
    trained on."""

    def named(self) -> dict[str, list[Row]]:
        return {"train": self.train, "validation": self.validation, "test": self.test}


def split(rows: Sequence[Row], *, validation: int, test: int, seed: int) -> Splits:
    """Whole repositories go to the test split until it has `test` instances, then to validation, the rest to training.

    The order of the repositories, and which of their instances are taken, comes from a hash of the seed and the name:
    it does not change when other repositories come or go. Raises `ConfigError` where nothing is left to train on.
    """
    by_repository: dict[str, list[Row]] = {}
    for row in rows:
        by_repository.setdefault(repository(row.get("repo") or ""), []).append(row)
    waiting = sorted(by_repository, key=lambda name: _draw(seed, name))
    parts: list[list[Row]] = []
    unused = 0
    for size in (test, validation):
        part: list[Row] = []
        while len(part) < size and waiting:
            part += by_repository[waiting.pop(0)]
        part.sort(key=lambda row: _draw(seed, row["instance_id"]))
        unused += max(0, len(part) - size)
        parts.append(part[:size])
    train = [row for name in waiting for row in by_repository[name]]
    if not train:
        raise ConfigError(f"--validation {validation}, --test {test}: the {len(rows)} instances come from "
                          f"{len(by_repository)} repositories, and none is left to train on. Lower them, or give more "
                          "repositories")
    train.sort(key=lambda row: _draw(seed, row["instance_id"]))
    return Splits(train, validation=parts[1], test=parts[0], unused=unused)


def digest(rows: Iterable[Row]) -> str:
    """SHA-256 of the instances in their order, independent of how they are laid out in a file."""
    total = hashlib.sha256()
    for row in rows:
        total.update(json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")
    return total.hexdigest()


def _draw(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()
