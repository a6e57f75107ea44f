"""Checkpoints of a run: the policy and its optimizer (written by the learner), the state of the loop, and complete
groups that wait for a later step. Between checkpoints the state of the loop alone is noted after each step: with the
recorded rollouts of the steps since, the policy is learned again up to there.

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
from lightning_ray.run_directory import RunDirectory, write_whole
from lightning_ray.trajectory.archive import group_trajectories, read_rollouts, write_rollouts

CARRIED = "carried_{:06d}.parquet"
NOTE = "state.json"


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
    _write_carried(partial, state, carried, max_tokens)
    (partial / NOTE).write_text(state.model_dump_json(indent=1))
    partial.rename(final)
    for old in run.complete_checkpoints()[:-keep]:
        shutil.rmtree(old)
    return final


def note(run: RunDirectory, state: LoopState, *, carried: Sequence[Group] = (), max_tokens: int = 0) -> None:
    """The step is recorded: a resumed run needs not do it again, but learn from its record. Arguments as for `save`."""
    _write_carried(run.root, state, carried, max_tokens)
    write_whole(run.root / NOTE, state.model_dump_json(indent=1))
    for old in set(run.root.glob("carried_*.parquet")) - {run.root / CARRIED.format(state.step)}:
        old.unlink()


def noted(run: RunDirectory, state: LoopState) -> LoopState:
    """The state of the last recorded step: a later one than `state`, or `state` itself."""
    file = run.root / NOTE
    found = _read(file, "go on from the checkpoint") if file.exists() else state
    return found if found.step > state.step else state


def last(run: RunDirectory) -> tuple[Path, LoopState]:
    """The newest complete checkpoint of a run. Raises `ConfigError` where there is none."""
    found = run.complete_checkpoints()
    if not found:
        raise ConfigError(f"--resume: {run.root} has no complete checkpoint. Start the run afresh")
    return found[-1], _read(found[-1] / NOTE, "go on from the checkpoint before")


def _read(file: Path, without: str) -> LoopState:
    try:
        return LoopState(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--resume: {file} cannot be read ({error}). Remove it to {without}") from None


def carried(directory: Path, state: LoopState) -> list[Group]:
    """The complete groups that were saved with a checkpoint or a note (then: the run's directory), the oldest start
    first."""
    file = directory / CARRIED.format(state.step)
    if not file.exists():
        return []
    return [Group.of(members) for members in group_trajectories(read_rollouts(file))]


def _write_carried(directory: Path, state: LoopState, groups: Sequence[Group], max_tokens: int) -> None:
    file = directory / CARRIED.format(state.step)
    file.unlink(missing_ok=True)  # of a process that was killed before it noted this step
    if groups:
        members = [member for group in groups for member in group.trajectories]
        write_rollouts(file, members, max_tokens=max_tokens)
