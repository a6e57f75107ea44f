"""What every sandbox whose processes run on this machine has in common: it is started and ended in threads, since both
block, and a bash inside is driven through pipes in between (`shell.py`).
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lightning_ray.sandbox.base import (
    ENDPOINT_PORT,
    ENDPOINT_URL,
    WORKSPACE,
    Listen,
    SandboxDied,
    SandboxError,
    SandboxSpec,
)
from lightning_ray.sandbox.commands import Commands
from lightning_ray.sandbox.shell import Pipes, Shell, turn

START_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Running:
    """The first process inside, and its pipes. Backends add what else they hold."""

    pid: int
    process: int
    """pidfd of `pid`."""
    pipes: Pipes
    bootstrap: str
    """What bash must be told first; status 0, or what it says is why the sandbox cannot be used."""

    def close(self) -> None:
        """Give back what a `Shell` would close, where there is none yet."""
        self.pipes.close()
        os.close(self.process)


class Local(Commands, ABC):
    """See `base.Sandbox`. Belongs to the event loop that started it."""

    _workspace = WORKSPACE
    threads: Callable[[], ThreadPoolExecutor]
    """Where it is started and ended."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self._running: Any = None
        self._stopped = False
        self._ending: asyncio.Task[None] | None = None

    @abstractmethod
    async def _launcher(self) -> Callable[[], Running]:
        """What starts the processes, in a thread. It raises `SandboxError` and leaves nothing then."""

    @abstractmethod
    def _end(self, running: Running) -> None:
        """Kill all of it and wait until it is gone (in a thread). What `Running` itself has stays open."""

    @property
    def pid(self) -> int:
        """The first process inside, as the host numbers it."""
        if self._running is None:
            raise SandboxError("the sandbox is not running")
        return self._running.pid

    async def start(self) -> None:
        if self._stopped or self._running:
            raise SandboxError("a sandbox is started once")
        launch = asyncio.get_running_loop().run_in_executor(self.threads(), await self._launcher())
        try:
            running = await asyncio.shield(launch)
        except asyncio.CancelledError:
            launch.add_done_callback(self._abandon)
            raise
        self._running = running
        self._shell = Shell(running.pipes, running.pid, running.process, self.spec.limits.output_bytes)
        try:
            ready = await self._shell.bootstrap(running.bootstrap, START_TIMEOUT_S)
            if ready.returncode:
                raise SandboxError(f"the workspace {self.spec.workspace} does not fit into the sandbox: {ready.output}")
        except SandboxDied as error:
            await self.stop()
            raise SandboxError(f"the sandbox {self.spec.name} cannot be started: {error}") from error
        except BaseException:
            await self.stop()
            raise

    def _abandon(self, launch: "asyncio.Future[Running]") -> None:
        """A start whose caller was cancelled: end what it started, as soon as it has."""
        if not launch.cancelled() and launch.exception() is None:
            self.threads().submit(self._discard, launch.result())

    def _discard(self, running: Running) -> None:
        self._end(running)
        running.close()

    async def connect(self, listen: Listen) -> str:
        await listen(self.pid, ENDPOINT_PORT)
        return ENDPOINT_URL

    async def stop(self) -> None:
        self._stopped = True
        running, self._running = self._running, None
        if running is not None:
            self._ending = asyncio.create_task(self._finish(running))
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _finish(self, running: Running) -> None:
        self._shell.dead = True
        await turn()
        self._shell.kill()
        try:
            await asyncio.get_running_loop().run_in_executor(self.threads(), self._end, running)
        finally:
            await self._shell.close()
