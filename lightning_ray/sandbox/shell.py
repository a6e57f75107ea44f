"""Commands in a sandbox that already runs: a plain bash inside reads a script from a pipe, one line per command.

Each command is `bash -c COMMAND`, a child of that bash, with stdout and stderr merged into one pipe and stdin from
/dev/null (or from a pipe that the host feeds). The exit status comes on a pipe of its own, with a number and a nonce,
so nothing that a command prints can be taken for it. The pipes:

    script   host -> bash           what to do next
    output   command -> host        everything printed; beyond the cap it is read and thrown away, slowly
    status   bash -> host           "NONCE NUMBER EXIT-STATUS"; at end of file the sandbox is dead
    data     host -> command        stdin, exactly as many bytes as announced

Bash is process 1 of its pid namespace: signals from inside do not reach it, and it reaps orphans. A timeout kills what
the command started, and only that, from outside.
"""

import array
import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import select
import shlex
import signal
import termios
import time
import weakref
from dataclasses import dataclass

from lightning_ray.sandbox.base import ExecResult, SandboxDied
from lightning_ray.sandbox.commands import Runs

CHUNK = 65536
FLOOD_PAUSE_S = 0.002
"""Pause between reads of output that is thrown away anyway: 32 MB/s, so a flood does not take the host's CPU."""
LONGEST_ARGUMENT = 120_000
"""Linux takes at most 128 KiB for one argument of a program."""
KILL_TIMEOUT_S = 5.0
KILL_PAUSE_S = 0.005
_TURNS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]" = weakref.WeakKeyDictionary()
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(slots=True)
class Pipes:
    """The host's ends, non-blocking, and the numbers of bash's ends as bash sees them."""

    script: int
    output: int
    status: int
    data: int
    data_inside: int
    """Host's copy of the reading end of `data`, to drain what a command did not read."""
    bash_status: int
    bash_data: int

    @classmethod
    def make(cls) -> tuple["Pipes", tuple[int, int, int, int]]:
        """New pipes, and bash's ends: of script, output, status, data."""
        ends = [os.pipe2(os.O_CLOEXEC) for _ in range(4)]
        (script_in, script), (output, output_in), (status, status_in), (data_in, data) = ends
        for descriptor in (script, output, status, data):
            os.set_blocking(descriptor, False)
        drain = os.open(f"/proc/self/fd/{data_in}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        pipes = cls(script, output, status, data, drain, status_in, data_in)
        return pipes, (script_in, output_in, status_in, data_in)

    def unpacking(self, archive: int, target: str) -> str:
        """What bash is told to unpack a tar archive that it has inherited as descriptor `archive`."""
        return (f"tar -xf - -C {target} --no-same-owner <&{archive} {archive}<&- {self.bash_status}<&- "
                f"{self.bash_data}<&-\ndone=$?; exec {archive}<&-; (exit $done)")

    def said(self) -> str:
        """What lies in the output pipe, for a message."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.output, 4096).decode("utf-8", "replace").strip()
        return ""

    def close(self) -> None:
        for descriptor in (self.script, self.output, self.status, self.data, self.data_inside):
            os.close(descriptor)


class Shell(Runs):
    """Runs one command after the other; concurrent callers wait for their turn. Belongs to one event loop."""

    def __init__(self, pipes: Pipes, pid: int, process: int, output_bytes: int) -> None:
        """`pid` is bash's on the host, `process` a pidfd of it (a number alone may be used again). `close` closes that
        and the pipes."""
        self._pipes = pipes
        self._pid = pid
        self._process = process
        self._output_bytes = output_bytes
        self._nonce = secrets.token_hex(16)
        self._number = 0
        self._turn = asyncio.Lock()
        self._status = b""
        self.dead = False

    async def run_raw(self, command: str, timeout_s: float, env: dict[str, str] | None = None, stdin: bytes = b"",
                      output_bytes: int | None = None) -> tuple[bytes, int, bool, bool]:
        """Output bytes, exit status, whether it timed out, whether output was thrown away.

        A caller that is cancelled leaves the sandbox in the middle of a command: it is killed, and dead from then on.
        """
        async with self._turn:
            if self.dead:
                raise SandboxDied("the sandbox is not running")
            try:
                return await self._run(command, timeout_s, env or {}, stdin, output_bytes or self._output_bytes)
            except asyncio.CancelledError:
                self.kill()
                raise

    async def bootstrap(self, script: str, timeout_s: float) -> ExecResult:
        """Run lines in the shell itself, before any command. From then on the shell says nothing of its own ("Killed"
        and the like): all output is a command's."""
        async with self._turn:
            self._number += 1
            done = (f"\nstatus=$?; exec 2>/dev/null\n"
                    f"echo {self._nonce} {self._number} $status >&{self._pipes.bash_status}\n")
            raw, returncode, timed_out, truncated = await self._drive(
                (script + done).encode(), b"", timeout_s, self._output_bytes
            )
            return ExecResult(raw.decode("utf-8", "replace"), returncode, timed_out, truncated)

    def kill(self) -> None:
        """Kill the whole sandbox at once."""
        self.dead = True
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the sandbox, and close its pipes and its pidfd as soon as the command that runs has noticed: a number
        that is closed before may be another sandbox's by then."""
        self.kill()
        async with self._turn:
            self._pipes.close()
            os.close(self._process)
            self._process = -1

    def _script(self, command: str, env: dict[str, str], stdin_bytes: int) -> bytes:
        variables = assignments(env)
        pipes = self._pipes
        private = f"{pipes.bash_data}<&- {pipes.bash_status}>&-"
        command = command.replace("\0", "")
        if len(command.encode("utf-8", "replace")) < LONGEST_ARGUMENT:
            body = " ".join([*variables, f"bash -c {shlex.quote(command)}"])
        else:
            exports = "".join(f"export {variable}; " for variable in variables)
            body = f"( {exports}eval {shlex.quote(command)} )"
        if stdin_bytes:
            line = f"head -c {stdin_bytes} <&{pipes.bash_data} {private} | {body} 2>&1 {private}"
        else:
            line = f"{body} </dev/null 2>&1 {private}"
        line += f"\necho {self._nonce} {self._number} $? >&{pipes.bash_status}\n"
        return line.encode("utf-8", "replace")

    async def _run(self, command: str, timeout_s: float, env: dict[str, str], stdin: bytes,
                   cap: int) -> tuple[bytes, int, bool, bool]:
        self._number += 1
        self._throw_away(self._pipes.output)  # what daemons said between commands
        return await self._drive(self._script(command, env, len(stdin)), stdin, timeout_s, cap)

    async def _drive(self, script: bytes, stdin: bytes, timeout_s: float, cap: int) -> tuple[bytes, int, bool, bool]:
        await turn()
        before = _children(self._pid)
        output = _Output(self._pipes.output, cap)
        writers = [_Writer(self._pipes.script, script)]
        if stdin:
            writers.append(_Writer(self._pipes.data, stdin))
        timed_out = False
        try:
            try:
                returncode = await asyncio.wait_for(self._finished(), timeout_s)
            except TimeoutError:
                timed_out = True
                returncode = await self._stop_command(before)
        except SandboxDied as died:
            output.rest()
            said = bytes(output.kept[-500:]).decode("utf-8", "replace").strip()
            raise SandboxDied(f"{died} (last output: {said})" if said else str(died)) from None
        finally:
            for writer in writers:
                writer.close()
            output.close()
        if stdin:
            self._throw_away(self._pipes.data_inside)
        output.rest()
        return bytes(output.kept), returncode, timed_out, output.truncated

    async def _finished(self) -> int:
        """The exit status of the running command, from the status pipe."""
        loop = asyncio.get_running_loop()
        while True:
            line, newline, rest = self._status.partition(b"\n")
            if newline:
                self._status = rest
                nonce, _, numbers = line.decode("ascii", "replace").partition(" ")
                number, _, status = numbers.partition(" ")
                if secrets.compare_digest(nonce, self._nonce) and number == str(self._number) and status.isdigit():
                    return int(status)
                continue
            readable = loop.create_future()
            loop.add_reader(self._pipes.status, _resolve, readable)
            try:
                await readable
            finally:
                loop.remove_reader(self._pipes.status)
            with contextlib.suppress(BlockingIOError):
                data = os.read(self._pipes.status, CHUNK)
                if not data:
                    self.dead = True
                    raise SandboxDied("the sandbox died while a command ran: killed, or out of memory")
                self._status = (self._status + data)[-CHUNK:]

    async def _stop_command(self, before: set[int]) -> int:
        """Kill what the command started, until bash says that it ended and none of it is left."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        returncode: int | None = None
        finished = asyncio.ensure_future(self._finished())
        try:
            while time.monotonic() < deadline:
                started = _children(self._pid) - before
                if finished.done() and not started:
                    returncode = finished.result()
                    break
                for pid in with_descendants(started):
                    _kill_inside(pid, self._pid)
                if finished.done():
                    await asyncio.sleep(KILL_PAUSE_S)
                else:
                    await asyncio.wait([finished], timeout=KILL_PAUSE_S)
        finally:
            finished.cancel()
        if returncode is None:
            self.kill()
            raise SandboxDied(f"a command that timed out could not be killed within {KILL_TIMEOUT_S} s")
        return returncode

    @staticmethod
    def _throw_away(descriptor: int) -> None:
        """Read what lies in a pipe now, and no more than that."""
        waiting = _waiting(descriptor)
        with contextlib.suppress(BlockingIOError):
            while waiting > 0:
                waiting -= len(os.read(descriptor, min(waiting, CHUNK)))


class _Output:
    """Reads a pipe until closed; keeps the first `cap` bytes."""

    def __init__(self, descriptor: int, cap: int) -> None:
        self.kept = bytearray()
        self.truncated = False
        self._descriptor = descriptor
        self._cap = cap
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(descriptor, self._readable)

    def _read(self, size: int) -> int:
        try:
            data = os.read(self._descriptor, size)
        except BlockingIOError:
            return 0
        room = self._cap - len(self.kept)
        self.kept += data[:room]
        self.truncated = self.truncated or len(data) > room
        return len(data)

    def _readable(self) -> None:
        size = self._read(CHUNK)
        if self.truncated or not size:
            self._loop.remove_reader(self._descriptor)
            if size:
                self._pause = self._loop.call_later(FLOOD_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._readable)

    def rest(self) -> None:
        """What the finished command had written and nobody has read yet."""
        waiting = _waiting(self._descriptor)
        while waiting > 0 and (size := self._read(min(waiting, CHUNK))):
            waiting -= size

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._descriptor)


class _Writer:
    """Writes bytes to a non-blocking pipe until done, closed, or nobody reads any more."""

    def __init__(self, descriptor: int, data: bytes) -> None:
        self._descriptor = descriptor
        self._data = memoryview(data)
        self._loop = asyncio.get_running_loop()
        self._waits = False
        self._write()

    def _write(self) -> None:
        try:
            while self._data:
                self._data = self._data[os.write(self._descriptor, self._data) :]
        except BlockingIOError:
            if not self._waits:
                self._waits = True
                self._loop.add_writer(self._descriptor, self._write)
            return
        except BrokenPipeError:
            pass  # the end of file on the status pipe tells
        self.close()

    def close(self) -> None:
        if self._waits:
            self._waits = False
            self._loop.remove_writer(self._descriptor)


async def turn() -> None:
    """Once for one caller in each round of the event loop, for what begins a command or kills a sandbox. A process that
    is woken so may take this CPU at once, for a millisecond; a thousand of them in one round would stall everything
    else for seconds."""
    async with _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)


def assignments(env: dict[str, str]) -> list[str]:
    """`NAME=VALUE` for a shell. ValueError for a bad name."""
    for name in env:
        if not NAME.match(name):
            raise ValueError(f"not a name for an environment variable: {name!r}")
    return [f"{name}={shlex.quote(value)}" for name, value in env.items()]


def ready(descriptor: int, event: int, timeout_s: float) -> bool:
    """Whether `event` (`select.POLLIN`, ...) came within the time. (`select` cannot take descriptors above 1023.)"""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(timeout_s * 1000))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _waiting(descriptor: int) -> int:
    size = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, size)
    return size[0]


def _children(pid: int) -> set[int]:
    """Direct children of all threads of a process; empty where it is gone."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),
                open(f"/proc/{pid}/task/{thread}/children") as children,
            ):
                found.update(int(child) for child in children.read().split())
    return found


def with_descendants(pids: set[int]) -> list[int]:
    """These processes and everything below them, parents first: a shell whose command is killed before it would go on
    to its next command."""
    found = dict.fromkeys(pids)
    todo = list(pids)
    while todo:
        children = [child for pid in todo for child in _children(pid) if child not in found]
        found |= dict.fromkeys(children)
        todo = children
    return list(found)


def _kill_inside(pid: int, init: int) -> None:
    """Kill `pid` if it (still) is a process of the sandbox whose first process is `init`; ids are used again."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(f"/proc/{init}/ns/pid"):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        pass
    finally:
        os.close(process)
