"""Rollouts on disk: one Parquet file a step, one row a call, everything that a reader or a replay needs.

Columns of the rollout are repeated on each of its rows; a rollout without calls has one row with `call` null. What
is written can be read back as the same trajectories, bit for bit.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_ray.config.reading import ConfigError
from lightning_ray.trajectory.call import Call, Trajectory
from lightning_ray.trajectory.samples import call_mask
from lightning_ray.trajectory.selection import ALL, select

CALL = pa.schema([
    ("call", pa.int32()), ("dialect", pa.string()), ("relation", pa.string()), ("parent", pa.int32()),
    ("prompt_ids", pa.list_(pa.int32())), ("sampled_ids", pa.list_(pa.int32())),
    ("logprobs", pa.list_(pa.float32())), ("versions", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_())),
    ("finish_reason", pa.string()), ("masked", pa.string()), ("system", pa.string()), ("messages", pa.string()),
    ("text", pa.string()), ("overridden", pa.string()), ("started_s", pa.float64()), ("finished_s", pa.float64()),
])
ROLLOUT = pa.schema([
    ("rollout_id", pa.string()), ("group_id", pa.string()), ("task_id", pa.string()), ("end", pa.string()),
    ("reason", pa.string()), ("reward", pa.float64()), ("passed", pa.bool_()), ("dropped", pa.string()),
    ("patch", pa.string()), ("suspicions", pa.list_(pa.string())), ("discarded_tokens", pa.int64()),
    ("timings", pa.string()), ("notes", pa.string()),
])
SCHEMA = pa.schema([*ROLLOUT, *CALL])
SILENT = "zero_variance"
"""Why a rollout that is part of a step trains nothing; every other reason drops it before."""


def write_rollouts(
    path: Path, trajectories: Sequence[Trajectory], *, max_tokens: int, dropped: Mapping[str, str] | None = None,
    train: str = ALL,
) -> None:
    """Writes one file, whole or not at all. `dropped`: rollout id -> why the whole rollout trains nothing. `train`:
    which branches are trained (`selection.py`); it shows in `loss_mask` alone, so that a replay can select others."""
    dropped = dropped or {}
    rows = [row for trajectory in trajectories
            for row in _rows(trajectory, max_tokens, dropped.get(trajectory.rollout_id), train)]
    partial = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), partial, compression="zstd")
    partial.replace(path)


def check_rollouts(path: Path) -> None:
    """Raises `ConfigError` where `path` is no whole file of rollouts. Reads its last bytes only."""
    try:
        missing = [name for name in SCHEMA.names if name not in pq.read_schema(path).names]
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as rollouts ({error}). Give a file that a run wrote") from None
    if missing:
        raise ConfigError(f"{path} holds no rollouts: it has no column {missing[0]!r}. Give a file that a run wrote")


def read_rollouts(path: Path) -> list[Trajectory]:
    """The trajectories of one file, in the order in which they were written. Raises `ConfigError`."""
    check_rollouts(path)
    found: dict[str, Trajectory] = {}
    for row in pq.read_table(path, schema=SCHEMA).to_pylist():
        trajectory = found.get(row["rollout_id"])
        if trajectory is None:
            fields = {name: row[name] for name in ROLLOUT.names if name not in ("dropped", "timings", "notes")}
            trajectory = found[row["rollout_id"]] = Trajectory(
                calls=[], timings=json.loads(row["timings"]), notes=json.loads(row["notes"]), **fields)
        if row["call"] is not None:
            trajectory.calls.append(_call(row))
    return list(found.values())


def trained_rollouts(path: Path) -> list[Trajectory]:
    """Those of a step's file that went into the step's update: all but groups that were dropped whole. Groups whose
    rewards are equal count in the step and are there, unless they were replaced by others."""
    found = pq.read_table(path, columns=["rollout_id", "dropped"]).to_pydict()
    dropped = dict(zip(found["rollout_id"], found["dropped"], strict=True))
    return [trajectory for trajectory in read_rollouts(path) if dropped[trajectory.rollout_id] in (None, SILENT)]


def group_trajectories(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """By group, in the order of their first members."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return list(groups.values())


def _rows(trajectory: Trajectory, max_tokens: int, dropped: str | None, train: str) -> list[dict]:
    shared = {name: getattr(trajectory, name) for name in ROLLOUT.names if hasattr(trajectory, name)}
    shared |= {"dropped": dropped, "timings": json.dumps(trajectory.timings), "notes": json.dumps(trajectory.notes)}
    if not trajectory.calls:
        return [shared]
    return [shared | {
        "call": call.index, "overridden": json.dumps(call.overridden),
        "loss_mask": call_mask(selected, max_tokens) & (dropped is None),
        **{name: getattr(call, name) for name in CALL.names if name not in ("call", "overridden", "loss_mask")},
    } for call, selected in zip(trajectory.calls, select(trajectory.calls, train), strict=True)]


def _call(row: dict) -> Call:
    fields = {name: row[name] for name in CALL.names if name not in ("call", "overridden", "loss_mask")}
    arrays = {"prompt_ids": np.int32, "sampled_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
    fields |= {name: np.asarray(row[name], dtype) for name, dtype in arrays.items()}
    return Call(index=row["call"], overridden=json.loads(row["overridden"]), **fields)
