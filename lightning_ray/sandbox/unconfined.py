"""No sandbox at all: a bash in a temporary directory, for machines that allow no namespaces, and only where
`sandbox.allow_unsafe` was set. What a model writes runs with this process's rights: it can read and send
whatever this user can.

Commands, timeouts, output and patches work as in the other backends. The environment is scrubbed and rlimits hold per
process; nothing else separates anything. The workspace lies in the temporary directory and not at `WORKSPACE`, and
there is no listener of a rollout's own (`connect` raises).
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from lightning_ray.sandbox import filesystem, limits, pack
from lightning_ray.sandbox.base import Listen, SandboxError, SandboxSpec
from lightning_ray.sandbox.commands import Commands
from lightning_ray.sandbox.shell import Pipes, Shell, with_descendants

START_TIMEOUT_S = 60.0


class Unconfined(Commands):
    """See `base.Sandbox`, and the warning above."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._mark = ""

    async def connect(self, listen: Listen) -> str:
        raise SandboxError("without a sandbox there is no network namespace: a command harness cannot be used")

    async def start(self) -> None:
        if self._directory is not None:
            raise SandboxError("a sandbox is started once")
        self._directory = Path(tempfile.mkdtemp(prefix=f"{limits.PREFIX}{limits.owner()}."))
        self._mark = self._directory.name.removeprefix(limits.PREFIX)
        self._workspace, self._scratch = str(self._directory / "testbed"), str(self._directory)
        os.mkdir(self._workspace)
        ends = [os.pipe2(os.O_CLOEXEC) for _ in range(4)]
        (script_in, script), (output, output_in), (status, status_in), (data_in, data) = ends
        for descriptor in (script, output, status, data):
            os.set_blocking(descriptor, False)
        drain = os.open(f"/proc/self/fd/{data_in}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        pipes = Pipes(script, output, status, data, drain, status_in, data_in)
        self._process = subprocess.Popen(
            ["/bin/bash"], stdin=script_in, stdout=output_in, stderr=output_in, pass_fds=(status_in, data_in),
            cwd=self._workspace, env={**filesystem.environment(self.spec), limits.MARK: self._mark},
            start_new_session=True,
        )  # fmt: skip
        for descriptor in (script_in, output_in, status_in, data_in):
            os.close(descriptor)
        handle = os.pidfd_open(self._process.pid)
        self._shell = Shell(pipes, self._process.pid, handle, self.spec.limits.output_bytes)
        await self._shell.bootstrap(limits.ulimits(self.spec.limits, {"pids"}), START_TIMEOUT_S)
        with open(pack.open_pack(self.spec.workspace), "rb") as file:
            done = await self._shell.run("tar -xf - --no-same-owner", timeout_s=START_TIMEOUT_S, stdin=file.read())
        if done.returncode:
            await self.stop()
            raise SandboxError(f"the workspace {self.spec.workspace} cannot be unpacked: {done.output}")

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        daemons = {pid for pid, mark in limits.marked().items() if mark == self._mark}
        for pid in with_descendants({process.pid, *daemons}):
            limits.kill(pid)
        await asyncio.to_thread(process.wait)
        await self._shell.close()
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
