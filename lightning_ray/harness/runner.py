"""Runner: the Ray actor that holds many rollouts at once on one node. A thin shell around `harness/rollouts.py`.

`start` checks the sandbox (fail-closed), removes what dead runners left, and warms the worker processes. An actor that
Ray started again after its process died does the same at its first rollout. `run` never raises for anything that a
rollout can do. `stop` leaves no process behind.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle

from lightning_ray.config import Config
from lightning_ray.harness import stages
from lightning_ray.harness.pool import WorkerPool
from lightning_ray.harness.rollouts import Rollouts
from lightning_ray.harness.spec import RolloutSpec
from lightning_ray.harness.stages import Attempt, Failure
from lightning_ray.proxy.endpoint import Endpoint, OpenRollout, Status
from lightning_ray.sandbox import backend, filesystem, limits
from lightning_ray.sandbox.base import Backend
from lightning_ray.scratch import Scratch, sweep
from lightning_ray.tasks.workspaces import Workspaces
from lightning_ray.trajectory.call import Call, Trajectory

log = logging.getLogger(__name__)

MAX_CONCURRENCY = 10_000
"""Rollouts that may wait at one runner; `runners.rollouts` says how many run."""


class ProxyActor:
    """A `Proxy` actor as a `ProxyClient`."""

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    async def open(self, rollout: OpenRollout) -> Endpoint:
        return await self._handle.open.remote(rollout)

    async def listen(self, rollout_id: str, pid: int, port: int) -> None:
        await self._handle.listen.remote(rollout_id, pid, port)

    async def finish(self, rollout_id: str) -> list[Call]:
        return await self._handle.finish.remote(rollout_id)

    async def status(self, rollout_id: str) -> Status:
        return await self._handle.status.remote(rollout_id)


@ray.remote(max_concurrency=MAX_CONCURRENCY)
class Runner:
    """One or a few per CPU node, each with a proxy on the same node."""

    def __init__(self, config: Config, proxy: ActorHandle) -> None:
        self._config = config
        self._proxy = ProxyActor(proxy)
        self._starting: asyncio.Task[Rollouts] | None = None
        self._pool: WorkerPool | None = None
        self._scratch: Scratch | None = None
        self._backend: Backend | None = None
        self._facts: dict[str, Any] = {}
        self._janitor: Callable[[], list[str]] = limits.janitor

    async def start(self) -> dict[str, Any]:
        """What the sandbox is (`sandbox.backend.report`). Raises `SandboxUnavailable` or `ConfigError`."""
        await self._ready()
        return self._facts

    async def run(self, spec: RolloutSpec) -> Trajectory:
        """One rollout, end to end."""
        try:
            rollouts = await self._ready()
        except Exception as error:
            failure = Failure("infra", "init", f"the runner could not start: {stages.describe(error)}")
            return stages.trajectory(spec, [Attempt(failure=failure)], {})
        return await rollouts.run(spec)

    async def stop(self) -> None:
        """End every rollout, sandbox and process. Idempotent."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            (rollouts,) = await asyncio.gather(starting, return_exceptions=True)
            if isinstance(rollouts, Rollouts):
                await rollouts.stop()
        if self._pool is not None:
            await self._pool.stop()
        if self._scratch is not None:
            self._scratch.remove()
        await asyncio.to_thread(_clean_up, self._janitor)
        if self._backend is not None:
            await asyncio.to_thread(self._backend.close)
        await asyncio.to_thread(filesystem.remove_own_directory)

    async def _ready(self) -> Rollouts:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Rollouts:
        config = self._config
        chosen = self._backend = await asyncio.to_thread(backend.choose, config.sandbox, config.run.name)
        self._facts, self._janitor = chosen.report, chosen.janitor
        await asyncio.to_thread(_clean_up, self._janitor)
        self._scratch = Scratch()
        if config.harness.kind == "python":
            self._pool = WorkerPool(config.harness.entry, config.harness.workers, self._scratch.path)
            await self._pool.start()
        workspaces = Workspaces(self._scratch.path / "workspaces", chosen.checkout)
        return Rollouts(config, self._proxy, workspaces, chosen.make, self._pool,
                        self._facts, chosen.starts_at_once)


def _clean_up(janitor: Callable[[], list[str]]) -> None:
    """Remove what runs that are dead left on this machine, and say so: nothing should ever be left."""
    left = janitor() + [f"directory {path}" for path in sweep()]
    if left:
        log.warning("removed what dead runs had left behind: %s", ", ".join(left))
