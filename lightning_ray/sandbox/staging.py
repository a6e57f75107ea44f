"""Host paths made reachable for a sandbox that has a user id of its own, for example an interpreter below a 0700 home.

A thread that starts sandboxes as root gets a mount namespace of its own (`unshare` is per thread), in which each source
is bound to a place that every user can reach. Nobody else sees these mounts, and they are gone with the process.
"""

import ctypes
import os
import threading
from pathlib import Path

from lightning_ray.sandbox.base import SandboxError

PLACE = Path("/run/lightning_ray/mounts")
CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_SLAVE, MS_NOSUID, MS_NODEV = 0x1000, 0x4000, 0x80000, 0x2, 0x4

_thread = threading.local()


def prepare() -> None:
    """Give the calling thread its mount namespace, if it has none yet.

    Root only, and only in a thread that does nothing else: its view of the file system is its own from then on.
    """
    if hasattr(_thread, "staged"):
        return
    PLACE.mkdir(parents=True, exist_ok=True)
    PLACE.parent.chmod(0o755)
    call("unshare", CLONE_NEWNS)
    mount(None, "/", None, MS_REC | MS_SLAVE)  # what the host mounts later still appears here
    mount("staging", str(PLACE), "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    _thread.staged = {}


def stage(source: Path) -> str:
    """A path that shows `source` to every user, in the calling thread (see `prepare`) and what it starts."""
    prepare()
    info = os.stat(source)
    key = (str(source), info.st_dev, info.st_ino)
    if key not in _thread.staged:
        target = PLACE / str(len(_thread.staged))
        if source.is_dir():
            target.mkdir()
        else:
            target.touch()
        mount(str(source), str(target), None, MS_BIND | MS_REC)
        _thread.staged[key] = str(target)
    return _thread.staged[key]


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    call("mount", *(text and text.encode() for text in (source, target, kind)), flags, options and options.encode())


def call(name: str, *arguments: bytes | int | None) -> int:
    """A function of the C library. `SandboxError` where it fails."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_long
    result = function(*(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    if result < 0:
        raise SandboxError(f"{name}{arguments}: {os.strerror(ctypes.get_errno())}. As root, mounts need CAP_SYS_ADMIN")
    return result
