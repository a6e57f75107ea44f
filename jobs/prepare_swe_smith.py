"""Prepares coding tasks in SWE-smith's schema.

    python jobs/prepare_swe_smith.py files DATA.parquet ... --out DIR      the published data set, filtered and split
    python jobs/prepare_swe_smith.py sdist --from-sdist inflection==0.5.1 --out DIR        made from packages with tests

Each writes `train.jsonl`, `validation.jsonl`, `test.jsonl` (those that are not empty) and `report.json` with what was
left out and why, and the SHA-256 of each split. No repository, and no package, is in two splits.
"""

import argparse
import asyncio
import functools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_ray.cli import run_command
from lightning_ray.config import ConfigError, SandboxConfig
from lightning_ray.run_directory import write_whole
from lightning_ray.sandbox import backend
from lightning_ray.sandbox.base import Sandbox, SandboxSpec, SandboxUnavailable
from lightning_ray.tasks import files, from_sdist, swe_smith
from lightning_ray.tasks.statements import Model, Plain, Writer


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    published = commands.add_parser("files", help="filter and split files of the published data set")
    published.add_argument("files", nargs="+", type=Path, help="JSONL or Parquet")
    published.add_argument("--max-tests", type=int, default=200, help="more tests than this drop an instance")
    published.add_argument("--exclude-repo", action="append", default=[], metavar="OWNER/NAME")
    published.add_argument("--snapshots", type=Path, metavar="FILE", help="branches that exist, one a line "
                           "(`git ls-remote --heads`); an instance without one is dropped")
    published.set_defaults(run=_files, settings=False)
    _sizes(published, validation=400)

    made = commands.add_parser("sdist", help="make tasks from source packages that ship their tests")
    made.add_argument("--from-sdist", action="append", required=True, metavar="NAME==VERSION", dest="packages",
                      help="repeatable; packages without dependencies")
    made.add_argument("--mutations", type=int, default=40, help="bugs tried in each package")
    made.add_argument("--at-once", type=int, default=2, help="sandboxes at once")
    made.add_argument("--suite-timeout", type=float, default=60, metavar="SECONDS",
                      help="of a package's whole suite; with a bug five times what it takes without, at most this")
    made.add_argument("--cache", type=Path, default=Path("runs/sdists"), metavar="DIR", help="downloaded packages")
    made.add_argument("--statements-url", metavar="URL", help="an OpenAI-compatible endpoint whose model writes the "
                      "problem statements (default: a template)")
    made.add_argument("--statements-model", metavar="NAME")
    made.add_argument("--statements-key-env", default="OPENAI_API_KEY", metavar="VARIABLE",
                      help="where the endpoint's key is (default: %(default)s)")
    made.set_defaults(run=_sdists, settings=False)
    _sizes(made, validation=0)
    return parser


def _sizes(parser: argparse.ArgumentParser, validation: int) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--validation", type=int, default=validation, help="instances (default: %(default)s)")
    parser.add_argument("--test", type=int, default=0, help="instances")
    parser.add_argument("--seed", type=int, default=0)


def _files(options: argparse.Namespace, overrides: list[str]) -> None:
    snapshots = None
    if options.snapshots is not None:
        if not options.snapshots.is_file():
            raise ConfigError(f"--snapshots: there is no file {options.snapshots}. Give one branch a line")
        lines = options.snapshots.read_text().split("\n")
        snapshots = frozenset(line.split()[-1].removeprefix("refs/heads/") for line in lines if line.strip())
    filters = swe_smith.Filters(options.max_tests, frozenset(options.exclude_repo), snapshots)
    rows, report = swe_smith.filtered(_rows(options.files), filters)
    print("\n".join(report.lines()))
    write_splits(rows, options, {"read": report.read, "dropped": dict(report.dropped)})


def _rows(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"there is no file {path}. Give JSONL or Parquet files of the data set")
        read = files.parquet_rows if path.suffix == ".parquet" else files.jsonl_rows
        for place, row in read(path):
            yield f"{path}, {place}", row


def _sdists(options: argparse.Namespace, overrides: list[str]) -> None:
    writer = _writer(options)
    try:
        make = backend.choose(SandboxConfig()).make
    except SandboxUnavailable as error:
        raise ConfigError(f"packages' tests are run in sandboxes only. {error}") from None
    packages = [from_sdist.unpack(from_sdist.download(name, options.cache), name) for name in options.packages]
    made, unusable = asyncio.run(_made(packages, make, writer, options))
    rows = [row for each in made.values() for row in each.rows]
    dropped = sum((each.dropped for each in made.values()), Counter())
    read = sum(each.tried for each in made.values())
    if not rows:
        raise ConfigError(f"--from-sdist: none of {read} bugs became a task ({dict(dropped)}). Take other packages, or "
                          f"more --mutations. {' '.join(unusable.values())}".rstrip())
    print(f"{read:7d}  bugs tried")
    print("\n".join(f"{count:7d}  {reason}: {from_sdist.WHY[reason]}" for reason, count in sorted(dropped.items())))
    facts = {name: {"tests": dict(each.tests), "suite_s": round(each.suite_s, 2), "tried": each.tried,
                    "dropped": dict(each.dropped), "valid": len(each.rows)} for name, each in made.items()}
    write_splits(rows, options, {"packages": facts, "unusable": unusable, "read": read, "dropped": dict(dropped),
                                 "statements": options.statements_model or "template"})


def _writer(options: argparse.Namespace) -> Writer:
    if (options.statements_url is None) != (options.statements_model is None):
        raise ConfigError("--statements-url and --statements-model: one was given without the other. Give the endpoint "
                          "(http://HOST:PORT/v1) and the name of its model, or neither for the template")
    if options.statements_url is None:
        return Plain()
    return Model(options.statements_url, options.statements_model, os.environ.get(options.statements_key_env, "none"))


async def _made(packages: Sequence[from_sdist.Package], make: Callable[[SandboxSpec], Sandbox], writer: Writer,
                options: argparse.Namespace) -> tuple[dict[str, from_sdist.Made], dict[str, str]]:
    """What became of each package, and why others are of no use, by `NAME==VERSION`."""
    made, unusable = {}, {}
    with tempfile.TemporaryDirectory(prefix="sdists-") as directory, _progress() as progress:
        maker = from_sdist.Maker(make, Path(directory), writer=writer, timeout_s=options.suite_timeout,
                                 at_once=options.at_once)
        for package in packages:
            name = f"{package.name}=={package.version}"
            count = len(from_sdist.bugs(package, options.mutations, options.seed))
            shown = progress.add_task(name, total=count)
            try:
                made[name] = await maker.tasks(package, options.mutations, options.seed,
                                               functools.partial(progress.advance, shown))
            except ConfigError as error:
                unusable[name] = str(error)
                progress.console.print(f"left out. {error}", markup=False)
                continue
            tests = made[name].tests
            progress.console.print(f"{name}: {tests['stable']} of {tests.total()} tests pass stably, "
                                   f"{len(made[name].rows)} of {count} bugs are tasks")
    return made, unusable


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                    console=Console(stderr=True, highlight=False))


def write_splits(rows: Sequence[dict[str, Any]], options: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Writes the splits and the report, and says what they hold."""
    parts = swe_smith.split(rows, validation=options.validation, test=options.test, seed=options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {**facts, "seed": options.seed, "unused": parts.unused, "splits": {}}
    for name, part in parts.named().items():
        path = options.out / f"{name}.jsonl"
        path.unlink(missing_ok=True)
        if not part:
            continue
        part = [{"grader": "swe", **row} for row in part]
        for row in part:
            files.parse(row, f"instance {row['instance_id']}")
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part))
        repositories = {swe_smith.repository(row.get("repo") or "") for row in part}
        report["splits"][name] = {"instances": len(part), "repositories": len(repositories),
                                  "sha256": swe_smith.digest(part)}
        print(f"{len(part):7d}  in {path} ({len(repositories)} repositories)")
    write_whole(options.out / "report.json", json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
