"""Listening sockets outlive the proxy's process.

A proxy that dies takes some seconds to come back. If its listening sockets died with it, harnesses would be refused
meanwhile and soon give up. So a small process of its own, the keeper, holds a duplicate of each. While no proxy runs,
the kernel completes connections and queues them; the next proxy asks the keeper for the sockets and serves what waits.
The same holds for sockets inside sandboxes' network namespaces.

The keeper is found by a unix socket in a private directory. It ends when it is told to, when the process that it was
told to watch is gone, or when no proxy has been connected for `PATIENCE_S`.

This file imports the standard library alone: the keeper runs it by path.
"""

import contextlib
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 300
NAME = "keeper.sock"
MESSAGE = 4096
SPAWN_TIMEOUT_S = 20
DESCRIPTORS = 65_536
"""A listener and a handful of connections for each of some thousand rollouts. No more, also where the system allows a
billion: there are programs that go through all numbers below their limit one by one."""


def allow_descriptors() -> None:
    """Raise the soft limit of open descriptors to what rollouts by the thousand need, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _address(directory: Path) -> tuple[int, str]:
    """A short path to the unix socket, however long the directory's is (such addresses end at 107 bytes)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    return descriptor, f"/proc/self/fd/{descriptor}/{NAME}"


class Keeper:
    """The proxy's side. Connects to the keeper of a directory, and starts one where there is none."""

    def __init__(self, directory: Path, *, watch: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory = directory
        self._channel = self._connect() or self._spawn(watch)

    def _connect(self) -> socket.socket | None:
        descriptor, path = _address(self.directory)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.connect(path)
        except OSError:
            channel.close()
            return None
        finally:
            os.close(descriptor)
        return channel

    def _spawn(self, watch: int) -> socket.socket:
        # The process that starts the keeper ends at once, so that the keeper is nobody's child here.
        command = [sys.executable, "-I", "-S", __file__, str(self.directory), str(watch)]
        nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        subprocess.run(command, **nothing, timeout=SPAWN_TIMEOUT_S, check=True)
        until = time.monotonic() + SPAWN_TIMEOUT_S
        while time.monotonic() < until:
            channel = self._connect()
            if channel is not None:
                return channel
            time.sleep(0.01)
        raise OSError(f"the socket keeper in {self.directory} did not come up")

    def hold(self, name: str, listener: socket.socket) -> None:
        """Keep a duplicate of `listener` under `name`."""
        socket.send_fds(self._channel, [json.dumps(["hold", name]).encode()], [listener.fileno()])

    def drop(self, name: str) -> None:
        """Close the duplicate; with the original closed, the port is free."""
        self._channel.send(json.dumps(["drop", name]).encode())

    def sockets(self) -> dict[str, socket.socket]:
        """All sockets that are kept, by name, as duplicates of this process."""
        self._channel.send(json.dumps(["list"]).encode())
        found: dict[str, socket.socket] = {}
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE, 1)
            if not descriptors:
                return found
            found[message.decode()] = socket.socket(fileno=descriptors[0])
            found[message.decode()].setblocking(False)

    def quit(self) -> None:
        """End the keeper; nothing is kept any more. Waits until it is gone: the next one must not be taken for it."""
        self._channel.send(json.dumps(["quit"]).encode())
        self._channel.settimeout(SPAWN_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._channel.recv(1)
        self._channel.close()


def keep(directory: Path, watch: int) -> None:
    """The keeper itself. `watch` is a process; when it is gone, the keeper ends."""
    descriptor, path = _address(directory)
    (directory / NAME).unlink(missing_ok=True)
    entrance = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    entrance.bind(path)
    entrance.listen(8)
    os.close(descriptor)
    kept: dict[str, int] = {}
    waiting = selectors.DefaultSelector()
    waiting.register(entrance, selectors.EVENT_READ)
    alone_since = time.monotonic()
    try:
        while os.path.exists(f"/proc/{watch}") and time.monotonic() - alone_since < PATIENCE_S:
            if len(waiting.get_map()) > 1:
                alone_since = time.monotonic()
            for key, _ in waiting.select(timeout=1):
                channel = key.fileobj
                if channel is entrance:
                    waiting.register(entrance.accept()[0], selectors.EVENT_READ)
                    continue
                message, descriptors = b"", []
                with contextlib.suppress(ConnectionError):  # the proxy died: the same as an orderly end
                    message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE, 1)
                if not message:
                    waiting.unregister(channel)
                    channel.close()
                elif not _serve(json.loads(message), descriptors, channel, kept):
                    return
    finally:
        (directory / NAME).unlink(missing_ok=True)


def _serve(command: list[str], descriptors: list[int], channel: socket.socket, kept: dict[str, int]) -> bool:
    """Do what the proxy says; False to end."""
    if command[0] == "hold":
        if command[1] in kept:
            os.close(kept[command[1]])
        kept[command[1]] = descriptors[0]
    elif command[0] == "drop" and command[1] in kept:
        os.close(kept.pop(command[1]))
    elif command[0] == "list":
        for name, descriptor in kept.items():
            socket.send_fds(channel, [name.encode()], [descriptor])
        channel.send(b"end")
    return command[0] != "quit"


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    allow_descriptors()
    keep(Path(sys.argv[1]), int(sys.argv[2]))
