"""Where learner ranks and generators stand: the bundles of one placement group, and who takes which. Pure.

With GPUs a bundle is one GPU. A learner rank and a generator (or one tensor-parallel part of it) share it, so there are
as many ranks as parts of generators; generator k of p parts stands on bundles k p to k p + p - 1. A generator of one
part takes its share of the GPU itself; one of several takes none, and vLLM's own Ray workers take theirs there.
Without GPUs each learner rank and each generator has a bundle of CPUs of its own. `learner.resources` are in every
bundle.
"""

from dataclasses import dataclass, field

from lightning_ray.config import Config, ConfigError

GPU_SHARE = 0.5
"""Of a GPU, for Ray's book-keeping: a learner rank and a part of a generator stand on each."""
CPUS_BESIDE_GPU = 2
"""Of a bundle with a GPU: one for the learner rank, one for the generator."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Of one actor."""

    bundle: int
    cpus: float
    gpus: float = 0
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    bundles: list[dict[str, float]]
    learners: list[Seat]
    generators: list[Seat]


def place(config: Config, *, on_gpus: bool) -> Placement:
    """Raises `ConfigError` where the numbers of ranks and parts do not agree, or what is asked for needs GPUs."""
    ranks, replicas, parts = config.learner.ranks, config.generator.replicas, config.generator.tensor_parallel
    also = config.learner.resources
    if not on_gpus:
        if config.generator.transport == "ipc":
            raise ConfigError("generator.transport: ipc shares the memory of GPUs, and this cluster has none. Take "
                              "object_store")
        return Placement(
            [{"CPU": 1, **also}] * ranks + [{"CPU": parts, **also}] * replicas,
            [Seat(rank, cpus=1) for rank in range(ranks)],
            [Seat(ranks + number, cpus=parts) for number in range(replicas)])
    if ranks != replicas * parts:
        raise ConfigError(
            f"learner.ranks: {ranks} must equal generator.replicas x generator.tensor_parallel ({replicas} x {parts}): "
            "each GPU is shared by one learner rank and one part of a generator")
    return Placement(
        [{"GPU": 1, "CPU": CPUS_BESIDE_GPU, **also}] * ranks,
        [Seat(rank, cpus=1, gpus=GPU_SHARE) for rank in range(ranks)],
        [_on_gpus(number * parts, parts) for number in range(replicas)])


def _on_gpus(first: int, parts: int) -> Seat:
    if parts == 1:
        return Seat(first, cpus=1, gpus=GPU_SHARE)
    bundles = ",".join(str(first + part) for part in range(parts))
    return Seat(first, cpus=1, env={"VLLM_RAY_PER_WORKER_GPUS": str(GPU_SHARE), "VLLM_RAY_BUNDLE_INDICES": bundles})


def takes_turns(config: Config, *, on_gpus: bool) -> bool:
    """Whether learner and generators have the memory of their devices by turns (`generator.in_flight`)."""
    if config.generator.in_flight == "auto":
        return on_gpus and config.learner.zero_stage > 0
    return config.generator.in_flight == "resend"
