"""Measures a policy on SWE-bench: Verified, Lite, full, or any file in the schema of `swebench` 5.

    python jobs/evaluate_swe_bench.py checkouts verified.parquet --out checkouts       the repositories, from the images
    python jobs/evaluate_swe_bench.py run verified.parquet --config jobs/swe_qwen3_5_9b.yaml --checkouts checkouts
        --grade harness --policy.path CHECKPOINT
    python jobs/evaluate_swe_bench.py grade verified.parquet -p predictions.jsonl --grade harness --out graded

`run` takes the model of the configuration (a checkpoint of ours or a Hugging Face directory), or one behind an
OpenAI-compatible `--url`, and writes what an evaluation writes. `grade` judges predictions that there are already;
several files are several samples. `--grade here` judges in our sandboxes, `--grade harness` by `swebench eval` in
containers (DOCKER_HOST); both by swebench's own parsers and reports. The record is `results.json`.
"""

import argparse
import asyncio
import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ray.cli import run_command
from lightning_ray.config import Config, ConfigError
from lightning_ray.evaluation import remote_model
from lightning_ray.evaluation.measure import Evaluation, predictions_file
from lightning_ray.evaluation.scores import NothingJudged, scores
from lightning_ray.observe.progress import LineProgress
from lightning_ray.observe.records import versions
from lightning_ray.run_directory import write_whole
from lightning_ray.sandbox import backend
from lightning_ray.sandbox.base import WORKSPACE, Limits, SandboxUnavailable
from lightning_ray.tasks import swe_bench
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.swe_bench import Instance
from lightning_ray.tasks.swe_bench_grading import Outcome, as_rollout, counted, judge_by_harness, judge_here, outcome_of
from lightning_ray.tasks.swe_smith import digest
from lightning_ray.tasks.workspaces import Workspaces

Sample = Mapping[str, Mapping[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), arguments, failures=(NothingJudged,))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="rollouts of a model on the instances, then grading")
    run.add_argument("--config", type=Path, required=True, metavar="FILE", help="any of its settings can be given as "
                     "--part.field VALUE; --evaluation.samples K is for pass@k")
    remote_model.add_options(run)
    run.set_defaults(run=_run)

    grade = commands.add_parser("grade", help="grading of predictions")
    grade.add_argument("-p", "--predictions", type=Path, action="append", required=True, metavar="FILE",
                       help="SWE-bench's format, .json or .jsonl; repeatable: further samples of the same instances")
    grade.add_argument("--config", type=Path, metavar="FILE", help="whose sandbox is used (default: the defaults)")
    grade.add_argument("--out", type=Path, required=True, metavar="DIR")
    grade.add_argument("--run-id", default="lightning-ray", help="of swebench's harness: names its logs")
    grade.set_defaults(run=_grade)

    checkouts = commands.add_parser("checkouts", help="copy each instance's repository out of its image")
    checkouts.add_argument("--out", type=Path, required=True, metavar="DIR")
    checkouts.set_defaults(run=_checkouts, settings=False)

    for command in (run, grade, checkouts):
        command.add_argument("data", type=Path, help=".parquet, .jsonl or .json")
        command.add_argument("-i", "--instance", action="append", default=[], metavar="ID", help="only these")
    for command in (run, grade):
        command.add_argument("--grade", choices=("here", "harness"), default="here", help="who judges (%(default)s)")
        command.add_argument("--checkouts", type=Path, metavar="DIR", help="one directory for each instance id, with "
                             "the repository at its base commit (containers: those of the images)")
        command.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="of one instance's tests")
        command.add_argument("--at-once", type=int, default=2, metavar="N", help="instances judged at once")
    return parser


def _run(options: argparse.Namespace, overrides: list[str]) -> None:
    instances = swe_bench.load(options.data, options.instance)
    remote = remote_model.given(options)
    with tempfile.TemporaryDirectory(prefix="swe-bench-") as directory:
        source = Path(directory) / f"{options.data.stem}.jsonl"
        config = Config.load(options.config, overrides, {
            "tasks": {"source": str(source), "heldout_source": None, "train": len(instances)},
            "reward": {"timeout_s": options.timeout}})
        tasks = _tasks(options, instances, config)
        source.write_text("".join(task.model_dump_json() + "\n" for task in tasks))
        evaluation = Evaluation(config, split="train", progress=LineProgress(), remote=remote)
        results = evaluation.measure()
    root = evaluation.run.root
    results |= {"data": _data(options, instances), "grading": _grading(options)}
    samples = range(config.evaluation.samples)
    if options.grade == "here":
        results |= counted([{name: outcome_of(members[number]) for name, members in results["instances"].items()}
                            for number in samples], len(instances))
    else:
        done = results["rollouts"] = results["instances"]
        predictions = [swe_bench.load_predictions(root / predictions_file(number)) for number in samples]
        results |= _judged(options, instances, [
            {name: each for name, each in sample.items() if done[name][number]["end"] != "infra_failed"}
            for number, sample in enumerate(predictions)], root, config.run.name, config)
    _write(results, root)


def _grade(options: argparse.Namespace, overrides: list[str]) -> None:
    instances = swe_bench.load(options.data, options.instance)
    config = Config.load(options.config, overrides)
    samples = [swe_bench.load_predictions(path) for path in options.predictions]
    names = {each["model_name_or_path"] for sample in samples for each in sample.values()}
    if len(names) != 1:
        raise ConfigError(f"--predictions: they are of {len(names)} models ({', '.join(sorted(names)[:3])}). Grade one "
                          "model at a time")
    known = {instance["instance_id"] for instance in instances}
    if not any(known & sample.keys() for sample in samples):
        raise ConfigError(f"--predictions: none is for an instance of {options.data}. Give predictions of this data")
    options.out.mkdir(parents=True, exist_ok=True)
    _write({
        **_judged(options, instances, samples, options.out, options.run_id, config),
        "model": {"name": names.pop()}, "data": _data(options, instances), "seed": config.run.seed,
        "predictions": [hashlib.sha256(path.read_bytes()).hexdigest() for path in options.predictions],
        "versions": versions(),
    }, options.out)


def _judged(options: argparse.Namespace, instances: Sequence[Instance], samples: Sequence[Sample], out: Path,
            run_id: str, config: Config) -> dict[str, Any]:
    """Scores and verdicts of the predictions."""
    known = [instance["instance_id"] for instance in instances]
    judge = _by_harness if options.grade == "harness" else _here
    outcomes = [judge(options, instances, {name: sample[name] for name in known if name in sample}, out,
                      f"{run_id}-{number}", config) for number, sample in enumerate(samples)]
    rollouts = {name: [as_rollout(name, found[name], number, sample[name]["model_patch"])
                       for number, (found, sample) in enumerate(zip(outcomes, samples, strict=True)) if name in found]
                for name in known}
    rollouts = {name: members for name, members in rollouts.items() if members}
    return {
        **scores({each["instance_id"]: each["repo"] for each in instances}, rollouts, seed=config.run.seed),
        **counted(outcomes, len(instances)), "grading": _grading(options),
    }


def _grading(options: argparse.Namespace) -> dict[str, Any]:
    return {"by": options.grade, "timeout_s": options.timeout,
            "daemon": os.environ.get("DOCKER_HOST", "default") if options.grade == "harness" else None}


def _by_harness(options: argparse.Namespace, instances: Sequence[Instance], sample: Sample, out: Path, run_id: str,
                config: Config) -> dict[str, Outcome]:
    predictions, data = out / f"{run_id}.predictions.jsonl", out / "instances.json"
    write_whole(predictions, "".join(json.dumps(each) + "\n" for each in sample.values()))
    write_whole(data, json.dumps(instances))
    return judge_by_harness(data, predictions, list(sample), out=out, run_id=run_id, timeout_s=options.timeout,
                            workers=options.at_once)


def _here(options: argparse.Namespace, instances: Sequence[Instance], sample: Sample, out: Path, run_id: str,
          config: Config) -> dict[str, Outcome]:
    tasks = _tasks(options, instances, config)
    try:
        chosen = backend.choose(config.sandbox)
    except SandboxUnavailable as error:
        raise ConfigError(f"--grade here: {error}") from None
    try:
        with tempfile.TemporaryDirectory(prefix="swe-bench-") as directory:
            return asyncio.run(judge_here(
                tasks, sample, make=chosen.make, workspaces=Workspaces(Path(directory), chosen.checkout),
                limits=Limits.of(config.sandbox), timeout_s=options.timeout, at_once=options.at_once))
    finally:
        chosen.close()


def _tasks(options: argparse.Namespace, instances: Sequence[Instance], config: Config) -> list[Task]:
    if options.checkouts is None and config.sandbox.backend != "bubblewrap":
        return [swe_bench.task_of(instance, None) for instance in instances]
    if options.checkouts is None:
        raise ConfigError("--checkouts: bubblewrap needs the repositories. Give a directory with one for each instance "
                          "id, as the command `checkouts` makes it, or --sandbox.backend container")
    places = {instance["instance_id"]: options.checkouts / instance["instance_id"] for instance in instances}
    if missing := [name for name, place in places.items() if not place.is_dir()]:
        raise ConfigError(f"--checkouts: {options.checkouts} lacks {len(missing)} of {len(places)} instances, the "
                          f"first is {missing[0]!r}. Make them with the command `checkouts`")
    return [swe_bench.task_of(instance, places[instance["instance_id"]].absolute()) for instance in instances]


def _checkouts(options: argparse.Namespace, overrides: list[str]) -> None:
    import docker

    client = docker.from_env()
    for instance in swe_bench.load(options.data, options.instance):
        place = options.out / instance["instance_id"]
        if place.is_dir():
            continue
        container = client.containers.create(instance["image"])
        try:
            parts, _ = container.get_archive(WORKSPACE)
            with tempfile.TemporaryDirectory(dir=_made(options.out)) as aside, tarfile.open(
                    fileobj=io.BytesIO(b"".join(parts))) as archive:
                archive.extractall(aside, filter="tar")
                (Path(aside) / Path(WORKSPACE).name).rename(place)
        finally:
            container.remove(force=True)
        print(place)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _data(options: argparse.Namespace, instances: Sequence[Instance]) -> dict[str, Any]:
    return {"source": options.data.name, "instances": len(instances), "sha256": digest(instances)}


def _write(results: dict[str, Any], root: Path) -> None:
    write_whole(root / "results.json", json.dumps(results, indent=1))
    for name, value in results.items():
        if name.startswith("pass@"):
            rate, (low, high) = value.get("rate", value.get("mean")), value["ci95"]
            print(f"{name} {rate:.1%} [{low:.1%}, {high:.1%}]")
    print(", ".join(f"{count} {kind}" for kind, count in results["verdicts"].items() if count))
    print(f"record: {root / 'results.json'}")


if __name__ == "__main__":
    sys.exit(main())
