"""The Ray actor of one learner rank: a thin shell around `engine.Learner`.

Life: every rank is created, rank 0 is asked for its `address`, all ranks get it by `setup` (together: it returns
when all have joined). From then on every method is called on all ranks together with the same arguments, since
they work in step; what one rank cannot do fails on all.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from lightning_ray.config import AlgorithmConfig, LearnerConfig
from lightning_ray.learner.buckets import Bucket
from lightning_ray.trajectory.samples import Sample


@ray.remote
class LearnerWorker:
    """`lightning_ray.learner.engine.Learner` in a process of its own."""

    def __init__(
        self,
        model_dir: str,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        rank: int,
        world_size: int,
        total_steps: int,
    ) -> None:
        self._arguments = (Path(model_dir), config, algorithm)
        self._keywords = {"temperature": temperature, "total_steps": total_steps}
        self._config, self._rank, self._ranks = config, rank, world_size
        self._learner = None

    def address(self) -> tuple[str, int]:
        """Host and a free port of this rank's node, for the ranks to meet (asked of rank 0)."""
        return free_address()

    def setup(self, master: tuple[str, int]) -> dict[str, Any]:
        """Join the other ranks at `master` and load the model. Returns facts about what was built.

        Raises `UnsupportedModel` and `OptimizerUnavailable`, whose messages say what to do.
        """
        on_gpu = bool(ray.get_gpu_ids())
        prepare_process(self._rank, self._ranks, threads=self._config.threads, on_gpu=on_gpu)
        import torch

        from lightning_ray.learner.engine import Learner, join

        torch.set_num_threads(self._config.threads)
        join(self._rank, self._ranks, master)
        self._learner = Learner(*self._arguments, **self._keywords)
        return self._learner.facts()

    def step(self, samples: Sequence[Sample], version: int) -> dict[str, float | None]:
        return self._learner.step(samples, version)

    def parameters(self) -> list[tuple[str, int]]:
        return self._learner.parameters()

    def bucket(self, dtype: str = "bfloat16", names: Sequence[str] | None = None) -> Bucket:
        return self._learner.bucket(dtype, None if names is None else frozenset(names), copy=False)

    def share(self, dtype: str, names: Sequence[str]) -> Any:
        return self._learner.share(dtype, frozenset(names))

    def unshare(self) -> None:
        self._learner.unshare()

    def offload(self) -> None:
        self._learner.offload()

    def reload(self) -> None:
        self._learner.reload()

    def save(self, directory: str) -> None:
        self._learner.save(Path(directory))

    def load(self, directory: str) -> None:
        self._learner.load(Path(directory))

    def export(self, directory: str) -> None:
        self._learner.export(Path(directory))


def free_address() -> tuple[str, int]:
    """Host and a free port of this node."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def prepare_process(rank: int, ranks: int, *, threads: int, on_gpu: bool) -> None:
    """Environment that torch, OpenMP, DeepSpeed and transformers read when they are imported."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK="0" if on_gpu else str(rank),  # Ray shows each actor its own GPUs only
        LOCAL_SIZE=str(ranks),
        DS_ACCELERATOR="cuda" if on_gpu else "cpu",
        OMP_NUM_THREADS=str(threads),
        OMP_WAIT_POLICY="passive",  # waiting threads must not take the generator's cores
        TRANSFORMERS_VERBOSITY="error",
    )
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # torch deprecates the collectives that this DeepSpeed calls
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
