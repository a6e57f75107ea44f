"""What a sandbox costs: from start to the first command's answer; 1, 10, 100, 1,000 of them at once; whole rollouts.

    python benchmarks/sandbox.py [--at-once 1,10,100,1000] [--samples 40] [--files 2000] [--rollouts 200] [--json FILE]
    DOCKER_HOST=unix://SOCKET python benchmarks/sandbox.py --image IMAGE      # containers too, and plain `docker run`

Compared, in one run, with the same command in a plain subprocess, which isolates nothing, and with `docker run`
(create, start, wait and remove by Docker's API). Memory is the growth of this machine's used memory (MemTotal -
MemAvailable), divided by the sandboxes that were up; loop lag is how late a 10 ms timer of the event loop that drives
them came. A rollout of the last table goes through the runner's own code: sandbox, listener, a harness that edits one
file without asking a model, diff, and grading in a second sandbox.
"""

import argparse
import asyncio
import gc
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_ray.config import Config, SandboxConfig
from lightning_ray.harness.rollouts import Rollouts
from lightning_ray.harness.spec import RolloutSpec
from lightning_ray.proxy.endpoint import Endpoint, OpenRollout
from lightning_ray.sandbox import backend, network
from lightning_ray.sandbox.base import Backend, Limits, Sandbox, SandboxSpec
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.workspaces import Workspaces
from lightning_ray.trajectory.call import Call

TICK_S = 0.01
LIMITS = Limits(memory_mb=256, processes=32, disk_mb=64)
WARM_UP = 4
MORE = 20
"""Sandboxes that are started while others are up, to see what that costs then."""
ROLLOUTS_AT_ONCE = 16
CONTAINERS_AT_ONCE = 10
"""A daemon takes minutes for a hundred."""
TASK = Task(
    instance_id="bench", problem_statement="-", files={"a.py": "def add(a, b):\n    return a - b\n"},
    FAIL_TO_PASS=["adds"],
    grading={"module": "a.py", "cases": {"adds": {"call": "add", "args": [1, 2], "expected": 3}}},
)  # fmt: skip

Make = Callable[[SandboxSpec], Sandbox]


class Lag:
    """The longest delay of a timer while inside."""

    worst_s = 0.0

    async def __aenter__(self) -> "Lag":
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.worst_s = max(self.worst_s, time.monotonic() - before - TICK_S)


class NoProxy:
    """Stands for the proxy of a harness that asks no model: its listeners are real, and answer nobody."""

    def __init__(self) -> None:
        self._listeners: dict[str, socket.socket] = {}

    async def open(self, rollout: OpenRollout) -> Endpoint:
        return Endpoint("http://127.0.0.1:9")

    async def listen(self, rollout_id: str, pid: int, port: int) -> None:
        self._listeners[rollout_id] = await asyncio.to_thread(network.listen_inside, pid, port)

    async def finish(self, rollout_id: str) -> list[Call]:
        if listener := self._listeners.pop(rollout_id, None):
            listener.close()
        return []


def used_mb() -> float:
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(facts["MemTotal"].split()[0]) - int(facts["MemAvailable"].split()[0])) / 1024


def summary(what: str, took: list[float], ended: list[float]) -> dict[str, Any]:
    took = sorted(took)
    p99 = took[min(len(took) - 1, round(0.99 * len(took)))]
    return {"what": what, "median_ms": statistics.median(took) * 1000, "p99_ms": p99 * 1000,
            "stop_ms": statistics.median(ended) * 1000 if ended else None}  # fmt: skip


async def plain(samples: int) -> dict[str, Any]:
    took = []
    for _ in range(samples + WARM_UP):
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec("bash", "-c", "true")
        await process.wait()
        took.append(time.monotonic() - started)
    return summary("plain subprocess", took[WARM_UP:], [])


def docker_run(image: str, samples: int) -> dict[str, Any]:
    """`docker run --rm --network none IMAGE true`; what `stop` is for others is its removal."""
    from lightning_ray.sandbox import daemon

    client = daemon.client()
    took, ended = [], []
    for _ in range(samples):
        started = time.monotonic()
        host = client.create_host_config(network_mode="none")
        container = client.create_container(image, ["bash", "-c", "true"], host_config=host)["Id"]
        client.start(container)
        client.wait(container)
        took.append(time.monotonic() - started)
        started = time.monotonic()
        client.remove_container(container)
        ended.append(time.monotonic() - started)
    return summary("docker run", took, ended)


async def one_by_one(make: Make, workspace: Path, samples: int, what: str) -> dict[str, Any]:
    took, ended = [], []
    for number in range(samples + WARM_UP):
        sandbox = make(SandboxSpec(f"bench{number}", workspace, LIMITS))
        started = time.monotonic()
        await sandbox.start()
        try:
            await sandbox.exec("true", timeout_s=60)
            took.append(time.monotonic() - started)
        finally:
            started = time.monotonic()
            await sandbox.stop()
            ended.append(time.monotonic() - started)
    return summary(what, took[WARM_UP:], ended[WARM_UP:])


async def at_once(make: Make, workspace: Path, count: int, what: str) -> dict[str, Any]:
    """Start `count` together, one command in each while all are up, some more one after the other, stop all."""
    gc.collect()
    sandboxes = [make(SandboxSpec(f"many{number}", workspace, LIMITS)) for number in range(count)]
    memory, started, cpu = used_mb(), time.monotonic(), time.process_time()
    async with Lag() as lag:
        try:
            await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
            up = time.monotonic() - started
            each = (used_mb() - memory) / count
            asked = time.monotonic()
            done = await asyncio.gather(*(sandbox.exec("echo up", timeout_s=120) for sandbox in sandboxes))
            answered = time.monotonic() - asked
            if any(result.output != "up\n" for result in done):
                raise RuntimeError("a sandbox did not answer")
            more = await one_by_one(make, workspace, MORE, what)
        finally:
            stopping = time.monotonic()
            await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
            ended = time.monotonic() - stopping
    return {"what": what, "at_once": count, "start_s": up, "command_s": answered, "stop_s": ended, "mb_each": each,
            "more_median_ms": more["median_ms"], "more_p99_ms": more["p99_ms"], "loop_lag_s": lag.worst_s,
            "own_cpu_s": time.process_time() - cpu}  # fmt: skip


async def whole(make: Make, root: Path, count: int, what: str) -> dict[str, Any]:
    """Rollouts through the runner's code, `ROLLOUTS_AT_ONCE` at once."""
    config = Config(harness={"kind": "command", "command": ["sed", "-i", "s/a - b/a + b/", "a.py"]},
                    runners={"rollouts": ROLLOUTS_AT_ONCE})  # fmt: skip
    rollouts = Rollouts(config, NoProxy(), Workspaces(root), make, None, {})
    started = time.monotonic()
    async with Lag() as lag:
        records = await asyncio.gather(*(
            rollouts.run(RolloutSpec(f"r{number}", "g", TASK, "train", 0, 1.0)) for number in range(count)))
    took = time.monotonic() - started
    await rollouts.stop()
    if not all(record.passed for record in records):
        raise RuntimeError(f"a rollout failed: {next(record.reason for record in records if not record.passed)}")
    return {"what": what, "rollouts": count, "per_minute": count / took * 60, "loop_lag_s": lag.worst_s}


async def measure(settings: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0]
    chosen = await asyncio.to_thread(backend.choose, SandboxConfig())
    boxes: Backend | None = None
    if settings.image:
        boxes = await asyncio.to_thread(backend.choose, SandboxConfig(backend="container", image=settings.image))
    few = max(5, settings.samples // 4)
    with tempfile.TemporaryDirectory() as directory:
        workspaces = Workspaces(Path(directory))
        files = {f"package{number % 50}/module{number}.py": f"x = {number}\n" * 500 for number in range(settings.files)}
        tiny = workspaces.prepare(TASK)
        large = workspaces.prepare(Task(instance_id="large", problem_statement="-", files=files))
        latency = [
            await plain(settings.samples),
            await one_by_one(chosen.make, tiny, settings.samples, "bubblewrap, 1 file"),
            await one_by_one(chosen.make, large, few, f"bubblewrap, {settings.files} files"),
        ]  # fmt: skip
        many = [await at_once(chosen.make, tiny, count, "bubblewrap") for count in settings.at_once]
        rollouts = [await whole(chosen.make, Path(directory), settings.rollouts, "bubblewrap")]
        if boxes:
            latency += [await one_by_one(boxes.make, tiny, few, "container, 1 file"),
                        await asyncio.to_thread(docker_run, settings.image, few)]  # fmt: skip
            many += [await at_once(boxes.make, tiny, count, "container") for count in settings.at_once
                     if count <= CONTAINERS_AT_ONCE]
            rollouts.append(await whole(boxes.make, Path(directory), max(8, settings.rollouts // 10), "container"))
            boxes.close()
    return {"sandbox": chosen.report, "container": boxes.report if boxes else None, "cpus": os.cpu_count(),
            "load": load, "latency": latency, "many": many, "rollouts": rollouts}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print(f"{result['cpus']} CPUs, load {result['load']:.1f} before; bubblewrap limits {result['sandbox']['limits']}")
    if result["container"]:
        print(f"containers: {result['container']['daemon']}, limits {result['container']['limits']}")
    once = result["latency"][0]["median_ms"]
    print(f"\n{'start to first answer':34}{'median ms':>10}{'p99 ms':>9}{'stop ms':>9}{'x plain':>9}")
    for row in result["latency"]:
        stop = f"{row['stop_ms']:9.1f}" if row["stop_ms"] is not None else f"{'-':>9}"
        print(f"{row['what']:34}{row['median_ms']:10.1f}{row['p99_ms']:9.1f}{stop}{row['median_ms'] / once:9.1f}")
    heads = f"{'start s':>9}{'command s':>11}{'stop s':>8}{'MB each':>9}{'loop lag s':>12}{'CPU s here':>12}"
    print(f"\n{'at once':20}{'':>6}{heads}{'one more: median':>18}{'p99 ms':>8}")
    for row in result["many"]:
        print(f"{row['what']:20}{row['at_once']:6}{row['start_s']:9.2f}{row['command_s']:11.2f}{row['stop_s']:8.2f}"
              f"{row['mb_each']:9.2f}{row['loop_lag_s']:12.3f}{row['own_cpu_s']:12.2f}{row['more_median_ms']:18.1f}"
              f"{row['more_p99_ms']:8.1f}")
    print(f"\n{'rollouts, graded':20}{'count':>6}{'a minute':>10}{'loop lag s':>12}")
    for row in result["rollouts"]:
        print(f"{row['what']:20}{row['rollouts']:6}{row['per_minute']:10.0f}{row['loop_lag_s']:12.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--at-once", type=lambda text: [int(each) for each in text.split(",")],
                        default=[1, 10, 100, 1000])
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--files", type=int, default=2000, help="of the large workspace")
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--image", default="", help="container image, on the daemon that DOCKER_HOST names")
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    result = asyncio.run(measure(settings))
    show(result)
    if settings.json:
        settings.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
