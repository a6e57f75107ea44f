"""Which generators serve: real actors of Ray that die, in place of vLLM's engines."""

import os
import time

import pytest
import ray

from lightning_ray.calls import PartDied
from lightning_ray.generator.pool import LIVES, GeneratorPool
from lightning_ray.generator.worker import Restarted


@ray.remote(num_cpus=0, max_restarts=-1)
class Frail:
    """Like a generator: a process that was started again has no weights. `breaks`: and its engine does not start."""

    def __init__(self, breaks: bool = False):
        self.again = ray.get_runtime_context().was_current_actor_reconstructed
        self.breaks = breaks

    @ray.method(max_task_retries=3)
    def ready(self) -> int:
        if self.again and self.breaks:
            raise OSError("no memory left on the device")
        return os.getpid()

    def health(self) -> int:
        if self.again:
            raise Restarted("no weights")
        return os.getpid()

    def publish(self) -> None:
        self.again = False

    def die(self) -> None:
        os._exit(1)

    def stop(self) -> None:
        pass


@pytest.fixture
def pool_of(ray_session):
    pools = []

    def make(*actors) -> GeneratorPool:
        pools.append(GeneratorPool(actors))
        ray.get([actor.ready.remote() for actor in actors])
        return pools[-1]

    yield make
    for pool in pools:
        pool.stop(timeout_s=5)


def until_back(pool: GeneratorPool) -> None:
    deadline = time.monotonic() + 30
    while not pool.back():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_died_is_left_out_until_it_is_welcomed(pool_of):
    pool = pool_of(Frail.remote(), Frail.remote())
    first, second = pool.each("health")
    pool.handles[0].die.remote()
    while len(pool.each("health")) == 2:
        time.sleep(0.02)
    assert pool.serving == [1] and pool.each("health") == [second]
    until_back(pool)
    assert pool.serving == [1], "it serves only once it is welcome"
    pool.welcome()
    pool.each("publish")
    again, still = pool.each("health")
    assert still == second and again not in (first, second) and pool.serving == [0, 1] and pool.back() == []


def test_a_process_that_was_started_again_unseen_has_no_weights_and_does_not_serve(pool_of):
    pool = pool_of(Frail.remote())
    (before,) = pool.each("health")
    pool.handles[0].die.remote()
    deadline = time.monotonic() + 30
    while ray.get(pool.handles[0].ready.remote()) == before:
        assert time.monotonic() < deadline
    assert pool.each("health") == [] and pool.serving == []
    until_back(pool)


def test_an_engine_that_does_not_start_again_ends_the_run_with_its_name(pool_of):
    pool = pool_of(Frail.remote(), Frail.remote(breaks=True))
    pool.handles[1].die.remote()
    while len(pool.each("health")) == 2:
        time.sleep(0.02)
    with pytest.raises(PartDied, match=f"generator 1 died {LIVES + 1} times since the last update: no memory left"):
        until_back(pool)


def test_one_that_dies_again_and_again_ends_the_run_with_its_name(pool_of):
    pool = pool_of(Frail.remote())

    def dies() -> None:
        pool.handles[0].die.remote()
        while pool.each("health"):
            time.sleep(0.02)
        until_back(pool)
        pool.welcome()
        pool.each("publish")

    dies()
    pool.updated()
    for _ in range(LIVES):
        dies()
    with pytest.raises(PartDied, match=f"generator 0 died {LIVES + 1} times since the last update"):
        dies()
