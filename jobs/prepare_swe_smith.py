"""Prepares coding tasks in SWE-smith's schema.

    python jobs/prepare_swe_smith.py files DATA.parquet ... --out DIR      the published data set, filtered and split
    python jobs/prepare_swe_smith.py sdist --from-sdist inflection==0.5.1 --out DIR        made from packages with tests

Each writes `train.jsonl`, `validation.jsonl`, `test.jsonl` (those that are not empty) and `report.json` with what was
left out and why, and the SHA-256 of each split. No repository, and no package, is in two splits.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_ray.config import ConfigError, SandboxConfig
from lightning_ray.run_directory import write_whole
from lightning_ray.sandbox import backend
from lightning_ray.sandbox.base import Sandbox, SandboxSpec, SandboxUnavailable
from lightning_ray.tasks import files, from_sdist, swe_smith


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except ConfigError as error:
        print(f"prepare_swe_smith: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    published = commands.add_parser("files", help="filter and split files of the published data set")
    published.add_argument("files", nargs="+", type=Path, help="JSONL or Parquet")
    published.add_argument("--max-tests", type=int, default=200, help="more tests than this drop an instance")
    published.add_argument("--exclude-repo", action="append", default=[], metavar="OWNER/NAME")
    published.add_argument("--snapshots", type=Path, metavar="FILE", help="branches that exist, one a line "
                           "(`git ls-remote --heads`); an instance without one is dropped")
    published.set_defaults(run=_files)
    _sizes(published, validation=400)

    made = commands.add_parser("sdist", help="make tasks from source packages that ship their tests")
    made.add_argument("--from-sdist", action="append", required=True, metavar="NAME==VERSION", dest="packages",
                      help="several times; packages without dependencies")
    made.add_argument("--mutations", type=int, default=40, help="bugs that are tried in each package")
    made.add_argument("--at-once", type=int, default=2, help="sandboxes at once")
    made.add_argument("--suite-timeout", type=float, default=60, metavar="SECONDS")
    made.add_argument("--cache", type=Path, default=Path("runs/sdists"), metavar="DIR", help="downloaded packages")
    made.set_defaults(run=_sdists)
    _sizes(made, validation=0)
    return parser


def _sizes(parser: argparse.ArgumentParser, validation: int) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--validation", type=int, default=validation, help="instances (default: %(default)s)")
    parser.add_argument("--test", type=int, default=0, help="instances")
    parser.add_argument("--seed", type=int, default=0)


def _files(options: argparse.Namespace) -> None:
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


def _sdists(options: argparse.Namespace) -> None:
    try:
        make = backend.choose(SandboxConfig()).make
    except SandboxUnavailable as error:
        raise ConfigError(f"packages' tests are run in sandboxes only. {error}") from None
    packages = [from_sdist.unpack(from_sdist.download(name, options.cache), name) for name in options.packages]
    rows, read, dropped = asyncio.run(_made(packages, make, options))
    if not rows:
        raise ConfigError(f"--from-sdist: none of {read} bugs became a task ({dropped}). Take other packages, or more "
                          "--mutations")
    write_splits(rows, options, {"packages": options.packages, "read": read, "dropped": dropped})


async def _made(packages: Sequence[from_sdist.Package], make: Callable[[SandboxSpec], Sandbox],
                options: argparse.Namespace) -> tuple[list[dict[str, Any]], int, dict[str, int]]:
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="sdists-") as directory:
        maker = from_sdist.Maker(make, Path(directory), timeout_s=options.suite_timeout, at_once=options.at_once)
        for package in packages:
            made, outcomes = await maker.tasks(package, options.mutations, options.seed)
            rows += made
            counts += outcomes
    read = counts.total()
    del counts["valid"]
    return rows, read, dict(counts)


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
