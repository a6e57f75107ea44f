"""Warm worker processes of one runner: start, choose, watch, replace.

`WorkerPool.run` runs one rollout of a Python harness in the least loaded process. A process that dies takes its
rollouts with it: each raises `WorkerDied` (infrastructure, so the runner retries), and another process is started. A
rollout that is cancelled has its thread freed: its commands are refused, its endpoint is revoked by the proxy; where
the thread does not return within `CANCEL_GRACE_S`, the process gets no new rollouts and is replaced when the others
in it have ended.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ray.config import ConfigError
from lightning_ray.harness import frames
from lightning_ray.harness.spec import HarnessResult
from lightning_ray.sandbox.base import ExecResult

log = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
START_ATTEMPTS = 3
"""Starts in a row that may fail before the pool gives up."""
CANCEL_GRACE_S = 20.0
TAIL_BYTES = 8000
"""How much of a process's last output is kept for the message about its death."""

Execute = Callable[[str, str, float | None, dict[str, str]], Awaitable[ExecResult]]
"""Runs a command in the rollout's sandbox: command, cwd, timeout (s), environment."""


class WorkerDied(Exception):
    """A worker process ended while a rollout was in it, or could not be started."""


@dataclass(eq=False)
class _Run:
    future: asyncio.Future
    execute: Execute
    commands: set[asyncio.Task] = field(default_factory=set)


def worker_environment(home: str) -> dict[str, str]:
    """Everything that a worker process may know: nothing of the user's, and quiet libraries."""
    return {
        "PATH": os.defpath,
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": home,
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # its SDK retries already
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
    }


class WorkerProcess:
    """One process, seen from the runner."""

    def __init__(self, process: subprocess.Popen, home: str, reader: asyncio.StreamReader,
                 writer: asyncio.StreamWriter) -> None:
        self.ended = asyncio.Event()
        self.retiring = False
        self._process = process
        self._home = home
        self._reader = reader
        self._writer = writer
        self._runs: dict[str, _Run] = {}
        self._tail: deque[bytes] = deque()
        self._reading = asyncio.create_task(self._keep_tail())
        self._tasks = {self._reading}

    @classmethod
    async def start(cls, entry: str, scratch: Path) -> "WorkerProcess":
        """Raises `WorkerDied` where the harness cannot be imported or the process ends."""
        ours, theirs = socket.socketpair()
        home = tempfile.mkdtemp(prefix="worker-", dir=scratch)

        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-m", "lightning_ray.harness.worker", str(theirs.fileno()), entry],
                env=worker_environment(home), cwd="/", pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, home, reader, writer)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                message = await frames.receive_async(reader)
        except (TimeoutError, frames.FrameError) as error:
            await worker.kill()
            raise WorkerDied(f"a worker process did not get ready: {type(error).__name__} {error}") from error
        except BaseException:
            await worker.kill()
            raise
        if message is None or message["type"] != "ready":
            await worker.kill()
            detail = worker.last_output() if message is None else message["detail"]
            raise WorkerDied(f"importing the harness {entry!r} failed: {detail}")
        worker._tasks.add(asyncio.create_task(worker._listen()))
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def load(self) -> int:
        """Rollouts in it, those included that were cancelled and have not returned."""
        return len(self._runs)

    def last_output(self) -> str:
        return b"".join(self._tail).decode(errors="replace")[-TAIL_BYTES:].strip()

    async def run(self, rollout_id: str, request: dict[str, Any], execute: Execute) -> HarnessResult:
        if self.ended.is_set():
            raise WorkerDied(f"worker process {self.pid} has ended")
        run = _Run(asyncio.get_running_loop().create_future(), execute)
        self._runs[rollout_id] = run
        try:
            await self._send({"type": "run", "rollout": rollout_id, **request})
            return await run.future
        finally:
            if self._runs.get(rollout_id) is run:  # its thread still runs: free it
                self._cancel(rollout_id, run)

    async def kill(self) -> None:
        """End the process and everything of it. Idempotent."""
        self._writer.close()
        if self._process.poll() is None:
            self._process.kill()
        await asyncio.to_thread(self._process.wait)
        await asyncio.wait({self._reading}, timeout=1)  # its last words
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self._home, ignore_errors=True)
        self._fail_runs()
        self.ended.set()

    def _fail_runs(self) -> None:
        for run in self._runs.values():
            for task in run.commands:
                task.cancel()
            if not run.future.done():
                run.future.set_exception(WorkerDied(
                    f"worker process {self.pid} ended (exit status {self._process.poll()}). {self.last_output()}"))
                run.future.exception()  # a cancelled rollout's is awaited by nobody: not worth a complaint of asyncio's
        self._runs.clear()

    def _cancel(self, rollout_id: str, run: _Run) -> None:
        for task in run.commands:
            task.cancel()
        task = asyncio.create_task(self._free(rollout_id, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _free(self, rollout_id: str, run: _Run) -> None:
        with contextlib.suppress(OSError):  # the process is gone: `_listen` sees it too
            await self._send({"type": "cancel", "rollout": rollout_id})
        await asyncio.sleep(CANCEL_GRACE_S)
        if self._runs.get(rollout_id) is run:
            self.retiring = True
            self._end_if_retired()

    def _end_if_retired(self) -> None:
        """A process that waits for nothing but cancelled threads is of no use."""
        if self.retiring and all(run.future.done() for run in self._runs.values()):
            self._process.kill()

    async def _send(self, message: frames.Message) -> None:
        self._writer.write(frames.encode(message))
        await self._writer.drain()

    async def _listen(self) -> None:
        try:
            while (message := await frames.receive_async(self._reader)) is not None:
                run = self._runs.get(message["rollout"])
                if run is None:
                    continue
                if message["type"] == "exec":
                    task = asyncio.create_task(self._execute(run, message))
                    run.commands.add(task)
                    task.add_done_callback(run.commands.discard)
                else:
                    del self._runs[message["rollout"]]
                    if not run.future.done():
                        run.future.set_result(HarnessResult.from_dict(message))
                    self._end_if_retired()
        except frames.FrameError as error:
            log.warning("worker process %d sent something else than messages (%s): it is replaced", self.pid, error)
        finally:
            await self.kill()

    async def _execute(self, run: _Run, message: frames.Message) -> None:
        answer: frames.Message = {"type": "executed", "rollout": message["rollout"], "exec": message["exec"]}
        try:
            result = await run.execute(message["command"], message["cwd"], message["timeout"], message["env"])
        except Exception as error:  # of the sandbox, not of the command: the rollout is over, whatever the harness does
            if not run.future.done():
                run.future.set_exception(error)
            answer["error"] = f"{type(error).__name__}: {error}"
        else:
            answer |= {"output": result.output, "returncode": result.returncode, "timed_out": result.timed_out}
        with contextlib.suppress(OSError):  # the process is gone: `_listen` sees it too
            await self._send(answer)

    async def _keep_tail(self) -> None:
        """Read what the process prints, and remember the end."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout)
        try:
            while part := await reader.read(4096):
                self._tail.append(part)
                while sum(map(len, self._tail)) > 2 * TAIL_BYTES:
                    self._tail.popleft()
        finally:
            transport.close()


class WorkerPool:
    """`count` worker processes for one Python harness; their homes are below `scratch`."""

    def __init__(self, entry: str, count: int, scratch: Path) -> None:
        self._entry = entry
        self._scratch = scratch
        self._count = count
        self._workers: dict[int, WorkerProcess] = {}
        self._keepers: list[asyncio.Task] = []
        self._changed = asyncio.Event()
        self._failure: WorkerDied | None = None

    async def start(self) -> None:
        """Start all processes and wait until each has imported the harness. ConfigError where it cannot be."""
        self._keepers = [asyncio.create_task(self._keep(slot)) for slot in range(self._count)]
        while len(self._workers) < self._count:
            if self._failure is not None:
                await self.stop()
                raise ConfigError(f"harness.entry: {self._failure}. Run `python -c 'import "
                                  f"{self._entry.partition(':')[0]}'` in this environment to see why")
            await self._wait_for_change()

    async def run(self, rollout_id: str, request: dict[str, Any], execute: Execute) -> HarnessResult:
        """One rollout. `request`: task, base_url, api_key, model, settings. Raises `WorkerDied`, and what `execute`
        raised."""
        worker = await self._choose()
        return await worker.run(rollout_id, request, execute)

    async def stop(self) -> None:
        """Leave no process behind. Idempotent."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers.values()]

    async def _choose(self) -> WorkerProcess:
        while True:
            free = [worker for worker in self._workers.values() if not worker.retiring]
            if free:
                return min(free, key=lambda worker: worker.load)
            if not any(not keeper.done() for keeper in self._keepers):
                raise self._failure or WorkerDied("the worker processes were stopped")
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _keep(self, slot: int) -> None:
        """Keep one process running, until it fails to start too often in a row."""
        failures = 0
        try:
            while failures < START_ATTEMPTS:
                try:
                    worker = await WorkerProcess.start(self._entry, self._scratch)
                except WorkerDied as error:
                    failures += 1
                    if failures == START_ATTEMPTS or not self._workers:
                        self._failure = error
                    self._changed.set()
                    continue
                failures = 0
                self._workers[slot] = worker
                self._changed.set()
                try:
                    await worker.ended.wait()
                finally:
                    del self._workers[slot]
                    await worker.kill()
        finally:
            self._changed.set()
