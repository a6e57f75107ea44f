"""A listening socket inside a sandbox's network namespace: the sandbox's only way out, served by the host.

Nothing runs inside for it, and which socket a request came in on says which sandbox sent it.

This file imports the standard library alone: its helper process runs it by path.
"""

import ctypes
import fcntl
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NS_GET_USERNS = 0xB701
"""ioctl(2): a descriptor of the user namespace that owns a namespace."""
BACKLOG = 256


def listen_inside(pid: int, port: int) -> socket.socket:
    """A non-blocking listening socket on 127.0.0.1:`port` in the network namespace of process `pid`.

    Takes about 1 ms as root. An ordinary user must first enter the user namespace that owns the network
    namespace, which only a process with a single thread may do: a helper does it and sends the socket back (30 ms).
    Raises `OSError`.
    """
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _in_thread(namespace, port) if os.geteuid() == 0 else _in_child(namespace, port)
    finally:
        os.close(namespace)


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _enter(namespace: int, kind: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, kind):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def _in_thread(namespace: int, port: int) -> socket.socket:
    def work() -> socket.socket:
        _enter(namespace, CLONE_NEWNET)
        return _listener(port)

    with ThreadPoolExecutor(1) as thread:  # of its own: setns is per thread, and this one ends right after
        return thread.submit(work).result()


def _in_child(namespace: int, port: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(namespace), str(theirs.fileno()), str(port)],
            pass_fds=(namespace, theirs.fileno()), env={}, stdin=subprocess.DEVNULL,
        )
        theirs.close()
        message, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
        child.wait()
    if not descriptors:
        reason = message.decode() or "the helper process died"
        raise OSError(f"no listener in the sandbox's network namespace: {reason}")
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    return listener


def _help(namespace: int, channel: socket.socket, port: int) -> None:
    """What the helper does."""
    try:
        _enter(fcntl.ioctl(namespace, NS_GET_USERNS), CLONE_NEWUSER)
        _enter(namespace, CLONE_NEWNET)
        with _listener(port) as listener:
            socket.send_fds(channel, [b"+"], [listener.fileno()])
    except OSError as error:
        channel.send(str(error).encode())


if __name__ == "__main__":
    _help(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
