"""Evaluation: a policy on tasks, through the same proxy, harness, sandbox and grading as in training, without learning.

`Evaluation(config).measure()` runs `evaluation.samples` rollouts of each task and writes a directory: `config.yaml`,
`rollouts/evaluation_000000.parquet`, `predictions.jsonl` (SWE-bench's format: the first rollout of each instance;
`predictions-1.jsonl` the second, and so on), and `results.json`, with what someone else needs to repeat it: hashes of
the model and the tasks, versions, the harness's configuration, sampling, seed, and the outcome of every rollout. What
failed for reasons of ours is counted apart.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from lightning_ray.calls import end
from lightning_ray.config import Config, ConfigError
from lightning_ray.evaluation.bill import bill
from lightning_ray.evaluation.remote_model import RemoteModel, configured, remote_endpoint
from lightning_ray.evaluation.scores import scores
from lightning_ray.fleet import Fleet
from lightning_ray.generator.worker import GeneratorWorker
from lightning_ray.harness.spec import RolloutSpec, rollout_seed
from lightning_ray.observe.progress import Progress
from lightning_ray.observe.records import versions
from lightning_ray.policy.directory import model_digest
from lightning_ray.policy.source import policy_directory
from lightning_ray.preflight import preflight
from lightning_ray.ray_session import RaySession
from lightning_ray.run_directory import RunDirectory, write_whole
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.source import load_tasks
from lightning_ray.tasks.swe_bench import prediction
from lightning_ray.tasks.swe_smith import digest
from lightning_ray.trajectory.archive import write_rollouts
from lightning_ray.trajectory.call import Trajectory

STOP_TIMEOUT_S = 20
GENERATOR_LIVES = 3
"""How often the process of one generator is started again; its generations wait meanwhile, or move to another."""


class Evaluation:
    def __init__(self, config: Config, *, split: str = "heldout", progress: Progress | None = None,
                 remote: RemoteModel | None = None):
        """`remote`: the model to measure, where it is not the configuration's policy."""
        self.config = configured(config, remote) if remote else config
        self.remote = remote
        self.progress = progress or Progress()
        self._split = split
        self.run: RunDirectory | None = None

    def measure(self) -> dict[str, Any]:
        """Runs all rollouts, writes the record, gives what `results.json` holds. Raises `ConfigError` for bad input
        before anything starts, `NothingJudged` where no rollout could be run."""
        self.progress.phase("checking")
        preflight(self.config, policy=self.remote is None)
        splits = load_tasks(self.config.tasks)
        tasks = splits.heldout if self._split == "heldout" else splits.train
        if not tasks:
            raise ConfigError("tasks.heldout_source: there are no held-out tasks. Give a file of them, or "
                              "--split train")
        with self.served() as (fleet, model):
            started = time.monotonic()
            done = self._rollouts(fleet, tasks)
            return self._record(tasks, done, model, time.monotonic() - started, fleet.facts)

    @contextmanager
    def served(self) -> Iterator[tuple[Fleet, dict[str, Any]]]:
        """A new run directory, the model behind runners, and what the record says of it."""
        self.run = RunDirectory.create(self.config)
        try:
            with self._parts() as parts:
                yield parts
        finally:
            self.run.remove_if_empty()

    @contextmanager
    def _parts(self) -> Iterator[tuple[Fleet, dict[str, Any]]]:
        model = None
        if self.remote is None:
            self.progress.phase("preparing the policy")
            model = policy_directory(self.config.policy, self.config, self.progress)
        self.progress.phase("starting Ray")
        session = RaySession.start(self.config)
        self.progress.phase("starting all parts")
        generators: list[Any] = []
        try:
            generators = start_generators(self.config, model) if model else []
            fleet = (Fleet.start(self.config, self.run, str(model), generators) if model
                     else Fleet.beside(self.config, partial(remote_endpoint, self.remote)))
            try:
                ray.get([part.ready.remote() for part in generators])
                fleet.ready()
                name = self.config.policy.name
                yield fleet, {"name": name, "sha256": model_digest(model)} if model else {
                    "name": name, "url": self.remote.url}
            finally:
                fleet.stop()
        finally:
            self.progress.phase("stopping")
            end(generators, STOP_TIMEOUT_S)
            session.stop()

    def _rollouts(self, fleet: Fleet, tasks: Sequence[Task]) -> dict[str, list[Trajectory]]:
        """Instance id -> its rollouts, in the order of their numbers."""
        self.progress.phase("rollouts")
        specs = [self.spec(task, number) for task in tasks for number in range(self.config.evaluation.samples)]
        found: dict[str, Trajectory] = {}
        for trajectory in fleet.run(specs):
            found[trajectory.rollout_id] = trajectory
            self.progress.rollouts(len(found), len(specs))
        grouped: dict[str, list[Trajectory]] = {task.instance_id: [] for task in tasks}
        for spec in specs:
            grouped[spec.task.instance_id].append(found[spec.rollout_id])
        return grouped

    def spec(self, task: Task, number: int) -> RolloutSpec:
        """The task's rollout of that number, the same in every evaluation with this seed."""
        rollout_id = f"evaluation-{hashlib.sha256(task.instance_id.encode()).hexdigest()[:12]}-s{number}"
        return RolloutSpec(
            rollout_id=rollout_id, group_id="evaluation", task=task, mode="evaluate",
            temperature=self.config.evaluation.temperature, seed=rollout_seed(self.config.run.seed, rollout_id))

    def _record(self, tasks: Sequence[Task], done: Mapping[str, list[Trajectory]], model: dict[str, Any],
                wall_s: float, facts: dict[str, Any]) -> dict[str, Any]:
        everything = [trajectory for members in done.values() for trajectory in members]
        write_rollouts(self.run.rollouts / "evaluation_000000.parquet", everything,
                       max_tokens=self.config.policy.max_context,
                       dropped=dict.fromkeys((each.rollout_id for each in everything), "evaluation"))
        for number in range(self.config.evaluation.samples):
            write_whole(self.run.root / predictions_file(number), "".join(
                json.dumps(prediction(self.config.policy.name, instance, members[number].patch)) + "\n"
                for instance, members in done.items()))
        generator = self.config.generator
        results = {
            **scores({task.instance_id: task.repo for task in tasks}, done, seed=self.config.run.seed),
            "bill": bill(everything, self.config.evaluation.prices, wall_s=wall_s,
                         devices=0 if self.remote else generator.replicas * generator.tensor_parallel),
            "model": model,
            "data": {"source": self.config.tasks.source, "split": self._split, "instances": len(tasks),
                     "sha256": digest(task.model_dump(mode="json") for task in tasks)},
            "harness": self.config.harness.model_dump(mode="json"),
            "sampling": {"temperature": self.config.evaluation.temperature,
                         "max_tokens": self.config.sampling.max_tokens, "max_context": self.config.policy.max_context},
            "seed": self.config.run.seed, "config_hash": self.config.digest(), "versions": versions(),
            "isolation": facts, "wall_s": wall_s,
        }
        write_whole(self.run.root / "results.json", json.dumps(results, indent=1))
        return results


def start_generators(config: Config, model: Path) -> list[Any]:
    """The generators alone, each on devices of its own. Their engines begin to start; `ready` waits for one."""
    on_gpus = ray.cluster_resources().get("GPU", 0) > 0
    if on_gpus and config.generator.tensor_parallel > 1:
        raise ConfigError("generator.tensor_parallel: evaluation runs whole models on one GPU each; set it to 1, and "
                          "generator.replicas to the number of GPUs")
    parts = [GeneratorWorker.options(num_cpus=1, num_gpus=1 if on_gpus else 0, max_restarts=GENERATOR_LIVES).remote(
        str(model), config.generator, config.policy, config.run.seed + number, fixed=True)
        for number in range(config.generator.replicas)]
    for part in parts:
        part.ready.remote()
    return parts


def predictions_file(sample: int) -> str:
    return f"predictions{f'-{sample}' if sample else ''}.jsonl"
