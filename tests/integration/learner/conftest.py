"""The tests of the learner share one process group of one rank (this process), and two ranks that are actors."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from lightning_ray.learner.worker import free_address
from tests.integration.learner.common import Rank
from tests.tiny_models import tiny_model


@pytest.fixture(scope="package", autouse=True)
def single_rank() -> Iterator[None]:
    """This process is a group of one rank; each test makes learners of its own in it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        import cpuinfo

        from lightning_ray.learner.engine import join

        join(0, 1, free_address())
        # each optimizer asks, and subprocesses answer
        patch.setattr(cpuinfo, "get_cpu_info", functools.cache(cpuinfo.get_cpu_info))
        yield
    torch.distributed.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def place_in_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DeepSpeed asks of the environment; for each test, so that no Ray starts with it."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_SIZE", "1")


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny_model(root, name) for name in ("qwen3", "llama")}


@pytest.fixture(scope="package")
def two_ranks(ray_session: None) -> Iterator[list]:
    actors = [Rank.options(num_cpus=0.1).remote(rank) for rank in range(2)]
    address = free_address()
    ray.get([actor.join.remote(address) for actor in actors])
    yield actors
    for actor in actors:
        ray.kill(actor)
