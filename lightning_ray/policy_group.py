"""PolicyGroup: the learner's ranks and the generators, on the same machines, and the phases in which they take turns.

    group = PolicyGroup.start(config, model_dir, total_steps)    # parts begin to start
    group.ready()
    metrics = group.update(samples)        # freeze -> learn -> publish -> verify -> thaw

Where they stand is `placement.py`. Where they have the memory of their devices by turns (`generator.in_flight:
resend`), generators give theirs up while the learner works, and the learner's states are in host memory while they
sample.

Weights are published bucket by bucket: gathered once, returned by rank 0 into Ray's object store (owned here, so that
they outlive the learner's process), pulled from there by every generator, and freed; the next one is gathered
meanwhile, where both have room. With `generator.transport: ipc` only addresses of GPU memory travel so, one after the
other. Between freeze and thaw requests wait inside the generators: no caller sees an error.

A generator that died is started again by Ray; `check` publishes the weights to it once its engine is up, and an update
meanwhile goes on without it. A learner rank that died, or a generator that cannot be brought back, raises `PartDied`
with its name. What a part itself raises comes through as it is, with a note that names the part.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_ray.calls import PartDied, gather
from lightning_ray.config import Config
from lightning_ray.generator.pool import GeneratorPool
from lightning_ray.generator.publishing import PublishFailed
from lightning_ray.generator.worker import GeneratorWorker
from lightning_ray.learner import buckets
from lightning_ray.learner.worker import LearnerWorker
from lightning_ray.memory import BYTES
from lightning_ray.phases import Phases
from lightning_ray.placement import Seat, place, takes_turns
from lightning_ray.ray_session import reserve
from lightning_ray.trajectory.samples import Sample

__all__ = ["PartDied", "PolicyGroup"]

STOP_TIMEOUT_S = 20


class PolicyGroup:
    """Made by `start`. `version` is the policy version that the generators sample with."""

    def __init__(self, config: Config, learners: list[ActorHandle], generators: list[ActorHandle],
                 placement: PlacementGroup, *, turns: bool):
        self.facts: dict[str, Any] = {}
        self._config = config
        self._learners = learners
        self._pool = GeneratorPool(generators)
        self._placement = placement
        self._turns = turns
        self._loads: list[buckets.Load] = []
        self._starting: dict[str, ray.ObjectRef] = {}
        self._phases = Phases()

    @property
    def version(self) -> int:
        return self._phases.version

    @property
    def generators(self) -> list[ActorHandle]:
        """They stay the same when a generator's process is started again."""
        return self._pool.handles

    @classmethod
    def start(cls, config: Config, model_dir: Path, total_steps: int) -> "PolicyGroup":
        """Begins to start all parts on the weights in `model_dir` (policy version 0); `ready` waits for them, and
        meanwhile what asks the generators may start, too. Raises `ConfigError` where the cluster has no room."""
        group = _create(config, str(model_dir), total_steps)
        if not group._turns:
            group._starting = group._generators_start()
        return group

    def ready(self) -> None:
        """Waits until all parts are there. Raises what a part raises; `shutdown` ends the others."""
        master = gather({"learner rank 0": self._learners[0].address.remote()})[0]
        joined = {f"learner rank {rank}": part.setup.remote(master) for rank, part in enumerate(self._learners)}
        if self._turns:  # the generators measure what memory is left for their KV cache
            learner = gather(joined)[0]
            self._learners_do("offload")
            generator = gather(self._generators_start())[0]
        else:
            facts = gather({**joined, **self._starting})
            learner, generator = facts[0], facts[len(joined)]
        self.facts = {"learner": learner, "generator": generator}
        width = BYTES[self._config.generator.dtype]
        sizes = [(name, count * width) for name, count in self._learners_do("parameters")[0]]
        self._loads = buckets.plan(sizes, self._config.generator.bucket_mb * 2**20)

    def _generators_start(self) -> dict[str, ray.ObjectRef]:
        return {f"generator {number}": part.ready.remote() for number, part in enumerate(self.generators)}

    def update(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """One step of learning, published: all samples trained once, the generators on the new weights.

        Returns the learner's metrics, and seconds: `freeze_s` (with `schedule.on_update: drain` the time in which the
        requests in flight are finished), `learn_s`, `publish_s`, and `pause_s` (from freeze to thaw, what a
        running generation sees); of the publish, in the slowest generator, `pull_s`, `load_s` and `verify_s`;
        `weights_bytes`; `weights_verified` (1.0 where each generator's weights were compared with those sent);
        `generators_away` (that died and were not back in time). A step that could not be learned from leaves the
        generators as they were.
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
        self._pool.updated()
        return {**metrics, **_published(reports, clock), "generators_away": len(self._pool.away)}

    def publish(self, version: int) -> dict[str, Any]:
        """Publishes the learner's weights as they are, as policy version `version`, to all generators that are up.

        Returns of what `update` does `freeze_s`, `publish_s`, `pause_s` and the rest about weights.
        """
        clock = _Clock()
        asked = [] if self._turns else self._ask(0)  # where the learner has its memory it begins at once
        with clock.measure("freeze_s"):
            self._freeze()
        with clock.measure("publish_s"):
            reports = self._publish(version, asked)
        self._thaw()
        return _published(reports, clock)

    def check(self) -> list[dict[str, Any]]:
        """The `health` of the generators that serve. One that died and is up again gets the weights, and serves again;
        the others pause for that. Raises `PartDied` for one that cannot be brought back."""
        health = self._pool.each("health")
        if not self._pool.back():
            return health
        self.publish(self.version)
        return self._pool.each("health")

    def save(self, directory: Path) -> None:
        """What `load` needs to go on: the learner's weights, optimizer and progress."""
        with self._learner_at_work():
            self._learners_do("save", str(directory))

    def load(self, directory: Path, version: int) -> None:
        """Goes on from what `save` wrote, and publishes its weights as policy version `version`."""
        with self._learner_at_work():
            self._learners_do("load", str(directory))
        self.publish(version)

    def export(self, directory: Path) -> None:
        """Writes a Hugging Face checkpoint of the learner's weights: config, tokenizer, safetensors."""
        with self._learner_at_work():
            self._learners_do("export", str(directory))

    def shutdown(self) -> None:
        """Ends all parts and their processes. Idempotent."""
        self._pool.stop(STOP_TIMEOUT_S)
        for part in self._learners:
            ray.kill(part)
        self._learners = []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    # --- steps of the phases ---

    def _freeze(self) -> None:
        with self._phases.step("freeze"):
            if self._config.schedule.on_update == "drain":
                self._pool.each("drain")
            self._pool.each("freeze", self._turns)
            if self._turns:
                self._learners_do("reload")

    def _publish(self, version: int, asked: list[ray.ObjectRef] | None = None) -> list[dict[str, Any]]:
        """Sends the weights, bucket by bucket, to all generators that are up, and checks that each has them. `asked`:
        the calls that gather the first bucket, where they are under way; emptied here."""
        with self._phases.step("publish", version):
            self._pool.welcome()
            try:
                reports = self._send(version, asked or self._ask(0))
                if self._config.generator.transport == "ipc":
                    self._learners_do("unshare")
            except PublishFailed:
                self._learners_do("address")  # raises PartDied where there were no weights to pull any more
                raise
        with self._phases.step("verify"):
            held = [report["version"] for report in reports]
            if held != [version] * len(held):
                raise RuntimeError(f"policy version {version} was published, but the generators hold {held}")
        return reports

    def _send(self, version: int, asked: list[ray.ObjectRef]) -> list[dict[str, Any]]:
        """All buckets; what the generators say of the last one. A bucket is freed when its last reference is, which is
        here."""
        share = self._config.generator.transport == "ipc"  # a rank keeps one bucket, until it is asked for the next
        reports: list[dict[str, Any]] = []
        for number, load in enumerate(self._loads):
            asked = asked or self._ask(number)
            ref = asked.pop(0)
            gather({f"learner rank {rank}": other for rank, other in enumerate(asked, 1)})
            asked = self._ask(number + 1) if load.ahead and not share else []
            reports = self._pool.each("load_bucket", version, [ref], number == 0, number + 1 == len(self._loads))
            del ref
        return reports

    def _ask(self, number: int) -> list[ray.ObjectRef]:
        """The calls, one for each rank, that gather a bucket; the first holds it."""
        method = "share" if self._config.generator.transport == "ipc" else "bucket"
        return [getattr(part, method).remote(self._config.generator.dtype, self._loads[number].names)
                for part in self._learners]

    def _thaw(self) -> None:
        with self._phases.step("thaw"):
            if self._turns:
                self._learners_do("offload")
            self._pool.each("thaw")

    @contextmanager
    def _learner_at_work(self) -> Iterator[None]:
        """Its states are where it works with them."""
        if not self._turns:
            yield
            return
        self._freeze()
        try:
            yield
        finally:
            self._thaw()

    def _learners_do(self, method: str, *arguments: Any) -> list[Any]:
        """All ranks together: they work in step."""
        return gather({f"learner rank {rank}": getattr(part, method).remote(*arguments)
                       for rank, part in enumerate(self._learners)})


def _published(reports: Sequence[dict[str, Any]], clock: "_Clock") -> dict[str, Any]:
    def most(name: str) -> Any:
        return max((report[name] for report in reports), default=0)

    return {**clock.seconds, "pause_s": clock.total(), "pull_s": most("pull_s"), "load_s": most("load_s"),
            "verify_s": most("verify_s"), "weights_bytes": most("bytes"),
            "weights_verified": float(bool(reports) and all(report["verified"] for report in reports))}


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


def _create(config: Config, model_dir: str, total_steps: int) -> PolicyGroup:
    """Reserves the room and creates the actors, none of which has begun to work."""
    on_gpus = ray.cluster_resources().get("GPU", 0) > 0
    turns = takes_turns(config, on_gpus=on_gpus)
    planned = place(config, on_gpus=on_gpus)
    placement = reserve(planned.bundles, "PACK", "learner.ranks, generator.replicas")
    generator = config.generator.model_copy(update={"in_flight": "resend" if turns else "keep"})
    ranks = len(planned.learners)
    learners = [
        LearnerWorker.options(**_options(seat, placement)).remote(
            model_dir, config.learner, config.algorithm, config.sampling.temperature, rank, ranks, total_steps)
        for rank, seat in enumerate(planned.learners)
    ]
    generators = [
        GeneratorWorker.options(max_restarts=-1, **_options(seat, placement)).remote(
            model_dir, generator, config.policy, config.run.seed + number)
        for number, seat in enumerate(planned.generators)
    ]
    return PolicyGroup(config, learners, generators, placement, turns=turns)


def _options(seat: Seat, placement: PlacementGroup) -> dict[str, Any]:
    where = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=seat.bundle,
                                             placement_group_capture_child_tasks=True)
    options = {"num_cpus": seat.cpus, "num_gpus": seat.gpus, "scheduling_strategy": where}
    return {**options, "runtime_env": {"env_vars": seat.env}} if seat.env else options
