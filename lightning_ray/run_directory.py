"""Where a run lies: one directory with everything that it leaves behind.

    config.yaml       the resolved configuration
    metrics.jsonl     one object a step
    rollouts/         step_000012.parquet, heldout_000012.parquet: every call of every rollout
    checkpoints/      step_000020/: state.json and policy/, which has the learner's state and is a model directory in
                      Hugging Face format as well (`--policy.path`); a directory that exists is complete
    state.json        the loop after the last recorded step
    carried_000012.parquet     complete groups that waited then
    tensorboard/      the same metrics as event files
    learning_curve.png, summary.json     at the end

Files appear whole or not at all: what `--resume` trusts was renamed into place when it was complete.
"""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ray.config import Config, ConfigError

STEP_NAME = "step_{:06d}"
OURS = re.compile(r"(step|heldout)_(?P<step>\d{6,})(\.parquet)?(?P<partial>\.partial)?")
"""Names below `rollouts/` and `checkpoints/`."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    root: Path

    @classmethod
    def create(cls, config: Config) -> "RunDirectory":
        """A new directory `run.dir/run.name`, with `-2`, `-3`, ... where runs of that name exist."""
        base = config.run.dir.expanduser()
        try:
            base.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                root = base / (config.run.name if number == 1 else f"{config.run.name}-{number}")
                try:
                    root.mkdir()
                    break
                except FileExistsError:
                    number += 1
            run = cls(root.absolute())
            for part in (run.rollouts, run.checkpoints):
                part.mkdir()
            write_whole(run.root / "config.yaml", config.to_yaml())
        except OSError as error:
            raise ConfigError(
                f"run.dir: {base} cannot be written ({error.strerror}). Free space there or give another "
                "directory with --run.dir DIR") from None
        return run

    @classmethod
    def existing(cls, root: Path) -> "RunDirectory":
        """The directory of an earlier run. Raises `ConfigError` where there is none."""
        if not (root / "config.yaml").is_file():
            raise ConfigError(f"{root} is no run directory (it has no config.yaml). Give the path of a run")
        return cls(root.absolute())

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / STEP_NAME.format(step)

    def complete_checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(path for path in self.checkpoints.glob("step_*")
                      if OURS.fullmatch(path.name) and (path / "state.json").is_file())

    def metrics(self) -> list[dict[str, Any]]:
        if not self.metrics_file.exists():
            return []
        return [json.loads(line) for line in self.metrics_file.read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any] | None:
        """What the run reached; None where it is not done."""
        file = self.root / "summary.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def _repr_html_(self) -> str:
        from lightning_ray.observe.html import run_html

        return run_html(self.root.name, self.metrics(), self.summary)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """One line, on disk before this returns."""
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget_after(self, step: int) -> None:
        """Removes what was recorded after the checkpoint of `step`: those steps are done again. What a person laid
        beside our files stays."""
        kept = []
        for line in self.metrics_file.read_text().splitlines() if self.metrics_file.exists() else []:
            try:
                metrics = json.loads(line)
            except json.JSONDecodeError:
                break
            if metrics["step"] <= step:
                kept.append(line + "\n")
        write_whole(self.metrics_file, "".join(kept))
        for path in [*self.rollouts.iterdir(), *self.checkpoints.iterdir()]:
            ours = OURS.fullmatch(path.name)
            if ours and (ours["partial"] or int(ours["step"]) > step):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove_if_empty(self) -> None:
        """Of a run that ended before anything was recorded nothing stays, not even its name."""
        with suppress(OSError):  # else it was removed already, or stays
            files = {path.relative_to(self.root).parts[0] for path in self.root.rglob("*") if not path.is_dir()}
            if files <= {"config.yaml", "journal", "tensorboard"}:
                shutil.rmtree(self.root)


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it has either its old or its new content, whatever happens."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
