"""`lightning-ray view`: the rollouts of a run, as conversations, in the terminal.

Reading rollouts is how reward hacks and broken prompts are found; it must cost one command.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lightning_ray.config import ConfigError
from lightning_ray.observe.html import content, heading
from lightning_ray.trajectory.archive import read_rollouts
from lightning_ray.trajectory.branches import branches
from lightning_ray.trajectory.call import Trajectory


def view(path: Path, *, step: int | None = None, rollout_id: str | None = None, console: Console | None = None) -> int:
    """Lists the rollouts of a step, or shows one. Raises `ConfigError` where there is no such thing."""
    console = console or Console(highlight=False)
    if rollout_id is None:
        file = _file_of_step(path, step)
        found = read_rollouts(file)
        console.print(rollout_table(found, title=file.name))
        for trajectory in found[:1]:
            console.print(f"one of them, whole: lightning-ray view {path} --rollout {trajectory.rollout_id}",
                          markup=False, soft_wrap=True)
        return 0
    for file in _files(path):
        for trajectory in read_rollouts(file):
            if trajectory.rollout_id == rollout_id:
                show_rollout(trajectory, console)
                return 0
    raise ConfigError(f"--rollout: {rollout_id!r} is not in {path}. List them with: lightning-ray view {path}")


def rollout_table(trajectories: Sequence[Trajectory], title: str = "") -> Table:
    """One line a rollout. On a narrow terminal task and reason are cut; the rollout's name stays whole, since
    `--rollout` asks for it."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("rollout", "end", "reward", "calls", "branches", "tokens"):
        table.add_column(name, justify="left" if name in ("rollout", "end") else "right", no_wrap=True)
    for name in ("task", "reason"):
        table.add_column(name)
    for trajectory in trajectories:
        cut = [Text(" ".join(text.split())[:60], no_wrap=True, overflow="ellipsis")
               for text in (trajectory.task_id, trajectory.reason)]
        table.add_row(
            escape(trajectory.rollout_id), trajectory.end, f"{trajectory.reward:.2f}", str(len(trajectory.calls)),
            str(len(branches(trajectory.calls))), str(trajectory.tokens_sampled), *cut)
    return table


def show_rollout(trajectory: Trajectory, console: Console) -> None:
    """One rollout as a conversation: what each call added to the prompt, what was sampled, and what is trained."""
    console.rule(escape(f"{trajectory.rollout_id}: task {trajectory.task_id}"))
    for call in trajectory.calls:
        console.print(f"\n{heading(call)}", style="dim")
        for message in json.loads(call.messages or "[]"):
            console.print(f"[bold]{escape(str(message.get('role', '?')))}[/]: {escape(content(message))}")
        console.print(f"[bold green]sampled[/]: {escape(call.text)}", style="red" if call.masked else "green")
    console.rule("the end")
    console.print(f"{trajectory.end}: {escape(trajectory.reason)}; reward {trajectory.reward:.2f}; "
                  f"suspicions: {', '.join(trajectory.suspicions) or 'none'}")
    console.print(escape(trajectory.patch) or "(empty patch)")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted((path / "rollouts").glob("*.parquet"))
    if not found:
        raise ConfigError(f"view: {path} holds no rollouts. Give a run directory, or a Parquet file of rollouts")
    return found


def _file_of_step(path: Path, step: int | None) -> Path:
    files = _files(path)
    if step is None:
        trained = [file for file in files if file.name.startswith("step_")]
        return (trained or files)[-1]
    wanted = [file for file in files if file.stem.rpartition("_")[2].lstrip("0") == str(step).lstrip("0")]
    if not wanted:
        raise ConfigError(f"--step: {step} is not recorded in {path}. The last one is {files[-1].stem}")
    return wanted[-1]
