"""Commands in a pod, each by one connection to its exec subresource (protocols v4 and v5, `kubernetes.stream`).

The request itself names only a fixed program, so that no command, file or token is written down by who keeps an audit
of the cluster: command, environment and stdin go over the connection, each with its length before it. The exit status
is the API server's own message on a channel that nothing inside can write to. A background process may hold the output
open after its command has ended: a secret word of the fixed program on stderr (which commands do not have) then ends
the wait.

A command that takes too long is killed from inside, by the mark in the environment of everything that it started. The
calls block and run in the cluster's threads, whose number is bounded.
"""

import asyncio
import contextlib
import json
import secrets
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream
from kubernetes.stream.ws_client import CLOSE_CHANNEL, ERROR_CHANNEL, STDERR_CHANNEL, STDOUT_CHANNEL
from websocket import ABNF, WebSocketException, WebSocketTimeoutException

from lightning_ray.sandbox.base import SandboxDied, SandboxError
from lightning_ray.sandbox.commands import Runs
from lightning_ray.sandbox.kubernetes.cluster import Cluster
from lightning_ray.sandbox.kubernetes.manifest import CONTAINER
from lightning_ray.sandbox.kubernetes.states import failure
from lightning_ray.sandbox.shell import assignments

CHUNK = 32 * 1024
"""Bytes of one message to the API server."""
TRIES = 4
PAUSE_S = 0.25
HELD_OPEN_S = 0.5
"""So long the API server's own word is waited for after a command has ended."""
KILL_TIMEOUT_S = 10.0
ANSWER_GRACE_S = 60.0
"""How much longer than its timeout a call may take before its connection is given up."""
FATE_S = 5.0
"""So long the cluster may take to say why a sandbox is gone."""
LONGEST_ARGUMENT = 30_000
"""Characters, of up to four bytes each; Linux takes 128 KiB for one argument."""

RUN = rf"""
read -r script_size stdin_size word || exit 125
script=$(head -c "$script_size"; printf x); script=${{script%x}}
export LIGHTNING_RAY_COMMAND="$1"
run() {{
  if [ "${{#script}}" -lt {LONGEST_ARGUMENT} ]; then bash -c "$script" 2>&1; else bash <(printf %s "$script") 2>&1; fi
}}
if [ "$stdin_size" -gt 0 ]; then head -c "$stdin_size" | run; else run </dev/null; fi
status=$?
printf '%s %s\n' "$word" "$status" >&2
exit "$status"
"""
KILL = r"""
for round in 1 2 3 4 5 6 7 8 9 10; do
  found=
  for place in /proc/[0-9]*; do
    while IFS= read -r -d '' entry; do
      if [ "$entry" = "LIGHTNING_RAY_COMMAND=$1" ]; then kill -9 "${place#/proc/}" && found=1; break; fi
    done <"$place/environ"
  done 2>/dev/null
  [ -z "$found" ] && exit 0
done
exit 1
"""


class PodShell(Runs):
    """Runs one command after the other in a pod, as `shell.Shell` does through pipes. Belongs to one event loop."""

    def __init__(self, cluster: Cluster, job: str, pod: str, output_bytes: int, container: str = CONTAINER) -> None:
        self._container = container
        self._cluster = cluster
        self._job = job
        self._pod = pod
        self._output_bytes = output_bytes
        self._turn = asyncio.Lock()
        self._dead = False

    async def run_raw(self, command: str, timeout_s: float, env: dict[str, str] | None = None, stdin: bytes = b"",
                      output_bytes: int | None = None) -> tuple[bytes, int, bool, bool]:
        """See `Runs`. A caller that is cancelled leaves the sandbox in the middle of a command: it takes no other from
        then on."""
        sent = script(command, env or {})
        async with self._turn:
            if self._dead:
                raise SandboxDied("the sandbox is not running")
            call = Call(self._cluster.configuration, self._cluster.namespace, self._pod, self._container, sent, stdin,
                        output_bytes or self._output_bytes)
            work = asyncio.get_running_loop().run_in_executor(self._cluster.threads, call.run, timeout_s)
            try:
                await asyncio.wait({work, asyncio.wrap_future(call.begun)}, return_when=asyncio.FIRST_COMPLETED)
                async with asyncio.timeout(timeout_s + ANSWER_GRACE_S):
                    await asyncio.shield(work)
            except TimeoutError:
                self._give_up(call, work)
                raise SandboxDied(f"the API server did not answer within {ANSWER_GRACE_S:g} s") from None
            except asyncio.CancelledError:
                self._give_up(call, work)
                raise
            except SandboxError as error:
                raise await self._fate(error) from error
        return bytes(call.output), call.returncode, call.timed_out, call.truncated

    def _give_up(self, call: "Call", work: asyncio.Future[None]) -> None:
        self._dead = True
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody waits for its error
        call.abort()

    async def _fate(self, error: SandboxError) -> SandboxError:
        """The error, or, where the cluster knows why the sandbox is gone, that."""
        phase = "running" if self._container == CONTAINER else "copying"
        state = await self._cluster.past(self._job, {phase}, FATE_S)
        if state.phase != "ended":
            return error
        words = await asyncio.get_running_loop().run_in_executor(None, self._cluster.last_words, self._job)
        return failure(state, f"the sandbox ended while a command ran{f' (its log: {words[-500:]})' if words else ''}")


def script(command: str, env: dict[str, str]) -> bytes:
    """What bash is given: the environment, then the command. ValueError for a bad name of a variable."""
    exports = "".join(f"export {variable}\n" for variable in assignments(env))
    return (exports + command).replace("\0", "").encode("utf-8", "replace")


@dataclass(slots=True)
class Call:
    """One command over one connection."""

    configuration: client.Configuration
    namespace: str
    pod: str
    container: str
    script: bytes
    stdin: bytes
    cap: int
    begun: Future[None] = field(default_factory=Future)
    """Done when a thread has taken it up."""
    output: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    timed_out: bool = False
    returncode: int = -1
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    """In the environment of what the command starts."""
    word: str = field(default_factory=lambda: secrets.token_hex(16))
    """Known to the fixed program only."""
    _said: bytes = b""
    _status: bytes = b""
    _ended_at: float | None = None
    _open: bool = False
    _socket: Any = None
    _aborted: bool = False

    def run(self, timeout_s: float) -> None:
        """Until the command has ended. `SandboxDied` where the connection or the sandbox broke."""
        self.begun.set_result(None)
        self._connect(["/bin/bash", "-c", RUN, "run", self.mark], stdin=True)
        try:
            header = f"{len(self.script)} {len(self.stdin)} {self.word}\n".encode()
            threading.Thread(target=self._send, args=(header + self.script + self.stdin,), daemon=True).start()
            if not self._receive(time.monotonic() + timeout_s):
                self.timed_out = True
                self._kill()
                if not self._receive(time.monotonic() + KILL_TIMEOUT_S):
                    raise SandboxDied(f"a command that timed out could not be killed within {KILL_TIMEOUT_S:g} s")
            self.returncode = self._result()
        finally:
            self._socket.close(timeout=0)

    def abort(self) -> None:
        """End the connection, whatever it is at. Callable from any thread."""
        self._aborted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sock.shutdown(2)

    def _connect(self, command: list[str], *, stdin: bool) -> None:
        for number in range(TRIES):
            try:
                # a client of its own: `stream` changes the one that it is given
                api = client.CoreV1Api(client.ApiClient(self.configuration))
                connected = stream(api.connect_get_namespaced_pod_exec, self.pod, self.namespace,
                                   container=self.container, command=command, stdin=stdin, stdout=True,
                                   stderr=True, tty=False, binary=True, _preload_content=False)
                self._socket, self._open = connected.sock, True
                return
            except ApiException as error:
                if self._aborted or number == TRIES - 1:
                    raise SandboxDied(f"the pod {self.pod} takes no command: {error.reason}") from error
                time.sleep(PAUSE_S * 2**number)

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError, WebSocketException):  # the reading side tells what became of it
            for start in range(0, len(data), CHUNK):
                self._socket.send(b"\0" + data[start : start + CHUNK], opcode=ABNF.OPCODE_BINARY)

    def _receive(self, deadline: float) -> bool:
        """Take in what comes, until the command has ended (True) or the time is over (False)."""
        while self._open:
            until = deadline if self._ended_at is None else min(deadline, self._ended_at + HELD_OPEN_S)
            left = until - time.monotonic()
            if left <= 0:
                return self._ended_at is not None
            self._socket.settimeout(left)
            try:
                opcode, frame = self._socket.recv_data_frame(True)
            except WebSocketTimeoutException:
                continue
            except (OSError, WebSocketException) as error:
                raise SandboxDied(f"the connection to the pod {self.pod} broke: {error}") from error
            if opcode == ABNF.OPCODE_CLOSE:
                self._open = False
            elif opcode in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data:
                self._take(frame.data[0], frame.data[1:])
        return True

    def _take(self, channel: int, data: bytes) -> None:
        if channel == STDOUT_CHANNEL:
            room = self.cap - len(self.output)
            self.output += data[:room]
            self.truncated = self.truncated or len(data) > room
        elif channel == STDERR_CHANNEL:
            self._said = (self._said + data)[-4096:]
            if self._ended_at is None and f"{self.word} ".encode() in self._said and self._said.endswith(b"\n"):
                self._ended_at = time.monotonic()
        elif channel == ERROR_CHANNEL:
            self._status += data
            with contextlib.suppress(ValueError):
                json.loads(self._status)
                self._open = False
        elif channel != CLOSE_CHANNEL:
            raise SandboxDied(f"the API server sent something else than an exec's channels ({channel})")

    def _result(self) -> int:
        said = self._said.decode("utf-8", "replace")
        if self._status:
            return exit_status(json.loads(self._status), said)
        number = said.rpartition(f"{self.word} ")[2].strip()
        if self._ended_at is None or not number.isdigit():
            raise SandboxDied(f"the connection to {self.pod} ended before its command did {said[-300:]}".strip())
        return int(number)

    def _kill(self) -> None:
        killing = Call(self.configuration, self.namespace, self.pod, self.container, b"", b"", 1000)
        killing._connect(["/bin/bash", "-c", KILL, "kill", self.mark], stdin=False)
        try:
            killing._receive(time.monotonic() + KILL_TIMEOUT_S)
        finally:
            killing._socket.close(timeout=0)


def exit_status(status: dict[str, Any], said: str = "") -> int:
    """A command's, from the API server's last message. `SandboxDied` where it says that no command ran."""
    if status.get("status") == "Success":
        return 0
    if status.get("reason") == "NonZeroExitCode":
        for cause in (status.get("details") or {}).get("causes") or ():
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
    raise SandboxDied(f"a command could not be run: {status.get('message')} {said[-300:]}".strip())
