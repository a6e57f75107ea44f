"""No sandbox at all: a bash in a temporary directory, for machines that allow no namespaces, and only where
`sandbox.allow_unsafe` was set. What a model writes runs with this process's rights: it can read and send
whatever this user can.

Commands, timeouts, output and patches work as in the other backends. The environment is scrubbed and rlimits hold per
process; nothing else separates anything. The workspace lies in the temporary directory and not at `WORKSPACE`, and
there is no listener of a rollout's own (`connect` raises).
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_ray.sandbox import bubblewrap, filesystem, limits, pack
from lightning_ray.sandbox.base import Listen, SandboxError, SandboxSpec
from lightning_ray.sandbox.local import Local, Running
from lightning_ray.sandbox.shell import Pipes, with_descendants


@dataclass(slots=True)
class Bare(Running):
    """A bash, and where it works."""

    bash: subprocess.Popen[bytes]
    directory: Path


class Unconfined(Local):
    """See `base.Sandbox`, and the warning above."""

    threads = staticmethod(bubblewrap.threads)

    async def _launcher(self) -> Callable[[], Running]:
        directory = limits.directory()
        self._workspace, self._scratch = str(directory / "testbed"), str(directory)
        return partial(_launch, self.spec, directory)

    def _end(self, running: Bare) -> None:
        daemons = {pid for pid, mark in limits.marked().items() if mark == _mark(running.directory)}
        for pid in with_descendants({running.pid, *daemons}):
            limits.kill(pid)
        running.bash.wait()
        shutil.rmtree(running.directory, ignore_errors=True)

    async def connect(self, listen: Listen) -> str:
        raise SandboxError("without a sandbox there is no network namespace: a command harness cannot be used")


def _mark(directory: Path) -> str:
    return directory.name.removeprefix(limits.PREFIX)


def _launch(spec: SandboxSpec, directory: Path) -> Bare:
    """Start bash (in a thread: it blocks)."""
    workspace = directory / "testbed"
    workspace.mkdir()
    try:
        archive = pack.open_pack(spec.workspace)
    except OSError as error:
        shutil.rmtree(directory)
        raise SandboxError(f"the workspace {spec.workspace} cannot be read: {error}") from error
    pipes, inside = Pipes.make()
    script, output, status, data = inside
    bash = subprocess.Popen(
        ["/bin/bash"], stdin=script, stdout=output, stderr=output, pass_fds=(status, data, archive), cwd=workspace,
        env={**filesystem.environment(spec), limits.MARK: _mark(directory)}, start_new_session=True,
    )  # fmt: skip
    for descriptor in (*inside, archive):
        os.close(descriptor)
    bootstrap = f"{limits.ulimits(spec.limits, {'pids'})}\n{pipes.unpacking(archive, str(workspace))}"
    return Bare(bash.pid, os.pidfd_open(bash.pid), pipes, bootstrap, bash, directory)
