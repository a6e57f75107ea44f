"""Listening sockets inside other network namespaces.

A sandbox has a network namespace of its own with nothing in it but a loopback. The proxy opens its listening socket
*there* and serves it from its own event loop: nothing runs inside that an agent could tamper with, and which socket a
request came in on is the rollout's identity.

As root a throwaway thread enters the namespace (`setns` is per thread). An ordinary user must enter the sandbox's
user namespace first, which a process with threads may not: a short helper process does so and passes the socket back.
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading

CLONE_NEWNET = 0x40000000
CLONE_NEWUSER = 0x10000000
BACKLOG = 128
HELPER_TIMEOUT_S = 20


def setns(path: str, kind: int) -> None:
    """Move the calling thread into the namespace at `path`; OSError where that is not allowed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, kind):
            code = ctypes.get_errno()
            raise OSError(code, f"setns({path}): {os.strerror(code)}")
    finally:
        os.close(descriptor)


def loopback_socket(port: int) -> socket.socket:
    """A listening socket on 127.0.0.1:port of the namespace that the thread is in."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def listen_inside(pid: int, port: int) -> socket.socket:
    """A listening socket on 127.0.0.1:port in the network namespace of process `pid`. Blocking; OSError on failure."""
    try:
        return _by_thread(pid, port)
    except PermissionError:
        return _by_helper(pid, port)


def _by_thread(pid: int, port: int) -> socket.socket:
    result: list[socket.socket | OSError] = []

    def work() -> None:
        try:
            setns(f"/proc/{pid}/ns/net", CLONE_NEWNET)
            result.append(loopback_socket(port))
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=work, name="enter-namespace")
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


def _by_helper(pid: int, port: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # Run by path and isolated: the helper needs this file and the standard library, not the whole package.
        command = [sys.executable, "-I", "-S", __file__, str(pid), str(port), str(theirs.fileno())]
        done = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=HELPER_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise OSError(f"cannot listen in the network namespace of process {pid}: {done.stderr.strip()}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    return listener


def helper(pid: int, port: int, channel: int) -> None:
    """Runs in the helper process: enter, listen, hand over."""
    setns(f"/proc/{pid}/ns/user", CLONE_NEWUSER)
    setns(f"/proc/{pid}/ns/net", CLONE_NEWNET)
    with socket.socket(fileno=channel) as back, loopback_socket(port) as listener:
        socket.send_fds(back, [b"s"], [listener.fileno()])


if __name__ == "__main__":
    try:
        helper(*map(int, sys.argv[1:]))
    except OSError as error:
        sys.exit(str(error))
