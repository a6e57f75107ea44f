"""Replay: a run's recorded rollouts, learned from again, in their order. No generator, proxy, runner or sandbox.

    for metrics in Replay(Config.load("runs/quickstart/config.yaml"), Path("runs/quickstart")).steps():
        print(metrics["loss"])

The same rollouts, settings and start weights give the same updates, bit for bit on the CPU (law 9); other settings of
the learner and the algorithm show what they would have made of the same data. It writes a run directory of its own,
`NAME-replay`, with `config.yaml`, `metrics.jsonl` and the policy that came out (`policy/`, Hugging Face format).

Bad input raises `ConfigError` before anything starts; what a learner raises comes through.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from lightning_ray.buffer import Group
from lightning_ray.config import Config, ConfigError
from lightning_ray.learner.worker import LearnerWorker
from lightning_ray.observe.metrics import step_metrics
from lightning_ray.observe.progress import Progress
from lightning_ray.policy.source import check_policy, policy_directory
from lightning_ray.preflight import check_disk
from lightning_ray.ray_session import RaySession
from lightning_ray.run_directory import RunDirectory
from lightning_ray.trajectory.archive import check_rollouts, group_trajectories, trained_rollouts
from lightning_ray.trajectory.samples import step_batch


class Replay:
    """Learns from at most `run.steps` recorded steps of `source`, a run directory."""

    def __init__(self, config: Config, source: Path, *, progress: Progress | None = None):
        self.config = config
        self.progress = progress or Progress()
        self._recorded = sorted(RunDirectory.existing(source).rollouts.glob("step_*.parquet"))[: config.run.steps]
        if not self._recorded:
            raise ConfigError(f"--replay: {source} has no recorded step. Give the path of a run that made one")
        for file in self._recorded:
            check_rollouts(file)
        self.run: RunDirectory | None = None

    def steps(self) -> Iterator[dict[str, Any]]:
        """The metrics of each step, as a run has them; `generate_s` is 0."""
        check_policy(self.config.policy)
        check_disk(self.config.run.dir)
        config = self.config.model_copy(update={
            "run": self.config.run.model_copy(update={"name": f"{self.config.run.name}-replay"})})
        self.run = RunDirectory.create(config)
        session, learners = None, []
        try:
            self.progress.phase("warming up the policy")
            model_dir = policy_directory(config.policy, config, self.progress)
            self.progress.phase("starting the learner")
            session = RaySession.start(config)
            learners = start_learners(config, model_dir)
            yield from self._replay(learners)
            ray.get([part.export.remote(str(self.run.root / "policy")) for part in learners])
            self.progress.note(f"replayed {len(self._recorded)} steps; the policy lies in {self.run.root / 'policy'}")
        finally:
            self.progress.phase("stopping")
            for part in learners:
                ray.kill(part)
            if session is not None:
                session.stop()
            self.run.remove_if_empty()
            self.progress.close()

    def _replay(self, learners: list[ray.actor.ActorHandle]) -> Iterator[dict[str, Any]]:
        began, version, algorithm = time.monotonic(), 0, self.config.algorithm
        for number, path in enumerate(self._recorded, 1):
            members = group_trajectories(trained_rollouts(path))
            batch = step_batch(members, advantage=algorithm.advantage, normalise=algorithm.normalise,
                               max_tokens=self.config.policy.max_context, train=self.config.capture.train)
            update: dict[str, Any] = {"learn_s": 0.0}
            if batch.samples:
                samples = ray.put(batch.samples)
                update = ray.get([part.step.remote(samples, version) for part in learners])[0]
                version += 1
            metrics = step_metrics(
                step=number, policy_version=version, groups=[Group.of(group) for group in members], dropped=[],
                batch=batch, update=update, wall_s=time.monotonic() - began, generate_s=0.0)
            self.run.append_metrics(metrics)
            self.progress.step(metrics)
            yield metrics


def start_learners(config: Config, model_dir: Path) -> list[ray.actor.ActorHandle]:
    """The ranks of a learner, joined. With GPUs in the cluster each rank has one."""
    ranks = config.learner.ranks
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    learners = [
        LearnerWorker.options(num_cpus=1, num_gpus=gpus, resources=config.learner.resources).remote(
            str(model_dir), config.learner, config.algorithm, config.sampling.temperature, rank, ranks,
            config.run.steps)
        for rank in range(ranks)
    ]
    master = ray.get(learners[0].address.remote())
    ray.get([part.setup.remote(master) for part in learners])
    return learners
