"""How a run reaches Ray: the cluster it is part of, one that it names, or a local one that ends with it."""

import math
import os
from dataclasses import dataclass

import ray

from lightning_ray.config import Config, ConfigError

CONNECT_REMEDY = "Start a cluster with `ray up cluster.yaml`, or leave ray.address out to run on this machine"


@dataclass(frozen=True, slots=True)
class RaySession:
    ours: bool
    """Whether this run started Ray, and so ends it."""

    @classmethod
    def start(cls, config: Config) -> "RaySession":
        """Connects, or starts a local cluster. Raises `ConfigError` where the named cluster cannot be reached."""
        if ray.is_initialized():
            return cls(ours=False)
        address = config.ray.address or os.environ.get("RAY_ADDRESS")
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if address:
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, ValueError) as error:
                raise ConfigError(f"ray.address: {address!r} cannot be reached ({error}). {CONNECT_REMEDY}") from None
            return cls(ours=True)
        runners = config.runners
        slots = (config.learner.ranks + config.generator.replicas * config.generator.tensor_parallel
                 + math.ceil(runners.count * runners.cpus))
        ray.init(num_cpus=max(os.cpu_count() or 1, slots), include_dashboard=False,
                 resources={name: amount * runners.count for name, amount in runners.resources.items()},
                 object_store_memory=int(config.ray.object_store_gib * 2**30), **quiet)
        return cls(ours=True)

    def stop(self) -> None:
        if self.ours:
            ray.shutdown()
