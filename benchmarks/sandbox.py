"""What a sandbox costs: from start to the first command's answer, and 1, 10, 100, 1,000 of them at once.

    python benchmarks/sandbox.py [--at-once 1,10,100,1000] [--samples 40] [--files 2000] [--json FILE]

Compared with the same command in a plain subprocess, which isolates nothing. Memory is the growth of this machine's
used memory (MemTotal - MemAvailable), divided by the sandboxes that were up; loop lag is how late a 10 ms timer of the
event loop that drives them came.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning_ray.config import SandboxConfig
from lightning_ray.sandbox import backend
from lightning_ray.sandbox.base import Limits, SandboxSpec
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.workspaces import Workspaces

TICK_S = 0.01
LIMITS = Limits(memory_mb=256, processes=32, disk_mb=64)


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


def used_mb() -> float:
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(facts["MemTotal"].split()[0]) - int(facts["MemAvailable"].split()[0])) / 1024


async def plain(samples: int) -> dict[str, Any]:
    took = []
    for _ in range(samples):
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec("bash", "-c", "true")
        await process.wait()
        took.append(time.monotonic() - started)
    return {"what": "plain subprocess", **summary(took)}


async def one_by_one(make, workspace: Path, samples: int, what: str) -> dict[str, Any]:
    took, ended = [], []
    for number in range(samples):
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
    return {"what": what, **summary(took), "stop_ms": statistics.median(ended) * 1000}


def summary(took: list[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(took) * 1000, "worst_ms": max(took) * 1000}


async def at_once(make, workspace: Path, count: int) -> dict[str, Any]:
    """Start `count` together, one command in each while all are up, stop all."""
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
        finally:
            stopping = time.monotonic()
            await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
            ended = time.monotonic() - stopping
    return {"at_once": count, "start_s": up, "command_s": answered, "stop_s": ended, "mb_each": each,
            "loop_lag_s": lag.worst_s, "own_cpu_s": time.process_time() - cpu}  # fmt: skip


async def measure(settings: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0]
    chosen = await asyncio.to_thread(backend.choose, SandboxConfig())
    with tempfile.TemporaryDirectory() as directory:
        workspaces = Workspaces(Path(directory))
        small = Task(instance_id="small", problem_statement="-", files={"a.py": "x = 1\n", "b.py": "y = 2\n"})
        files = {f"package{number % 50}/module{number}.py": f"x = {number}\n" * 500 for number in range(settings.files)}
        tiny = workspaces.prepare(small)
        large = workspaces.prepare(Task(instance_id="large", problem_statement="-", files=files))
        await one_by_one(chosen.make, tiny, 4, "")
        latency = [
            await plain(settings.samples),
            await one_by_one(chosen.make, tiny, settings.samples, f"{chosen.report['backend']}, 2 files"),
            await one_by_one(chosen.make, large, max(3, settings.samples // 4),
                             f"{chosen.report['backend']}, {settings.files} files"),
        ]  # fmt: skip
        many = [await at_once(chosen.make, tiny, count) for count in settings.at_once]
    return {"sandbox": chosen.report, "cpus": os.cpu_count(), "load": load, "latency": latency,
            "many": many}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print(f"{result['cpus']} CPUs, load {result['load']:.1f} before; {result['sandbox']['backend']}, "
          f"limits {result['sandbox']['limits']}\n")
    print(f"{'start to first answer':34}{'median ms':>10}{'worst ms':>10}{'stop ms':>9}")
    for row in result["latency"]:
        stop = f"{row['stop_ms']:9.1f}" if "stop_ms" in row else f"{'-':>9}"
        print(f"{row['what']:34}{row['median_ms']:10.1f}{row['worst_ms']:10.1f}{stop}")
    heads = f"{'start s':>9}{'command s':>11}{'stop s':>8}{'MB each':>9}{'loop lag s':>12}{'CPU s here':>12}"
    print(f"\n{'at once':>8}{heads}")
    for row in result["many"]:
        print(f"{row['at_once']:8}{row['start_s']:9.2f}{row['command_s']:11.2f}{row['stop_s']:8.2f}{row['mb_each']:9.2f}"
              f"{row['loop_lag_s']:12.3f}{row['own_cpu_s']:12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--at-once", type=lambda text: [int(each) for each in text.split(",")],
                        default=[1, 10, 100, 1000])
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--files", type=int, default=2000, help="of the large workspace")
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    result = asyncio.run(measure(settings))
    show(result)
    if settings.json:
        settings.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
