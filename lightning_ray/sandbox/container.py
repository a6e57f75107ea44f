"""The container sandbox: one container each, through Docker's API (Docker or Podman), of the task's own image.

No network but its loopback, no capability, no new privileges, the same system call filter as under bubblewrap, limits
of memory, processes and CPU, a read-only root, and a tmpfs of limited size for each writable place. Its first process
is a bash that is driven through pipes (`shell.py`, `fifos.py`), so that a command costs what it costs under bubblewrap
and no call of the daemon. Its user is nobody else's: an id of its own where the daemon runs as root, else one of the
daemon's user namespace.

`pid` is the first process inside: a listener in its network namespace is the only way out (`network.listen_inside`).
A container ends by itself when the process that started it is gone; `daemon.janitor` removes what is left of it.
"""

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from docker.types import Mount

from lightning_ray.config import SandboxConfig
from lightning_ray.sandbox import daemon, filesystem, limits, pack, seccomp, uids
from lightning_ray.sandbox.base import WORKSPACE, SandboxError, SandboxSpec, SandboxUnavailable
from lightning_ray.sandbox.fifos import Fifos, redirections
from lightning_ray.sandbox.images import Image, Images
from lightning_ray.sandbox.local import START_TIMEOUT_S, Local, Running

log = logging.getLogger(__name__)

PIPES = "/.pipes"
"""Where the pipes' directory is mounted inside; empty once the shell has them."""
SCRATCH = "/.scratch"
"""Not /run: runc before 1.2 gives a tmpfs the mode of the image's directory there."""
GIT = "[user]\n\tname = {0}\n\temail = {0}@sandbox\n[safe]\n\tdirectory = *\n[core]\n\tpager = cat\n"
"""Appended to the image's /etc/gitconfig: the workspace is a tmpfs whose top belongs to root."""


@dataclass(slots=True)
class Held(Running):
    """A container and what the host holds for it."""

    container: str
    """Its name."""
    uid: int | None
    directory: Path


class Containers:
    """Makes sandboxes of one configuration, and knows the images that they are made of."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.names: set[str] = set()
        """Of containers that may be there."""
        self.images = Images(config.container.pull == "missing", lambda spec, image: Container(spec, self, image),
                             config.allow_unsafe)

    def make(self, spec: SandboxSpec) -> "Container":
        return Container(spec, self)

    def report(self) -> dict[str, Any]:
        """Checks the daemon and the default image, and says what sandboxes are. `SandboxUnavailable`."""
        runtime = self.config.container.runtime
        try:
            if runtime and daemon.is_podman():
                raise SandboxUnavailable(
                    f"sandbox.container.runtime: {runtime!r} is not used: Podman's API takes no runtime. Name it in "
                    "the service's containers.conf ([engine] runtime) and leave this empty")
            image = self.images.get_here(self.config.image)
            facts: dict[str, Any] = {
                "backend": "container", "daemon": daemon.name(), "image": f"{self.config.image} ({image.id})",
                "runtime": runtime or "the daemon's",
                "user": "user namespace" if daemon.has_own_user_namespace() else "own uid", "system_calls": "seccomp",
                **self.images.facts[self.config.image],
            }  # fmt: skip
        except SandboxUnavailable:
            raise
        except (SandboxError, *daemon.FAULTS) as error:
            raise SandboxUnavailable(f"no container can be started: {error}") from error
        return {**facts, "unsafe": self.images.unsafe} if self.images.unsafe else facts

    def close(self) -> None:
        """Remove what could not be removed when its sandbox stopped. No sandbox is used any more."""
        self.images.close()
        for name in sorted(self.names):
            daemon.remove(name)
            self.names.discard(name)
            log.warning("removed the container %s, which its sandbox had left behind", name)


class Container(Local):
    """See `base.Sandbox`."""

    _scratch = SCRATCH
    threads = staticmethod(daemon.threads)

    def __init__(self, spec: SandboxSpec, containers: Containers, image: Image | None = None) -> None:
        """`image`: of this one and no other, unchecked."""
        super().__init__(spec)
        self._containers = containers
        self._image = image

    async def _launcher(self) -> Callable[[], Running]:
        config = self._containers.config
        image = self._image or await self._containers.images.get(self.spec.image or config.image)
        return partial(_launch, self.spec, image, config.container.runtime, self._containers.names)

    def _end(self, running: Held) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(running.process, signal.SIGKILL)
        try:
            daemon.remove(running.container)
            self._containers.names.discard(running.container)
            if running.uid is not None and (owners := uids.of_this_process()):
                owners.give_back(running.uid)
        finally:
            shutil.rmtree(running.directory, ignore_errors=True)


def _launch(spec: SandboxSpec, image: Image, runtime: str, names: set[str]) -> Held:
    """Start the container (in a thread: it blocks). Its name is in `names` for as long as it may be there."""
    directory = limits.directory()
    owners = None if daemon.has_own_user_namespace() else uids.of_this_process()
    if owners is None and not daemon.has_own_user_namespace():
        shutil.rmtree(directory)
        raise SandboxUnavailable("the container daemon runs as root and this process does not: run as root, or use a "
                                 "daemon without root rights of your own")
    uid = owners.take() if owners else None
    name = f"{limits.PREFIX}{limits.owner()}.{limits.unique(spec.name)}"
    fifos = None
    names.add(name)
    try:
        fifos = Fifos(directory / "pipes")
        settings = _settings(spec, image, runtime, directory, filesystem.UID if uid is None else uid)
        container = daemon.client().create_container_from_config(settings, name)["Id"]
        daemon.client().start(container)
        fifos.wait_ready(START_TIMEOUT_S, lambda: _ended(container))
        if image.has_workspace:
            _open_workspace(container)
        archive = pack.open_pack(spec.workspace)
        try:
            fifos.unpack(archive, WORKSPACE, START_TIMEOUT_S)
        finally:
            os.close(archive)
        pid = daemon.client().inspect_container(container)["State"]["Pid"]
        process = _open_process(pid, container)
    except BaseException as error:
        said = fifos.pipes.said() if fifos else ""
        daemon.remove(name)
        names.discard(name)
        if fifos:
            fifos.close()
        if owners and uid is not None:
            owners.give_back(uid)
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, (OSError, SandboxError, *daemon.FAULTS)) and not isinstance(error, SandboxUnavailable):
            detail = f"{error} {said}".strip()
            raise SandboxError(f"the sandbox {spec.name} cannot be started: {detail}") from error
        raise
    bootstrap = f"{limits.ulimits(spec.limits, set(limits.CONTROLLERS))}; true"
    return Held(pid, process, fifos.pipes, bootstrap, name, uid, directory)


def _settings(spec: SandboxSpec, image: Image, runtime: str, directory: Path, uid: int) -> dict[str, Any]:
    """The container, as Docker's API is asked for it."""
    client = daemon.client()
    disk, scratch = spec.limits.disk_mb * 2**20, filesystem.SCRATCH_BYTES
    memory = spec.limits.memory_mb * 2**20
    empty = ",notmpcopyup" if daemon.is_podman() else ""
    host = client.create_host_config(
        network_mode="none", cap_drop=["ALL"], read_only=True, ipc_mode="private", cgroupns="private",
        security_opt=["no-new-privileges", f"seccomp={_profile()}"], runtime=runtime or None,
        mem_limit=memory, memswap_limit=memory, pids_limit=spec.limits.processes,
        nano_cpus=round(spec.limits.cpus * 1e9), shm_size=scratch,
        tmpfs={place: f"rw,exec,nosuid,nodev,size={size},mode=1777{empty}" for place, size in
               {WORKSPACE: disk, "/tmp": disk, "/var/tmp": scratch, "/run": scratch, SCRATCH: scratch}.items()},
        mounts=[Mount(target, str(source), type="bind", read_only=True)
                for target, source in _mounts(spec, image, directory, uid).items()],
    )  # fmt: skip
    enter = f"cd {WORKSPACE}; unset OLDPWD"  # the daemon itself would make the directory, with a mode that stays
    return client.create_container_config(
        image.id, None, user=f"{uid}:{uid}", hostname="sandbox", working_dir="/", host_config=host,
        environment=image.variables(spec), labels=daemon.labels(),
        entrypoint=[filesystem.SHELL, "-c", f"{enter}; exec {filesystem.SHELL} {redirections(PIPES)}"],
    )  # fmt: skip


def _open_workspace(container: str) -> None:
    """Make the workspace's tmpfs writable where it has the mode of the image's directory there (see `SCRATCH`): its
    owner is root, whom no capability is needed for that."""
    client = daemon.client()
    command = client.exec_create(container, ["chmod", "1777", WORKSPACE], user="0:0")["Id"]
    said = client.exec_start(command)
    if client.exec_inspect(command)["ExitCode"]:
        raise SandboxError(f"{WORKSPACE} cannot be made writable: {said.decode('utf-8', 'replace')}")


def _mounts(spec: SandboxSpec, image: Image, directory: Path, uid: int) -> dict[str, Path]:
    """What is shown read-only inside, by target."""
    lines = {"passwd": f"{filesystem.USER}:x:{uid}:{uid}:{filesystem.USER}:/tmp:/bin/bash\n",
             "group": f"{filesystem.USER}:x:{uid}:\n", "gitconfig": GIT.format(filesystem.USER)}  # fmt: skip
    mounts = {PIPES: directory / "pipes", filesystem.SHELL: image.shell}
    for name, text in image.etc.items():
        path = directory / name
        path.write_text(f"{text.rstrip()}\n{lines[name]}".lstrip())
        path.chmod(0o644)
        mounts[f"/etc/{name}"] = path
    for mount in spec.mounts:
        mount.source.stat()  # the daemon's own message would not name it
        mounts[mount.target] = mount.source.absolute()
    return mounts


def _profile() -> str:
    """The system call filter, as this daemon takes it."""
    text = json.dumps(seccomp.profile())
    if not daemon.is_podman():
        return text
    path = filesystem.own_directory() / "seccomp.json"
    if not path.exists():
        aside = path.with_name(f"seccomp.{secrets.token_hex(4)}")
        aside.write_text(text)
        aside.rename(path)
    return str(path)


def _ended(container: str) -> str:
    """Why a container that does not come up never will, or nothing."""
    state = daemon.client().inspect_container(container)["State"]
    if state["Running"] or state["Status"] in ("created", "initialized"):
        return ""
    said = daemon.client().logs(container, tail=20).decode("utf-8", "replace").strip()
    return f"it ended at once with status {state['ExitCode']}: {said or state.get('Error')}"


def _open_process(pid: int, container: str) -> int:
    """A pidfd of the container's first process, where that is a process of this machine's."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if container in Path(f"/proc/{pid}/cgroup").read_text():
                return process
        os.close(process)
    raise SandboxUnavailable(
        f"process {pid} of this machine is not the container's, as its daemon says: the daemon must run on this "
        "machine, and a runner that is itself in a container needs the host's pid namespace")
