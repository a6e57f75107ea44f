"""Measures how difficult tasks are for a policy, and keeps those that are worth training on.

    python jobs/probe_difficulty.py --config jobs/swe_qwen3_5_9b.yaml --tasks.source data/swe_smith/train.jsonl
        --policy.path CHECKPOINT -k 4 --keep-failing 0.2 --out data/probed

Runs k rollouts of each task of `tasks.source` as an evaluation does, and writes `tasks.jsonl` (the tasks that are kept,
with a curriculum `weight`, for `tasks.source`), `rates.jsonl` and `rates.parquet` (every task's pass rate), and
`report.json`. Each rollout's outcome is on disk as soon as it is known (`outcomes.jsonl`): a second start with the same
settings goes on where the first stopped, one with a larger k adds rollouts, and what failed for reasons of ours is
tried again.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_ray.cli import run_command
from lightning_ray.config import Config, ConfigError
from lightning_ray.evaluation import remote_model
from lightning_ray.evaluation.measure import Evaluation
from lightning_ray.evaluation.scores import NothingJudged
from lightning_ray.observe.progress import LineProgress
from lightning_ray.policy.directory import model_digest
from lightning_ray.preflight import preflight
from lightning_ray.run_directory import write_whole
from lightning_ray.tasks import difficulty
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.source import load_tasks
from lightning_ray.trajectory.call import Trajectory

SAME = ("policy", "harness", "sampling", "reward")
"""Parts of the settings that one directory's outcomes have in common."""
RATES = pyarrow.schema([
    ("instance_id", pyarrow.string()), ("passed", pyarrow.int64()), ("judged", pyarrow.int64()),
    ("pass_rate", pyarrow.float64()), ("verdict", pyarrow.string()), ("kept", pyarrow.bool_()),
    ("weight", pyarrow.float64())])


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), arguments, failures=(NothingJudged,))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, metavar="FILE", help="any of its settings can be given as --part.field "
                        "VALUE; --policy.path DIR names the model")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="one that exists is gone on with")
    parser.add_argument("-k", type=int, default=4, metavar="K", help="rollouts of each task (%(default)s)")
    parser.add_argument("--keep-failing", type=float, default=0.2, metavar="SHARE",
                        help="of the tasks that no rollout solves (%(default)s)")
    remote_model.add_options(parser)
    parser.set_defaults(run=probe)
    return parser


def probe(options: argparse.Namespace, overrides: list[str]) -> None:
    """Raises `ConfigError` before anything starts, `NothingJudged` where no rollout could be run."""
    if options.k < 2:
        raise ConfigError(f"-k: {options.k} cannot tell mixed tasks from others. Give 2 or more")
    if not 0 <= options.keep_failing <= 1:
        raise ConfigError(f"--keep-failing: {options.keep_failing} is no share. Give a number from 0 to 1")
    config = Config.load(options.config, overrides, {
        "run": {"dir": str(options.out / "runs"), "name": "probe"}, "evaluation": {"samples": options.k}})
    remote = remote_model.given(options)
    tasks = load_tasks(config.tasks).train
    preflight(config, policy=remote is None)
    outcomes = Outcomes(options.out, _identity(config, remote))
    measure(Evaluation(config, split="train", progress=LineProgress(), remote=remote), tasks, outcomes)
    found = outcomes.of(tasks)
    selection = difficulty.select(tasks, difficulty.tallied(found), keep_failing=options.keep_failing,
                                  group_size=config.schedule.group_size, seed=config.run.seed)
    if selection.counts["not_judged"] == len(tasks):
        raise NothingJudged(f"no rollout could be run: {found[-1]['reason']}")
    write(options.out, selection, Counter(each["reason"].partition(":")[0] for each in found))


def _identity(config: Config, remote: remote_model.RemoteModel | None) -> dict[str, Any]:
    """What must be the same for outcomes to be counted together."""
    parts = config.model_dump(mode="json", include=set(SAME))
    if remote:
        parts["policy"] = {"url": remote.url, "name": remote.name}
    elif config.policy.path is not None:
        parts["policy"]["sha256"] = model_digest(config.policy.path.expanduser())
    return {**parts, "temperature": config.evaluation.temperature, "seed": config.run.seed}


class Outcomes:
    """The rollouts of a directory so far. `ConfigError` where it holds those of other settings."""

    def __init__(self, root: Path, identity: dict[str, Any]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._file = root / "outcomes.jsonl"
        self._done: dict[str, dict[str, Any]] = {}
        settings = root / "probe.json"
        if settings.is_file():
            before = json.loads(settings.read_text())
            for name in identity:
                if identity[name] != before.get(name):
                    raise ConfigError(f"--out: {root} was measured with another {name} ({settings}). Give the same "
                                      "settings, or another directory")
        else:
            write_whole(settings, json.dumps(identity, indent=1))
        self._read()

    def _read(self) -> None:
        lines = self._file.read_text().split("\n") if self._file.is_file() else []
        whole = [line for line in lines[:-1] if line]
        for line in whole:
            outcome = json.loads(line)
            self._done[outcome["rollout"]] = outcome
        write_whole(self._file, "".join(f"{line}\n" for line in whole))  # without what a killed start tore off

    def known(self, rollout_id: str) -> bool:
        """Whether it ran; one that failed for reasons of ours did not."""
        return self._done.get(rollout_id, {"end": "infra_failed"})["end"] != "infra_failed"

    def add(self, trajectory: Trajectory) -> None:
        outcome = {"rollout": trajectory.rollout_id, "instance_id": trajectory.task_id, "end": trajectory.end,
                   "passed": trajectory.passed, "reason": trajectory.reason}
        self._done[trajectory.rollout_id] = outcome
        with self._file.open("a") as file:
            file.write(json.dumps(outcome) + "\n")

    def of(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """Those of these tasks: the data may have become fewer."""
        names = {task.instance_id for task in tasks}
        return [each for each in self._done.values() if each["instance_id"] in names]


def measure(evaluation: Evaluation, tasks: Sequence[Task], outcomes: Outcomes) -> None:
    """Run what has not been run: round by round over the tasks, so that a start that is stopped has some of each."""
    numbers = range(evaluation.config.evaluation.samples)
    specs = [evaluation.spec(task, number) for number in numbers for task in tasks]
    todo = [spec for spec in specs if not outcomes.known(spec.rollout_id)]
    if not todo:
        return
    columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with evaluation.served() as (fleet, _), Progress(*columns, console=Console(stderr=True, highlight=False)) as bar:
        shown = bar.add_task("rollouts", total=len(specs), completed=len(specs) - len(todo))
        for trajectory in fleet.run(todo):
            outcomes.add(trajectory)
            bar.advance(shown)


def write(root: Path, selection: difficulty.Selection, reasons: Counter[str]) -> None:
    """Writes the tasks, the rates and the report, and says what they hold."""
    write_whole(root / "tasks.jsonl", "".join(task.model_dump_json() + "\n" for task in selection.kept))
    write_whole(root / "rates.jsonl", "".join(json.dumps(rate) + "\n" for rate in selection.rates))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(selection.rates, RATES), root / "rates.parquet")
    report = {"tasks": len(selection.rates), "kept": len(selection.kept), "verdicts": selection.counts,
              "rollouts": reasons.total(), "ended": dict(reasons.most_common())}
    write_whole(root / "report.json", json.dumps(report, indent=1))
    print(f"{report['rollouts']:7d}  rollouts of {report['tasks']} tasks")
    print("\n".join(f"{count:9d}  {reason}" for reason, count in reasons.most_common()))
    print("\n".join(f"{count:7d}  {name}: {difficulty.WHY[name]}" for name, count in selection.counts.items() if count))
    print(f"{len(selection.kept):7d}  in {root / 'tasks.jsonl'}")


if __name__ == "__main__":
    sys.exit(main())
