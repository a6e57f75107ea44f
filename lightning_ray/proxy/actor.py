"""The proxy as a Ray actor: a thin shell around `ProxyServer`.

The actor restarts when its process dies, and Ray sends calls to it again. The new process starts itself at once,
without waiting for a call, and goes on with the rollouts of its journal directory; nobody but the harnesses' SDKs,
which ask again, notices. vLLM is imported in `start`, so that a handle costs its holder nothing.
"""

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import ray

from lightning_ray.config import PolicyConfig, ProxyConfig
from lightning_ray.proxy.endpoint import Endpoint, OpenRollout, Status
from lightning_ray.proxy.keeper import allow_descriptors
from lightning_ray.trajectory.call import Call

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Proxy:
    """HTTP endpoints for harnesses, one a rollout, and the record of every call that came through them."""

    def __init__(
        self, config: ProxyConfig, policy: PolicyConfig, model_dir: str, generators: list, journal_dir: str
    ) -> None:
        """`journal_dir` is this proxy's own; another proxy needs another one."""
        self.config = config
        self.policy = policy
        self.model_dir = Path(model_dir)
        self.generators = generators
        self.journal_dir = Path(journal_dir)
        self.server: Any = None
        self.starting = asyncio.Lock()
        here = ray.get_runtime_context()
        self.restored = here.was_current_actor_reconstructed
        if self.restored:
            here.current_actor.start.remote()

    async def start(self) -> tuple[str, int]:
        """Load the tokenizer and listen: (host, port). ConfigError for a bad model, OSError for a taken port."""
        return (await self._started()).address

    async def _started(self) -> Any:
        async with self.starting:
            if self.server is None:
                self.server = await self._start()
        return self.server

    async def _start(self) -> Any:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from lightning_ray.proxy.codec import Codec
        from lightning_ray.proxy.engine import Engine, RayGenerator
        from lightning_ray.proxy.rollouts import ProxyServer

        codec = Codec(self.model_dir, self.policy)
        engine = Engine([RayGenerator(handle) for handle in self.generators])
        server = ProxyServer(codec, engine, self.config, self.policy.name, self.journal_dir)
        allow_descriptors()
        gc.collect()
        gc.freeze()  # a million objects of imported modules, which collections need not look at again
        await server.start(restored=self.restored)
        return server

    async def open(self, rollout: OpenRollout) -> Endpoint:
        """Make an endpoint for a rollout."""
        return (await self._started()).open(rollout)

    async def listen(self, rollout_id: str, pid: int, port: int) -> None:
        """Serve the rollout on 127.0.0.1:port inside the network namespace of process `pid` on this node."""
        await (await self._started()).listen(rollout_id, pid, port)

    async def finish(self, rollout_id: str) -> list[Call]:
        """Revoke the endpoint, cancel what is in flight, return all recorded calls."""
        return await (await self._started()).finish(rollout_id)

    async def status(self, rollout_id: str) -> Status:
        """Also for a while after the rollout is finished."""
        return (await self._started()).status(rollout_id)

    async def abandon(self, names: list[str]) -> int:
        """See `ProxyServer.abandon`."""
        return await (await self._started()).abandon(names)

    async def pid(self) -> int:
        """The process that the actor runs in."""
        return os.getpid()

    async def stop(self) -> None:
        """Finish everything and leave nothing behind: call it before the actor is killed for good."""
        if self.server is not None:
            await self.server.stop()
            self.server = None
