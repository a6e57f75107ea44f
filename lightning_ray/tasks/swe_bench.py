"""SWE-bench's instances (Verified, Lite, full, or any file in their schema) as tasks, and predictions in its format.
Pure but for reading files.

The schema is that of `swebench` 5: the columns of SWE-bench and, for each instance, its container `image`, the
`eval_script` that brings and runs its tests, and the `log_parser` and `eval_type` that read what it prints.

    instances = load("verified.parquet")
    tasks = [task_of(instance, Path("checkouts") / instance["instance_id"]) for instance in instances]

Unlike a SWE-smith instance's, the `patch` of one is the solution.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ray.config import ConfigError
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.files import jsonl_rows, parquet_rows, shown, test_list

Instance = dict[str, Any]

TEXTS = ("instance_id", "repo", "problem_statement", "image", "eval_script", "log_parser", "eval_type")
LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
OLD = ("The columns image, eval_script, log_parser and eval_type came with swebench 5: take the data set's present "
       "version")


def load(path: Path, only: Sequence[str] = ()) -> list[Instance]:
    """The instances of a .json, .jsonl or .parquet file, in its order, or those whose ids are in `only`. Test lists are
    lists afterwards. Raises `ConfigError` with the place, the field and the remedy."""
    found: dict[str, Instance] = {}
    for place, row in _rows(path):
        instance = _checked(row, f"{path}, {place}")
        if instance["instance_id"] in found:
            raise ConfigError(f"{path}, {place}: field instance_id: {instance['instance_id']!r} came earlier. Remove "
                              "one of the two")
        found[instance["instance_id"]] = instance
    if unknown := [name for name in only if name not in found]:
        raise ConfigError(f"{path} has no instance {unknown[0]!r}. Give ids that are in the file")
    if not found:
        raise ConfigError(f"{path} holds no instance. Give a file in SWE-bench's schema")
    return [instance for name, instance in found.items() if not only or name in only]


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row) of a list, of an object by id, or of a file with one row a line."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}. Give a .json, .jsonl or .parquet file in SWE-bench's format")
    if path.suffix == ".parquet":
        return parquet_rows(path)
    if path.suffix == ".jsonl":
        return jsonl_rows(path)
    try:
        rows = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}. Write the file again") from None
    rows = list(rows.values()) if isinstance(rows, dict) else rows
    if not isinstance(rows, list):
        raise ConfigError(f"{path} holds {shown(rows)}. Give a list, or one object a line in a .jsonl file")
    return ((f"number {number}", row) for number, row in enumerate(rows, start=1))


def _checked(row: Any, place: str) -> Instance:
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: {shown(row)} is no instance. Each must be an object in SWE-bench's schema")
    for name in TEXTS:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise ConfigError(f"{place}: field {name}: {shown(row.get(name))} is no text. {OLD}")
    lists = {name: test_list(row.get(name), name, place) for name in LISTS}
    return {**row, **lists, "version": str(row.get("version") or "")}


def task_of(instance: Mapping[str, Any], checkout: Path | None) -> Task:
    """The task whose workspace is a copy of `checkout`: the repository as it is in the instance's image (None: taken
    out of it by the container or kubernetes sandbox). Graded as SWE-bench grades: the whole patch, the instance's
    script and swebench's reports."""
    return Task(
        instance_id=instance["instance_id"], repo=instance["repo"], problem_statement=instance["problem_statement"],
        FAIL_TO_PASS=instance["FAIL_TO_PASS"], PASS_TO_PASS=instance["PASS_TO_PASS"], image_name=instance["image"],
        directory=str(checkout or ""), grader="swe",
        grading={name: instance[name] for name in ("eval_script", "log_parser", "eval_type", "version")}
        | {"whole_patch": True})


def prediction(model: str, instance_id: str, patch: str) -> dict[str, str]:
    """One prediction in SWE-bench's format. Bytes that are no UTF-8 (surrogate escapes) are replaced."""
    return {"instance_id": instance_id, "model_name_or_path": model,
            "model_patch": patch.encode("utf-8", "replace").decode()}


def load_predictions(path: Path) -> dict[str, dict[str, str]]:
    """Predictions by instance id. Raises `ConfigError` with the place and the remedy."""
    found: dict[str, dict[str, str]] = {}
    for place, row in _rows(path):
        if not isinstance(row, dict) or not isinstance(row.get("instance_id"), str):
            raise ConfigError(f"{path}, {place}: {shown(row)} has no instance_id. Each prediction must have "
                              "instance_id, model_name_or_path and model_patch")
        if row["instance_id"] in found:
            raise ConfigError(f"{path}, {place}: a second prediction for {row['instance_id']!r}. Give further samples "
                              "as files of their own")
        found[row["instance_id"]] = prediction(str(row.get("model_name_or_path") or "model"), row["instance_id"],
                                               str(row.get("model_patch") or ""))
    return found
