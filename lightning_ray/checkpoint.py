"""Checkpoints of a run: the policy and its optimizer (written by the learner), the state of the loop, and complete
groups that wait for a later step.

A checkpoint is written beside its final name and renamed when it is complete, so that one that exists can be trusted.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from lightning_ray.buffer import Group
from lightning_ray.config import ConfigError
from lightning_ray.run_directory import RunDirectory
from lightning_ray.trajectory.archive import group_trajectories, read_rollouts, write_rollouts

CARRIED = "carried.parquet"


class LoopState(BaseModel):
    """What the loop must know to go on, apart from the policy."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")

    step: int = 0
    """Steps done."""
    policy_version: int = 0
    cursor: int = 0
    """Training tasks handed out so far."""
    groups_started: int = 0
    requeued: list[str] = []
    """Tasks whose group was dropped and that are to be run again, by instance id."""
    set_aside: list[str] = []
    """Tasks that are not run any more, since their rollouts always took longer than `schedule.max_staleness`."""
    stale_in_a_row: dict[str, int] = {}
    """By task: how often in a row its rollouts took so long."""
    wall_s: float = 0.0
    tokens_sampled: int = 0
    heldout_before: dict[str, Any] | None = None


def save(run: RunDirectory, state: LoopState, save_policy: Callable[[Path], None], *, keep: int,
         carried: Sequence[Group] = (), max_tokens: int = 0) -> Path:
    """Writes the checkpoint of `state.step`, then removes all but the last `keep`. `carried`: complete groups that no
    step has taken yet; `max_tokens` as for `write_rollouts`. A checkpoint of this step that is there stays as it is."""
    final = run.checkpoint(state.step)
    if final in run.complete_checkpoints():
        return final
    partial = final.with_suffix(".partial")
    for leftover in (partial, final):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    save_policy(partial)
    if carried:
        members = [member for group in carried for member in group.trajectories]
        write_rollouts(partial / CARRIED, members, max_tokens=max_tokens)
    (partial / "state.json").write_text(state.model_dump_json(indent=1))
    partial.rename(final)
    for old in run.complete_checkpoints()[:-keep]:
        shutil.rmtree(old)
    return final


def last(run: RunDirectory) -> tuple[Path, LoopState]:
    """The newest complete checkpoint of a run. Raises `ConfigError` where there is none."""
    found = run.complete_checkpoints()
    if not found:
        raise ConfigError(f"--resume: {run.root} has no complete checkpoint. Start the run afresh")
    return found[-1], LoopState(**json.loads((found[-1] / "state.json").read_text()))


def carried(checkpoint: Path) -> list[Group]:
    """The complete groups that were saved with a checkpoint, the oldest start first."""
    if not (checkpoint / CARRIED).exists():
        return []
    return [Group.of(members) for members in group_trajectories(read_rollouts(checkpoint / CARRIED))]
