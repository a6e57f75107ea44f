"""Everything that can be checked before anything expensive starts. Each fault is a `ConfigError` with a remedy."""

import shutil
import socket
from pathlib import Path

import ray

from lightning_ray.config import Config, ConfigError
from lightning_ray.harness.checks import check_harness
from lightning_ray.policy.source import check_policy
from lightning_ray.ray_session import check_address
from lightning_ray.sandbox.backend import check as check_sandbox
from lightning_ray.sandbox.base import SandboxUnavailable

COPY = "working_dir_files"
"""Below a directory of this name Ray unpacks what `ray job submit --working-dir` sent."""
FREE_DISK_MB = 500
"""A quickstart run writes about 100 MB; below this not even that is safe."""


def preflight(config: Config, *, policy: bool = True) -> None:
    """Raises `ConfigError` for the first fault found; starts one sandbox, otherwise costs milliseconds. `policy`:
    whether the configuration's own is used."""
    if policy:
        check_policy(config.policy)
        check_adapter(config)
    check_harness(config.harness, in_image=config.sandbox.backend != "bubblewrap")
    check_port(config.proxy.port)
    check_stays(config.run.dir)
    check_disk(config.run.dir)
    if not ray.is_initialized():  # else the run joins the Ray that this process is connected to
        check_address(config)
    if not config.runners.resources:  # else the runners are on nodes of their own, and each looks when it starts
        check_isolation(config)


def check_isolation(config: Config) -> None:
    try:
        check_sandbox(config.sandbox)
    except SandboxUnavailable as error:
        raise ConfigError(f"sandbox.backend: {config.sandbox.backend!r} cannot isolate here. {error}") from None


def check_adapter(config: Config) -> None:
    """That `learner.lora.target_modules` are layers of the model: seconds, where they are given by name."""
    lora, path = config.learner.lora, config.policy.path
    if lora is not None and path is not None and lora.target_modules != "all-linear":
        from lightning_ray.learner.adapter import check_targets

        check_targets(path.expanduser(), lora)


def check_port(port: int) -> None:
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(f"proxy.port: {port} cannot be used ({error.strerror}). Give another port, or 0 for a "
                              "free one") from None


def check_stays(directory: Path) -> None:
    if COPY in directory.expanduser().absolute().parts:
        raise ConfigError(f"run.dir: '{directory}' is inside the copy of its files that Ray made for this job, and Ray "
                          "removes it when it likes. Give an absolute path with --run.dir DIR")


def check_disk(directory: Path) -> None:
    place = directory.expanduser().absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free // 2**20
    if free < FREE_DISK_MB:
        raise ConfigError(f"run.dir: only {free} MB are free at {place}, a run needs {FREE_DISK_MB} MB. Free some, or "
                          "give another directory with --run.dir DIR")
