"""The pipes of a sandbox's shell (see `shell.py`) where its processes are started by somebody else, a container daemon:
FIFOs in a directory that is mounted inside.

The shell inside opens them in its first moment; then they are removed, and what it and the host hold are ordinary
pipes that nothing else inside can open. When the host's process ends, the shell reads the end of its script, and ends.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from lightning_ray.sandbox.base import SandboxError
from lightning_ray.sandbox.shell import Pipes, ready

SCRIPT, OUTPUT, STATUS, DATA = "script", "output", "status", "data"
INSIDE_STATUS, INSIDE_DATA = 3, 4
"""The shell's numbers of these two."""
READY = b"ready\n"
GLANCE_S = 0.2
"""How often a shell that does not come up is looked after."""


def redirections(directory: str) -> str:
    """For the shell's command line: how it opens the pipes, which lie at `directory` inside."""
    return (f"<{directory}/{SCRIPT} >{directory}/{OUTPUT} 2>&1 "
            f"{INSIDE_STATUS}>{directory}/{STATUS} {INSIDE_DATA}<{directory}/{DATA}")


class Fifos:
    """The host's ends. All methods block: for threads."""

    def __init__(self, directory: Path) -> None:
        """`directory` is made. Whoever can look into it can open the pipes, so it belongs below one of mode 0700."""
        self._directory = directory
        directory.mkdir()
        directory.chmod(0o755)
        for name in (SCRIPT, OUTPUT, STATUS, DATA):
            os.mkfifo(directory / name)
            (directory / name).chmod(0o666)  # the user inside is another one

        def end(name: str, flags: int) -> int:
            return os.open(directory / name, flags | os.O_NONBLOCK | os.O_CLOEXEC)

        output, status, drain = (end(name, os.O_RDONLY) for name in (OUTPUT, STATUS, DATA))
        self._holders = [end(name, os.O_RDWR) for name in (SCRIPT, DATA)]  # so that nobody's opening blocks
        self.pipes = Pipes(end(SCRIPT, os.O_WRONLY), output, status, end(DATA, os.O_WRONLY), drain, INSIDE_STATUS,
                           INSIDE_DATA)
        """For a `Shell`, which closes them from then on."""

    def wait_ready(self, timeout_s: float, fault: Callable[[], str]) -> None:
        """Until the shell has opened its ends, which are then private. `fault` says why it never will, or nothing."""
        os.write(self.pipes.script, b"echo ready >&%d\n" % INSIDE_STATUS)
        deadline = time.monotonic() + timeout_s
        while not ready(self.pipes.status, select.POLLIN, GLANCE_S):
            if reason := fault():
                raise SandboxError(reason)
            if time.monotonic() > deadline:
                raise SandboxError(f"no shell came up inside within {timeout_s:g} s")
        if os.read(self.pipes.status, len(READY)) != READY:
            raise SandboxError("the shell inside died at its start")
        while self._holders:
            os.close(self._holders.pop())
        for name in (SCRIPT, OUTPUT, STATUS, DATA):
            (self._directory / name).unlink()

    def unpack(self, archive: int, target: str, timeout_s: float) -> None:
        """Have the shell unpack a tar archive, given as a file descriptor of a regular file, into a directory."""
        size = os.fstat(archive).st_size
        private = f"{INSIDE_STATUS}>&- {INSIDE_DATA}<&-"
        script = (f"head -c {size} <&{INSIDE_DATA} {private} | tar -xf - -C {target} --no-same-owner {private}\n"
                  f"echo unpacked $? >&{INSIDE_STATUS}\n")  # fmt: skip
        with contextlib.suppress(BrokenPipeError):  # the end of file on the status pipe tells
            os.write(self.pipes.script, script.encode())
        deadline = time.monotonic() + timeout_s
        offset = 0
        while not ready(self.pipes.status, select.POLLIN, 0.0 if offset < size else GLANCE_S):
            if offset < size and ready(self.pipes.data, select.POLLOUT, GLANCE_S):
                with contextlib.suppress(BlockingIOError):
                    offset += os.sendfile(self.pipes.data, archive, offset, size - offset)
            if time.monotonic() > deadline:
                raise SandboxError(f"unpacking into {target} took longer than {timeout_s:g} s")
        answer = os.read(self.pipes.status, 100)
        if not answer:
            raise SandboxError("the shell inside died while the workspace was unpacked")
        if answer != b"unpacked 0\n":
            raise SandboxError(f"the workspace does not fit into the sandbox: {self.pipes.said()}")

    def close(self) -> None:
        """Where no `Shell` has the pipes."""
        for descriptor in self._holders:
            os.close(descriptor)
        self.pipes.close()
