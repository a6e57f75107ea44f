"""PolicyGroup: the learner's ranks and the generators, on the same machines, and the phases in which they take turns.

    group = PolicyGroup.start(config, model_dir, total_steps)
    metrics = group.update(samples)        # freeze -> learn -> publish -> verify -> thaw

Placement: one placement group. With GPUs each bundle is one GPU, shared by a learner rank and by a generator (or a
tensor-parallel part of one), so their numbers must agree; without, each part has a bundle of CPUs of its own.

Weights are gathered once, by rank 0, returned into Ray's object store (owned here, so that they outlive the learner's
process), and pulled from there by every generator. Between freeze and thaw requests wait inside the generators: no
caller sees an error.

A part that died raises `PartDied` with its name. What a part itself raises comes through as it is, with a note that
names the part.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_ray.config import Config, ConfigError
from lightning_ray.generator.worker import GeneratorWorker, PublishFailed
from lightning_ray.learner.worker import LearnerWorker
from lightning_ray.phases import Phases
from lightning_ray.trajectory.samples import Sample

GPU_SHARE = 0.5
"""Of a GPU, for Ray's book-keeping: a learner rank and a generator stand on each."""
PLACEMENT_TIMEOUT_S = 600
"""A cluster that scales by itself needs minutes to add a node."""
STOP_TIMEOUT_S = 20


class PartDied(RuntimeError):
    """A learner rank or a generator is gone. The message names it."""


class PolicyGroup:
    """Made by `start`. `version` is the policy version that the generators sample with."""

    def __init__(self, config: Config, learners: list[ActorHandle], generators: list[ActorHandle],
                 placement: PlacementGroup):
        self.generators = generators
        self.facts: dict[str, Any] = {}
        self._config = config
        self._learners = learners
        self._placement = placement
        self._phases = Phases()

    @property
    def version(self) -> int:
        return self._phases.version

    @classmethod
    def start(cls, config: Config, model_dir: Path, total_steps: int) -> "PolicyGroup":
        """Starts all parts on the weights in `model_dir` (policy version 0) and blocks until they are ready.

        Raises `ConfigError` where the cluster has no room, else what a part raises; nothing is left running then.
        """
        placement, learners, generators = _place(config, str(model_dir), total_steps)
        group = cls(config, learners, generators, placement)
        try:
            ready = {f"generator {number}": part.ready.remote() for number, part in enumerate(generators)}
            master = _all({"learner rank 0": learners[0].address.remote()})[0]
            joined = {f"learner rank {rank}": part.setup.remote(master) for rank, part in enumerate(learners)}
            facts = _all({**joined, **ready})
            group.facts = {"learner": facts[0], "generator": facts[len(joined)]}
        except BaseException:
            group.shutdown()
            raise
        return group

    def update(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """One step of learning, published: all samples trained once, the generators on the new weights.

        Returns the learner's metrics, and seconds: `freeze_s` (with `schedule.on_update: drain` the time in which the
        requests in flight are finished), `learn_s`, `publish_s`, and `pause_s` (from freeze to thaw, what a
        running generation sees); `weights_bytes`; `weights_verified` (1.0 where each generator's weights were compared
        with those sent, value for value). A step that could not be learned from leaves the generators as they were.
        """
        clock = _Clock()
        with clock.measure("freeze_s"):
            self._freeze()
        try:
            with self._phases.step("learn"), clock.measure("learn_s"):
                metrics = self._learners_do("step", ray.put(list(samples)), self.version)[0]
        except BaseException:
            self._thaw()
            raise
        with clock.measure("publish_s"):
            reports = self._publish(self.version + 1)
        self._thaw()
        return {**metrics, **clock.seconds, "pause_s": clock.total(), "weights_bytes": reports[0]["bytes"],
                "weights_verified": float(all(report["verified"] for report in reports))}

    def check(self) -> list[dict[str, Any]]:
        """The generators' `health`. Raises `PartDied` where one is gone or its engine is: requests would wait for it
        for ever."""
        return self._generators_do("health")

    def save(self, directory: Path) -> None:
        """What `load` needs to go on: the learner's weights, optimizer and progress."""
        self._learners_do("save", str(directory))

    def load(self, directory: Path, version: int) -> None:
        """Goes on from what `save` wrote, and publishes its weights as policy version `version`."""
        self._learners_do("load", str(directory))
        self._freeze()
        self._publish(version)
        self._thaw()

    def export(self, directory: Path) -> None:
        """Writes a Hugging Face checkpoint of the learner's weights: config, tokenizer, safetensors."""
        self._learners_do("export", str(directory))

    def shutdown(self) -> None:
        """Ends all parts and their processes. Idempotent."""
        stopping = [part.stop.remote() for part in self.generators]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_TIMEOUT_S)
        for part in [*self.generators, *self._learners]:
            ray.kill(part)
        self.generators, self._learners = [], []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    # --- steps of the phases ---

    def _freeze(self) -> None:
        with self._phases.step("freeze"):
            if self._config.schedule.on_update == "drain":
                self._generators_do("drain")
            self._generators_do("freeze")

    def _publish(self, version: int) -> list[dict[str, Any]]:
        """Gathers the weights once, hands them to all generators, and checks that each has them."""
        with self._phases.step("publish", version):
            ranks = [part.weights.remote(self._config.generator.dtype) for part in self._learners]
            _all({f"learner rank {rank}": ref for rank, ref in enumerate(ranks) if rank})
            try:
                reports = self._generators_do("publish", [ranks[0]], version)
            except PublishFailed:
                self._learners_do("address")  # raises PartDied where there were no weights to pull any more
                raise
        with self._phases.step("verify"):
            held = [health["version"] for health in self._generators_do("health")]
            if held != [version] * len(held):
                raise RuntimeError(f"policy version {version} was published, but the generators hold {held}")
        return reports

    def _thaw(self) -> None:
        with self._phases.step("thaw"):
            self._generators_do("thaw")

    # --- calls ---

    def _learners_do(self, method: str, *arguments: Any) -> list[Any]:
        """All ranks together: they work in step."""
        return _all({f"learner rank {rank}": getattr(part, method).remote(*arguments)
                     for rank, part in enumerate(self._learners)})

    def _generators_do(self, method: str, *arguments: Any) -> list[Any]:
        return _all({f"generator {number}": getattr(part, method).remote(*arguments)
                     for number, part in enumerate(self.generators)})


def _all(calls: dict[str, ray.ObjectRef]) -> list[Any]:
    """The results in order. The first call that fails ends the wait: the others may be waiting for that part."""
    names = {ref: name for name, ref in calls.items()}
    results: dict[ray.ObjectRef, Any] = {}
    waiting = list(names)
    while waiting:
        (ref,), waiting = ray.wait(waiting, num_returns=1)
        try:
            results[ref] = ray.get(ref)
        except RayActorError as error:
            raise PartDied(f"{names[ref]} died: {error}") from error
        except Exception as error:
            error.add_note(f"raised by {names[ref]}")
            raise
    return [results[ref] for ref in names]


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()

    def total(self) -> float:
        return time.monotonic() - self._started

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started


def _place(config: Config, model_dir: str, total_steps: int
           ) -> tuple[PlacementGroup, list[ActorHandle], list[ActorHandle]]:
    """Reserves the room and creates the actors."""
    ranks, replicas, parallel = config.learner.ranks, config.generator.replicas, config.generator.tensor_parallel
    on_gpus = ray.cluster_resources().get("GPU", 0) > 0
    if on_gpus and ranks != replicas * parallel:
        raise ConfigError(
            f"learner.ranks ({ranks}) must equal generator.replicas x generator.tensor_parallel ({replicas} x "
            f"{parallel}): each GPU is shared by one learner rank and one part of a generator")
    if on_gpus:
        placement = _reserve([{"GPU": 1, "CPU": 2}] * ranks)
    else:
        placement = _reserve([{"CPU": 1}] * ranks + [{"CPU": parallel}] * replicas)
    share = GPU_SHARE if on_gpus else 0
    learners = [
        LearnerWorker.options(num_cpus=1, num_gpus=share, scheduling_strategy=_bundle(placement, rank)).remote(
            model_dir, config.learner, config.algorithm, config.sampling.temperature, rank, ranks, total_steps)
        for rank in range(ranks)
    ]
    generators = []
    for number in range(replicas):
        first = number * parallel if on_gpus else ranks + number
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": share}
        if on_gpus and parallel > 1:  # vLLM's own Ray workers take the GPUs, in these bundles
            bundles = ",".join(str(first + part) for part in range(parallel))
            options["num_gpus"] = 0
            options["runtime_env"] = {"env_vars": {
                "VLLM_RAY_PER_WORKER_GPUS": str(GPU_SHARE), "VLLM_RAY_BUNDLE_INDICES": bundles}}
        generators.append(GeneratorWorker.options(**options, scheduling_strategy=_bundle(placement, first)).remote(
            model_dir, config.generator, config.policy, config.run.seed + number))
    return placement, learners, generators


def _bundle(placement: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index,
                                            placement_group_capture_child_tasks=True)


def _reserve(bundles: list[dict[str, float]]) -> PlacementGroup:
    placement = placement_group(bundles, strategy="PACK")
    try:
        ray.get(placement.ready(), timeout=PLACEMENT_TIMEOUT_S)
    except GetTimeoutError:
        remove_placement_group(placement)
        raise ConfigError(
            f"learner.ranks, generator.replicas: the cluster has no room for {bundles} (it has "
            f"{ray.cluster_resources()}). Lower them, or add nodes") from None
    return placement
