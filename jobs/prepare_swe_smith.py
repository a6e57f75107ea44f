"""Prepares coding tasks in SWE-smith's schema.

    python jobs/prepare_swe_smith.py files DATA.parquet ... --out DIR      the published data set, filtered and split

writes `train.jsonl`, `validation.jsonl`, `test.jsonl` (those that are not empty) and `report.json` with what was left
out and why, and the SHA-256 of each split.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_ray.config import ConfigError
from lightning_ray.run_directory import write_whole
from lightning_ray.tasks import files, swe_smith


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
    _sizes(published)
    return parser


def _sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--validation", type=int, default=400, help="instances (the reference recipe: 400)")
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
