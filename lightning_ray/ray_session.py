"""How a run reaches Ray: the cluster it is part of, one that it names, or a local one that ends with it."""

import math
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from lightning_ray.config import Config, ConfigError

FREE_SOON = {"free_objects_period_milliseconds": 10}
"""Ray's own setting: how long memory of the object store is kept that nobody refers to any more. By default that is a
second, in which a publish sends many buckets."""
CONNECT_TIMEOUT_S = 10.0
PLACEMENT_TIMEOUT_S = 600
"""A cluster that scales by itself needs minutes to add a node."""
PLAIN_LOOP = {"RAY_USE_UVLOOP": "0"}
"""In the environment of every actor: asyncio's own loop in place of uvloop, which Ray takes by default. Runners and
proxies open and close pipes and sockets by the hundred, some of them in other threads; uvloop's libuv registers
descriptors in batches through io_uring (UV_USE_IO_URING=0 does not change that), which is suspected of the one rollout
that was seen to stand still for minutes. It would save a proxy about 1 % of a request's CPU. On a local cluster Ray's
processes inherit this from ours: a runtime environment costs each actor a process of its own, seconds of every start
on a laptop."""
QUIET = {"log_to_driver": False, "logging_level": "ERROR"}
CONNECT_REMEDY = "Start a cluster with `ray up cluster.yaml`, or leave ray.address out to run on this machine"


def check_address(config: Config) -> None:
    """Raises `ConfigError` where nobody listens at the cluster's HOST:PORT. Ray itself would try for minutes."""
    address = _named(config)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"ray.address: {address!r} cannot be reached ({error}). {CONNECT_REMEDY}") from None


def _named(config: Config) -> str:
    return config.ray.address or os.environ.get("RAY_ADDRESS", "")


class Loose:
    """A value with actor handles in it, as an argument of an actor that restarts; what arrives there is the value.

    Handles proper are references, and Ray warns of each such actor that they may be gone when it is started again.
    Loose ones are none: whoever passes them on keeps the actors alive.
    """

    def __init__(self, value: Any) -> None:
        self._pickled = cloudpickle.dumps(value)  # here, not in `__reduce__`, where Ray would find the handles

    def __reduce__(self) -> tuple:
        return cloudpickle.loads, (self._pickled,)


def start_local(cpus: int, object_store_bytes: int, resources: Mapping[str, float] | None = None) -> None:
    """A cluster of this process alone, also where somebody else has started one on this machine: Ray would take that by
    itself."""
    os.environ.update(PLAIN_LOOP)
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, resources=dict(resources or {}),
             object_store_memory=object_store_bytes, _system_config=FREE_SOON, **QUIET)


@dataclass(frozen=True, slots=True)
class RaySession:
    ours: bool
    """Whether this run started Ray, and so ends it."""

    @classmethod
    def start(cls, config: Config) -> "RaySession":
        """Connects, or starts a local cluster. Raises `ConfigError` where the named cluster cannot be reached."""
        if ray.is_initialized():
            return cls(ours=False)
        on_term = signal.getsignal(signal.SIGTERM)
        try:
            return cls._start(config)
        finally:  # Ray's own handler leaves nobody time to end their parts
            if on_term not in (None, signal.SIG_DFL) and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_term)

    @classmethod
    def _start(cls, config: Config) -> "RaySession":
        address = _named(config)
        if address:
            try:
                ray.init(address=address, runtime_env={"env_vars": PLAIN_LOOP}, **QUIET)
            except (ConnectionError, ValueError) as error:
                raise ConfigError(f"ray.address: {address!r} cannot be reached ({error}). {CONNECT_REMEDY}") from None
            return cls(ours=True)
        runners, learner = config.runners, config.learner
        slots = (learner.ranks + config.generator.replicas * config.generator.tensor_parallel
                 + math.ceil(runners.count * runners.cpus))
        custom = Counter({name: amount * runners.count for name, amount in runners.resources.items()})
        custom.update({name: amount * (learner.ranks + config.generator.replicas)
                       for name, amount in learner.resources.items()})
        start_local(max(os.cpu_count() or 1, slots), int(config.ray.object_store_gib * 2**30), custom)
        return cls(ours=True)

    def stop(self) -> None:
        if self.ours:
            ray.shutdown()


def reserve(bundles: list[dict[str, float]], strategy: str, fields: str) -> PlacementGroup:
    """Blocks until the cluster has the room. Raises `ConfigError`, which names `fields`, where it has none."""
    placement = placement_group(bundles, strategy=strategy)
    try:
        ray.get(placement.ready(), timeout=PLACEMENT_TIMEOUT_S)
    except GetTimeoutError:
        remove_placement_group(placement)
        raise ConfigError(f"{fields}: the cluster has no room for {bundles} (it has {ray.cluster_resources()}). Lower "
                          "them, or add nodes") from None
    return placement
