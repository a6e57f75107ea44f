"""Law 8 at random: rollouts whose sandboxes and workers are killed under them, and a runner that is killed itself.
Every rollout ends, every sampled token is accounted for once, and nothing stays behind.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from lightning_ray.config import Config
from lightning_ray.harness.pool import WorkerPool
from lightning_ray.harness.rollouts import Rollouts
from lightning_ray.sandbox import backend, limits
from lightning_ray.sandbox.base import SandboxError
from lightning_ray.tasks.workspaces import Workspaces
from tests.integration.scripted_proxy import TOKENS, Answer, ScriptedProxy
from tests.integration.test_runner import FIX, process_lives, spec

ROLLOUTS = int(os.environ.get("CHAOS_ROLLOUTS", 120))
"""`CHAOS_ROLLOUTS=1000` makes the long run, of some minutes."""
AT_ONCE = 24
SANDBOX_DIES = 0.15
"""How often an answer of the model kills a random sandbox that is up."""
WORKER_DIES_AT = (60, 150)
"""Answers at which a worker process is killed, with all that it runs."""
SEED = 5


class Killer:
    """Asked at each answer of the model, so that the number of kills does not depend on how fast this machine is."""

    def __init__(self, sandboxes: list) -> None:
        self.sandboxes = sandboxes
        self.pool: WorkerPool | None = None
        self.killed: Counter = Counter()
        self.chance = random.Random(SEED)
        self._answers = 0

    def __call__(self, rollout, number: int) -> Answer:
        self._answers += 1
        if self._answers in WORKER_DIES_AT:
            self._kill("worker", [worker.pid for worker in self.pool._workers.values() if worker.load])
        elif self.chance.random() < SANDBOX_DIES:
            self._kill("sandbox", [pid for pid in map(pid_of, self.sandboxes) if pid])
        return Answer("hm", delay_s=self.chance.uniform(0, 0.1))

    def _kill(self, what: str, pids: list[int]) -> None:
        if pids:
            os.kill(self.chance.choice(pids), signal.SIGKILL)
            self.killed[what] += 1


def pid_of(sandbox) -> int | None:
    try:
        return sandbox.pid
    except SandboxError:
        return None


def of_process(pid: int) -> tuple[dict[int, str], list[Path]]:
    """Processes of sandboxes that process `pid` started, and their cgroups."""
    marked = {each: value for each, value in limits.marked().items() if value.startswith(f"{pid}-")}
    parents = {parent for _, parent in limits.places().values()}
    return marked, [found for parent in parents for found in parent.glob(f"{limits.PREFIX}{pid}-*")]


@pytest.mark.timeout(2.5 * ROLLOUTS)
async def test_law8_sandboxes_and_workers_die_at_random_and_no_rollout_is_lost_or_counted_twice(tmp_path):
    sandboxes: list = []
    killer = Killer(sandboxes)
    proxy = ScriptedProxy(killer)
    await proxy.start()
    pool = WorkerPool("tests.integration.harnesses:run", 2, tmp_path)
    await pool.start()
    killer.pool = pool
    make = (await asyncio.to_thread(backend.choose, Config().sandbox)).make

    def kept(sandbox_spec):
        sandboxes.append(make(sandbox_spec))
        return sandboxes[-1]

    config = Config(
        harness={"entry": "tests.integration.harnesses:run", "timeout_s": 60,
                 "settings": {"steps": ["model", "run: sleep 0.05", FIX, "model"]}},
        runners={"infra_retries": 3, "rollouts": AT_ONCE},
    )  # fmt: skip
    rollouts = Rollouts(config, proxy, Workspaces(tmp_path / "workspaces"), kept, pool, {})
    try:
        async with asyncio.timeout(2.4 * ROLLOUTS):
            records = await asyncio.gather(*(rollouts.run(spec(f"c{number}")) for number in range(ROLLOUTS)))
    finally:
        await rollouts.stop()
        await pool.stop()
        await proxy.stop()

    assert killer.killed["sandbox"] > 20 and killer.killed["worker"] == len(WORKER_DIES_AT)
    assert sorted(record.rollout_id for record in records) == sorted(f"c{number}" for number in range(ROLLOUTS))
    ends = Counter(record.end for record in records)
    assert ends["graded"] > ROLLOUTS * 0.8 and set(ends) <= {"graded", "infra_failed"}
    assert all(record.passed == (record.end == "graded") for record in records)
    assert sum(record.notes["attempts"] for record in records) > ROLLOUTS  # the kills did hit

    for record in records:  # law 1: what was sampled for a rollout is in its record or in its count of lost tokens
        attempts = [record.rollout_id, *(f"{record.rollout_id}.{number}" for number in range(1, 5))]
        sampled = sum(len(proxy.rollouts[name].calls) * TOKENS for name in attempts if name in proxy.rollouts)
        assert record.tokens_sampled + record.discarded_tokens == sampled, record.rollout_id
        if record.end == "graded":
            assert record.tokens_sampled == 2 * TOKENS

    assert all(rollout.closed for rollout in proxy.rollouts.values())
    assert not any(map(pid_of, sandboxes)) and of_process(os.getpid()) == ({}, [])


KILLED = """
import asyncio, sys
from pathlib import Path
from lightning_ray.config import Config
from lightning_ray.sandbox import backend
from lightning_ray.sandbox.base import SandboxSpec

async def main():
    make = backend.choose(Config().sandbox).make
    sandboxes = [make(SandboxSpec(f"k{number}", Path(sys.argv[1]))) for number in range(10)]
    await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    print(*(sandbox.pid for sandbox in sandboxes), flush=True)
    await asyncio.gather(*(sandbox.exec("setsid sleep 1000 & sleep 1000", timeout_s=1000) for sandbox in sandboxes))

asyncio.run(main())
"""


def test_law8_what_a_killed_runner_leaves_is_found_and_removed(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    runner = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    pids = [int(pid) for pid in runner.stdout.readline().split()]
    assert len(pids) == 10 and all(map(process_lives, pids))
    runner.kill()
    runner.wait()
    deadline = time.monotonic() + 20
    while any(map(process_lives, pids)):  # they die with it, without any help
        assert time.monotonic() < deadline, "a sandbox outlives the process that started it"
        time.sleep(0.05)
    limits.janitor()
    assert of_process(runner.pid) == ({}, [])
    assert not [line for line in limits.janitor() if f"{runner.pid}-" in line]
