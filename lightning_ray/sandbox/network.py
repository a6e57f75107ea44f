"""A listening socket inside a sandbox's network namespace: the sandbox's only way out, served by the host.

Nothing runs inside for it, and which socket a request came in on says which sandbox sent it.
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading

CLONE_NEWNET = 0x40000000
BACKLOG = 256

CHILD = f"""
import ctypes, fcntl, os, socket, sys
namespace, channel, port = map(int, sys.argv[1:])
channel = socket.socket(fileno=channel)
setns = ctypes.CDLL(None, use_errno=True).setns
try:
    for descriptor, kind in (fcntl.ioctl(namespace, 0xB701), 0x10000000), (namespace, 0x40000000):  # NS_GET_USERNS
        if setns(descriptor, kind):
            raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen({BACKLOG})
    socket.send_fds(channel, [b"+"], [listener.fileno()])
except OSError as error:
    channel.send(str(error).encode())
"""


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


def _in_thread(namespace: int, port: int) -> socket.socket:
    result: list[socket.socket | OSError] = []

    def work() -> None:  # a thread of its own: setns is per thread, and this one ends right after
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
            result.append(_listener(port))
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


def _in_child(namespace: int, port: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CHILD, str(namespace), str(theirs.fileno()), str(port)],
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
