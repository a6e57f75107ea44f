"""The proxy as a Ray actor: a thin shell around `ProxyServer`."""

import logging
from pathlib import Path

import ray

from lightning_ray.config import PolicyConfig, ProxyConfig
from lightning_ray.proxy.endpoint import Endpoint, OpenRollout
from lightning_ray.trajectory.call import Call

logger = logging.getLogger(__name__)


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Proxy:
    """HTTP endpoints for harnesses, one a rollout, and the record of every call that came through them."""

    def __init__(
        self, config: ProxyConfig, policy: PolicyConfig, model_dir: str, generators: list, journal_dir: str
    ) -> None:
        self.config = config
        self.policy = policy
        self.model_dir = Path(model_dir)
        self.generators = generators
        self.journal_dir = Path(journal_dir)
        self.server = None

    async def start(self) -> tuple[str, int]:
        """Load the tokenizer and listen: (host, port). ConfigError for a bad model, OSError for a taken port."""
        if self.server is None:
            from lightning_ray.proxy.codec import Codec
            from lightning_ray.proxy.engine import Engine, RayGenerator
            from lightning_ray.proxy.server import ProxyServer

            codec = Codec(self.model_dir, self.policy)
            engine = Engine([RayGenerator(handle) for handle in self.generators])
            server = ProxyServer(codec, engine, self.config, self.policy.name)
            await server.start()
            self.server = server
        return self.server.address

    async def open(self, rollout: OpenRollout) -> Endpoint:
        """Make an endpoint for a rollout."""
        return self.server.open(rollout)

    async def listen(self, rollout_id: str, pid: int, port: int) -> None:
        """Serve the rollout on 127.0.0.1:port inside the network namespace of process `pid` on this node."""
        await self.server.listen(rollout_id, pid, port)

    async def finish(self, rollout_id: str) -> list[Call]:
        """Revoke the endpoint, cancel what is in flight, return all recorded calls."""
        return await self.server.finish(rollout_id)
