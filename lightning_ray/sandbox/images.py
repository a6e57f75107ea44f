"""Container images: what a sandbox needs to know of one, found out once, and the check that a sandbox made of it
isolates.

Besides the probe that every backend runs (`probe.py`), a container's limits are read from outside, its endpoint is
tried, and a command that takes too long is ended: with a runtime that hides the container's processes from the host,
these do not work.
"""

import asyncio
import os
import tarfile
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ray.sandbox import daemon, filesystem, limits, network, probe
from lightning_ray.sandbox.base import (
    ENDPOINT_PORT,
    WORKSPACE,
    Sandbox,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
    running,
)

SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
ETC = ("passwd", "group", "gitconfig")
"""Files of an image's /etc that get lines of ours."""
OF_THE_DAEMON = {"container", "HOSTNAME"}
"""Environment variables that Podman and Docker set by themselves."""
NAMESPACES = ("mnt", "pid", "net", "ipc", "uts")
"""What must be a container's own. Podman's API leaves it the host's cgroup namespace where cgroups are version 1: it
then sees the name of its own cgroup, and nothing that it may write to."""
OVERDUE_S = 0.3


@dataclass(frozen=True)
class Image:
    """What a sandbox needs of an image."""

    id: str
    environment: dict[str, str]
    shell: Path
    """A copy of its bash that may be executed but not read (`filesystem.unreadable`)."""
    etc: dict[str, str]
    has_workspace: bool
    """It has a directory of its own where the workspace will lie, which is hidden then."""

    def variables(self, spec: SandboxSpec) -> dict[str, str]:
        """All environment variables of a sandbox."""
        return {"PATH": filesystem.PATH, **self.environment, **filesystem.PERSONAL, **spec.env}


class Images:
    """Images by their names. `make` makes a sandbox of an image."""

    def __init__(self, pull: bool, make: Callable[[SandboxSpec, Image], Sandbox], allow_unsafe: bool) -> None:
        self._pull = pull
        self._make = make
        self._allow_unsafe = allow_unsafe
        self._known: dict[str, Image] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="images")
        self.unsafe: dict[str, list[str]] = {}
        """What is wrong with sandboxes of an image, where that is allowed."""
        self.facts: dict[str, dict[str, Any]] = {}
        """What sandboxes of an image have: `namespaces` of their own, and the mechanism of their `limits`."""

    async def get(self, name: str) -> Image:
        """An image that was found to be usable. Its first use takes a second, and longer where it must be pulled.
        `SandboxError` names what is wrong with it."""
        if name in self._known:
            return self._known[name]
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.get_here, name)

    def get_here(self, name: str) -> Image:
        """`get`, for threads."""
        with self._locks.setdefault(name, threading.Lock()):
            if name not in self._known:
                image = self._learn(name)
                faults, self.facts[name] = probe.apart(self._look(image))
                if faults and not self._allow_unsafe:
                    raise SandboxUnavailable(f"a container of {name!r} does not isolate: {'; '.join(faults)}")
                if faults:
                    self.unsafe[name] = faults
                self._known[name] = image
            return self._known[name]

    def checkout(self, name: str, target: Path) -> None:
        """Copy the checkout that an image has at the workspace's place, without its repository. Blocks: for threads."""
        try:
            with daemon.unstarted(daemon.image(name, self._pull)["Id"]) as container:
                found = daemon.extract(container, WORKSPACE, target, without=".git")
        except (OSError, tarfile.TarError, *daemon.FAULTS) as error:
            raise SandboxError(f"the checkout in the image {name!r} cannot be copied: {error}") from error
        if not found:
            raise SandboxError(f"the image {name!r} has no checkout at {WORKSPACE}")

    def _learn(self, name: str) -> Image:
        said = daemon.image(name, self._pull)
        variables = dict(line.partition("=")[::2] for line in said["Config"].get("Env") or [])
        try:
            with daemon.unstarted(said["Id"]) as container:
                shell = next((found for path in SHELLS if (found := daemon.read(container, path))), None)
                if shell is None:
                    raise SandboxError(f"the image {name!r} has no bash (looked for {', '.join(SHELLS)})")
                has_workspace = daemon.exists(container, WORKSPACE)
                etc = {file: (daemon.read(container, f"/etc/{file}") or b"").decode("utf-8", "replace") for file in ETC}
        except daemon.FAULTS as error:
            raise SandboxError(f"the image {name!r} cannot be read: {error}") from error
        identity = said["Id"].rpartition(":")[2]
        return Image(said["Id"], variables, filesystem.unreadable(f"bash-{identity}", shell), etc, has_workspace)

    async def _look(self, image: Image) -> tuple[list[str], dict[str, Any]]:
        """What is wrong with a sandbox of this image, and what it has."""
        needed = (*NAMESPACES, "user") if daemon.has_own_user_namespace() else NAMESPACES
        with tempfile.TemporaryDirectory(prefix="lightning_ray-check-") as directory:
            (Path(directory) / "file").touch()
            async with running(self._make(SandboxSpec("check", Path(directory)), image)) as sandbox:
                variables = {*image.variables(sandbox.spec), *OF_THE_DAEMON}
                found = await probe.look(sandbox, variables, needed)
                applied = limits.applied(sandbox.pid, sandbox.spec.limits)
                found += [f"its {name} is not limited" for name, kind in applied.items() if kind == "none"]
                own = [name for name in probe.NAMESPACES if _differs(sandbox.pid, name)]
                found += await self._endpoint_faults(sandbox)
                late = await sandbox.exec("sleep 60 & sleep 60", timeout_s=OVERDUE_S)
                if not late.timed_out:
                    found.append("a command that takes too long cannot be ended")
        return found, {"namespaces": own, "limits": applied}

    async def _endpoint_faults(self, sandbox: Sandbox) -> list[str]:
        try:
            listener = await asyncio.to_thread(network.listen_inside, sandbox.pid, ENDPOINT_PORT)
        except OSError as error:
            return [f"its network namespace cannot be entered from here ({error}): run as root, or use a daemon "
                    "without root rights of your own"]
        with listener:
            done = await sandbox.exec(f": </dev/tcp/127.0.0.1/{ENDPOINT_PORT}", timeout_s=10)
        return ["its endpoint cannot be reached from inside"] if done.returncode else []

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def _differs(pid: int, namespace: str) -> bool:
    return os.readlink(f"/proc/{pid}/ns/{namespace}") != os.readlink(f"/proc/self/ns/{namespace}")
