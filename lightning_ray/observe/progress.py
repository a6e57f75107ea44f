"""What a person sees while a run goes on.

`Progress` is silent, for scripts and notebooks; `LiveProgress` draws one live display on a terminal; `LineProgress`
prints a line for each thing that happened, for logs.
"""

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from lightning_ray.run_directory import RunDirectory
from lightning_ray.statistics import rate_text


class Progress:
    """Hears of everything, shows nothing."""

    def phase(self, name: str) -> None:
        """What the run does now."""

    def warm_up(self, done: int, total: int, loss: float) -> None:
        """Supervised steps of the warm-up."""

    def rollouts(self, done: int, total: int) -> None:
        """Rollouts of the phase that ended."""

    def step(self, metrics: dict[str, Any]) -> None:
        """A policy update was made."""

    def heldout(self, when: str, result: dict[str, Any]) -> None:
        """A held-out evaluation was made."""

    def note(self, text: str) -> None:
        """Something that a person should know."""

    def summary(self, run: RunDirectory, summary: dict[str, Any]) -> None:
        """The run is done."""

    def close(self) -> None:
        """Nothing comes any more."""


def step_text(metrics: dict[str, Any]) -> str:
    gradient = "none" if metrics["grad_norm"] is None else f"{metrics['grad_norm']:.3f}"
    rollouts = f"{metrics['rollouts']} rollouts"
    if metrics["generate_s"]:  # else they are a replay's
        rate = metrics["tokens_sampled"] / metrics["generate_s"]
        rollouts += f" in {metrics['generate_s']:.1f} s, {rate:.0f} tokens/s"
    if metrics["groups_dropped"]:
        rollouts += f", {metrics['groups_dropped']} groups dropped"
    return (f"step {metrics['step']:4d}  pass {metrics['pass_rate']:.2f}  gradient {gradient}  {rollouts}, "
            f"learn {metrics['learn_s']:.1f} s")


class LineProgress(Progress):
    """One line for each event, and one each half minute while something goes on."""

    EVERY_S = 30.0

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._said = time.monotonic()

    def phase(self, name: str) -> None:
        if name not in ("rollouts", "learning"):
            self._say(f"· {name}")

    def warm_up(self, done: int, total: int, loss: float) -> None:
        self._say_now_and_then(f"  {done} of {total} steps of the warm-up, supervised loss {loss:.3f}")

    def rollouts(self, done: int, total: int) -> None:
        self._say_now_and_then(f"  {done} of {total} rollouts")

    def step(self, metrics: dict[str, Any]) -> None:
        self._say(step_text(metrics))

    def heldout(self, when: str, result: dict[str, Any]) -> None:
        self._say(f"held-out pass rate, {when}: {rate_text(result)}")

    def note(self, text: str) -> None:
        self._say(f"! {text}")

    def summary(self, run: RunDirectory, summary: dict[str, Any]) -> None:
        self._say(closing_text(run, summary))

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        self.console.print(text, markup=False)

    def _say_now_and_then(self, text: str) -> None:
        if time.monotonic() - self._said >= self.EVERY_S:
            self._say(text)


class LiveProgress(LineProgress):
    """One live display: phase, step, rollouts, held-out pass rate, tokens/s. Events that last are printed above it."""

    def __init__(self, steps: int, console: Console | None = None):
        super().__init__(console)
        self._phase = "starting"
        self._metrics: dict[str, Any] = {}
        self._rates: list[str] = []
        counts = TextColumn("{task.completed:.0f}/{task.total:.0f}")
        self._bars = Bars(TextColumn("{task.description:>10}"), BarColumn(bar_width=40), counts, TimeElapsedColumn(),
                          console=self.console)
        self._steps = self._bars.add_task("steps", total=steps)
        self._now = self._bars.add_task("rollouts", total=1, start=False)
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)
        self._live.start()

    def phase(self, name: str) -> None:
        self._phase = name
        self._bars.reset(self._now, total=1, completed=0)

    def warm_up(self, done: int, total: int, loss: float) -> None:
        self._phase = f"warming up the policy (supervised loss {loss:.3f})"
        self._bars.update(self._now, description="warm-up", completed=done, total=total)

    def rollouts(self, done: int, total: int) -> None:
        self._bars.update(self._now, description="rollouts", completed=done, total=total)

    def step(self, metrics: dict[str, Any]) -> None:
        self._metrics = metrics
        self._bars.update(self._steps, completed=metrics["step"])

    def heldout(self, when: str, result: dict[str, Any]) -> None:
        self._rates.append(f"{when}: {result['rate']:.2f}")
        super().heldout(when, result)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        table.add_row("phase", self._phase)
        if self._metrics:
            table.add_row("last step", step_text(self._metrics))
        if self._rates:
            table.add_row("held-out", ", ".join(self._rates[-4:]))
        return Group(table, self._bars)


def closing_text(run: RunDirectory, summary: dict[str, Any]) -> str:
    """What the run reached, where it lies, and what to try next."""
    lines = [""]
    for name in ("before", "after"):
        if summary[f"heldout_{name}"]:
            lines.append(f"held-out pass rate {name:>6}: {rate_text(summary[f'heldout_{name}'])}")
    lines += [
        f"{summary['steps']} steps in {summary['wall_s'] / 60:.1f} minutes, "
        f"{summary['tokens_sampled']} tokens sampled, peak memory {summary['peak_memory_gib']:.1f} GiB",
        f"run directory:  {run.root}",
        f"learning curve: {run.root / 'learning_curve.png'}",
        f"next:           lightning-ray view {run.root}      (read its rollouts)",
    ]
    return "\n".join(lines)
