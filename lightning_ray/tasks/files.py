"""Tasks from a file in SWE-smith's schema: JSONL (one instance a line) or Parquet (one instance a row).

A malformed line is bad input: `ConfigError` names the file, the line, the field, the value and the remedy, and no
task of that file is used. Test lists may be lists or their JSON text, as both are published.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from pydantic import ValidationError

from lightning_ray.config import ConfigError
from lightning_ray.tasks.base import Task

SHOWN = 80
"""Characters of a bad value that a message shows."""


def load(path: Path | str) -> list[Task]:
    """All tasks of the file, in its order. Instance ids must be unique."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no task file {str(path)!r}. Give a JSONL or Parquet file in SWE-smith's schema.")
    rows = parquet_rows(path) if path.suffix == ".parquet" else jsonl_rows(path)
    tasks, places = [], {}
    for place, row in rows:
        task = parse(row, f"{path}, {place}")
        if task.instance_id in places:
            raise ConfigError(
                f"{path}, {place}: field instance_id: {task.instance_id!r} is already used in "
                f"{places[task.instance_id]}. Make ids unique or remove one."
            )
        places[task.instance_id] = place
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path} holds no task. Give a file with at least one instance.")
    return tasks


def jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(`line N`, the parsed line); blank lines are skipped."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"line {number}"
            try:
                line = raw.decode()
                if line.strip():
                    yield place, json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{path}, {place}: {error} in {shown(raw.decode(errors='replace').strip())}. "
                    "Each line must be one JSON object in UTF-8."
                ) from None


def parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(`row N`, the row)."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}. Write the file again.") from None


def parse(row: Any, place: str) -> Task:
    """One instance. Fields that are null count as absent; fields beyond the schema are kept."""
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: {shown(row)} is no instance. Each must be an object with the fields of SWE-smith.")
    values = {name: value for name, value in row.items() if value is not None}
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        if name in values:
            values[name] = test_list(values[name], name, place)
    try:
        return Task.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        value = "no value" if first["type"] == "missing" else shown(first["input"])
        raise ConfigError(
            f"{place}: field {field}: {value}: {first['msg']}. Correct it or drop the instance."
        ) from None


def test_list(value: Any, name: str, place: str) -> list[str]:
    """A list of test ids, given as a list or as its JSON text."""
    names = value
    if isinstance(value, str):
        try:
            names = json.loads(value)
        except ValueError:
            names = None
    if not isinstance(names, list):
        raise ConfigError(f"{place}: field {name}: {shown(value)} is no list of test ids. Give a list or its JSON text")
    return names


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
