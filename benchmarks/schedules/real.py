"""The schedules for real: vLLM, DeepSpeed, the proxy, sandboxes and mini-SWE-agent, with commands that take their time.

Each schedule is a run of the trainer with the quickstart's settings but for those named in `config_of`: the same tasks
in the same order, the same tool times, the same number of updates of as many groups. The clock runs from the first
submitted rollout to the end of the last update; the measurement on held-out tasks before and after is not in it.
"""

import json
import os
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.schedules.simulation import GROUP_SIZE, TIMES_IN_FLIGHT
from lightning_ray.buffer import Group
from lightning_ray.config import Config
from lightning_ray.observe.progress import Progress
from lightning_ray.trainer import Trainer
from lightning_ray.trajectory.archive import group_trajectories, read_rollouts

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"engine": "ray::GeneratorWorker", "learner": "ray::LearnerWorker"}
"""How the titles of their actors begin; what an actor started belongs to it."""
WARM_UP_TASKS = 24
"""Held-out tasks before the first step: an engine is slow on its first requests."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run."""

    steps: int = 16
    groups_per_step: int = 2
    heldout: int = 200
    tools: tuple[float, float] = (0.25, 1.164)
    """Seconds of a command: median, and sigma of a log-normal distribution."""
    long_answers: bool = True
    """The talkative policy, or the quickstart's own."""


def config_of(schedule: str, scale: Scale, model: Path, root: Path) -> Config:
    asynchronous = schedule != "synchronous"
    in_flight = scale.groups_per_step * (TIMES_IN_FLIGHT if asynchronous else 1)
    settings = Config.load(ROOT / "jobs/quickstart.yaml").harness.settings
    longest = 1024 if scale.long_answers else 80
    return Config.load(ROOT / "jobs/quickstart.yaml", given={
        "run": {"dir": str(root), "name": schedule, "steps": scale.steps, "checkpoint_every": 1000},
        "policy": {"path": str(model), "warm_start": None, "max_context": 1024 + longest},
        "tasks": {"heldout": scale.heldout},
        "harness": {"entry": "benchmarks.schedules.harness:run", "timeout_s": 600,
                    "settings": {**settings, "tools": scale.tools, "log": str(root / f"{schedule}.log")}},
        "runners": {"rollouts": GROUP_SIZE * scale.groups_per_step * TIMES_IN_FLIGHT},
        "sampling": {"max_tokens": longest},
        "generator": {"max_num_seqs": GROUP_SIZE * scale.groups_per_step * TIMES_IN_FLIGHT},
        "schedule": {"groups_per_step": scale.groups_per_step, "groups_in_flight": in_flight, "max_staleness": 4,
                     "on_update": "drain" if schedule == "drain" else "continue"}})


def cpu_seconds(driver: int | None = None) -> dict[str, float]:
    """Used so far by what the driver (null: this process) has started: engine, learner, all others with sandboxes."""
    seconds, part_of = dict.fromkeys(("rollouts", *PARTS), 0.0), {}
    for process in psutil.Process(driver).children(recursive=True):  # parents first
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline()[:1])
            part = next((name for name, start in PARTS.items() if title.startswith(start)),
                        part_of.get(process.ppid(), "rollouts"))
            part_of[process.pid] = part
            seconds[part] += sum(process.cpu_times()[:4])
    return seconds


class Watch(Progress):
    """When what happened. Times are `time.monotonic`, which all processes of a machine share."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.began: float | None = None
        self.cpu: list[dict[str, float]] = []
        self.learning: list[float] = []
        self.measured = 0.0
        self.ended: list[float] = []
        self.metrics: list[dict] = []
        self.notes: list[str] = []

    def phase(self, name: str) -> None:
        if name == "rollouts" and self.began is None:
            self.began, self.cpu = time.monotonic(), [cpu_seconds()]
        elif name == "learning":
            self.learning.append(time.monotonic())
        elif name == "finishing":
            self.measured = time.monotonic()

    def step(self, metrics: dict) -> None:
        self.ended.append(time.monotonic())
        if metrics["step"] == self.steps:
            self.cpu.append(cpu_seconds())
        self.metrics.append(metrics)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Watched(Trainer):
    """A trainer that also notes when rollouts were submitted and when they came back."""

    def __init__(self, config: Config, watch: Watch) -> None:
        super().__init__(config, progress=watch)
        self.submitted: dict[str, float] = {}
        self.returned: dict[str, float] = {}

    def evaluate(self, when, tasks=None):
        return super().evaluate(when, self._heldout[:WARM_UP_TASKS] if when == "before" else tasks)

    def _spec(self, rollout_id, *arguments):
        self.submitted[rollout_id] = time.monotonic()
        return super()._spec(rollout_id, *arguments)

    def _ended(self):
        ended = super()._ended()
        self.returned |= dict.fromkeys((one.rollout_id for one in ended), time.monotonic())
        return ended


def run(schedule: str, scale: Scale, model: Path, root: Path) -> dict:
    """One schedule. Returns all that was seen of it, as plain data: `calibration.py` reads it."""
    os.environ["PYTHONPATH"] = str(ROOT)  # harness processes import the benchmark's harness
    watch = Watch(scale.steps)
    trainer = Watched(config_of(schedule, scale, model, root), watch)
    ages, version, tokens = [], 0, 0
    for step in trainer.steps():
        tokens += sum(one.tokens_sampled for one in step.trajectories)
        for group in group_trajectories(step.trajectories):
            if (oldest := Group.of(group).oldest_version) is not None:
                ages.append(version - oldest)
        version = trainer.policy.version
    began, end = watch.began, watch.ended[-1]
    lines = [json.loads(line) for line in (root / f"{schedule}.log").read_text().splitlines()]
    lines = [{**line, "began": line["began"] - began, "ended": line["ended"] - began} for line in lines
             if line["ended"] < watch.measured and not line["rollout"].startswith("heldout")]
    recorded = [each for path in trainer.run.rollouts.glob("step_*.parquet") for each in read_rollouts(path)]
    return {
        "schedule": schedule, "wall_s": end - began, "tokens": tokens, "lines": lines,
        "metrics": watch.metrics, "notes": watch.notes,
        "updates": [[start - began, start - began + metrics.get("freeze_s", 0.0),
                     start - began + metrics.get("pause_s", 0.0)]
                    for start, metrics in zip(watch.learning, watch.metrics, strict=True)],
        "submitted": {name: at - began for name, at in trainer.submitted.items() if not name.startswith("heldout")},
        "returned": {name: at - began for name, at in trainer.returned.items() if at < end},
        "cores": os.cpu_count(), "cpu": {part: watch.cpu[1][part] - used for part, used in watch.cpu[0].items()},
        "calls": {each.rollout_id: len(each.calls) for each in recorded}, "age": statistics.fmean(ages),
        "timings": {each.rollout_id: each.timings for each in recorded}, "heldout": trainer.summary["heldout_after"]}
