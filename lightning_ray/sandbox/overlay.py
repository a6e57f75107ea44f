"""Large workspaces without a copy: an overlay of the prepared checkout, which all sandboxes of a task share, and a
tmpfs of limited size for what one sandbox changes.

The checkout belongs to root, and a sandbox to a user of its own: an idmapped mount (mount_setattr(2), Linux 5.12; below
an overlay 5.19) shows root's files as that user's. Root only: an ordinary user cannot limit the size of its changes.
The mounts are made in the private mount namespace of the thread that starts the sandbox (`staging.py`) and taken away
there as soon as bubblewrap has its own copy of that namespace.

What differs from a copy: a directory of the checkout cannot be renamed by rename(2) (EXDEV; `mv` copies it then).
"""

import contextlib
import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lightning_ray.sandbox import pack, staging
from lightning_ray.sandbox.base import SandboxError
from lightning_ray.sandbox.staging import MS_NODEV, MS_NOSUID

LARGE_BYTES = 4 * 2**20
"""Packed size from which an overlay costs less than a copy."""
AT_FDCWD, AT_EMPTY_PATH, MNT_DETACH = -100, 0x1000, 2
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, MOVE_MOUNT_F_EMPTY_PATH = 1, 0o2000000, 4
MOUNT_ATTR_IDMAP = 0x00100000
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
"""System call numbers, the same on every architecture."""


class _Attributes(ctypes.Structure):
    """`struct mount_attr`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


@dataclass(frozen=True, slots=True)
class Layers:
    """Paths that the calling thread, and what it starts, can see."""

    lower: str
    upper: str
    work: str


def is_large(workspace: Path) -> bool:
    """Whether a prepared workspace is worth an overlay. One that is not prepared may change, and is copied."""
    try:
        return pack.packed_beside(workspace).stat().st_size >= LARGE_BYTES
    except FileNotFoundError:
        return False


@functools.cache
def refusal() -> str:
    """Why this machine gives no overlay, or nothing. Tried once, in a thread of its own."""
    if os.geteuid() != 0:
        return "an ordinary user cannot make an overlay of limited size"
    with tempfile.TemporaryDirectory(prefix="lightning_ray-check-") as directory, ThreadPoolExecutor(1) as thread:
        return thread.submit(_try, Path(directory)).result()


def _try(directory: Path) -> str:
    user = 1
    try:
        with layers(directory, user, 2**20) as made:
            (directory / "file").touch()
            if os.stat(f"{made.lower}/file").st_uid != user:
                return "the kernel ignores the mapping of user ids"
            target = str(staging.PLACE / "tried")
            os.mkdir(target)
            options = f"lowerdir={made.lower},upperdir={made.upper},workdir={made.work},userxattr"
            staging.mount("overlay", target, "overlay", 0, options)
            staging.call("umount2", target.encode(), MNT_DETACH)
    except (OSError, SandboxError) as error:
        return str(error)
    return ""


@contextlib.contextmanager
def layers(workspace: Path, user: int, size: int) -> Iterator[Layers]:
    """The layers of one sandbox's workspace while inside: `workspace` as `user`'s, and a tmpfs of `size` bytes.

    The directories that they are mounted on stay: removing one would unmount it in every namespace.
    """
    staging.prepare()
    lower, changes = staging.PLACE / "lower", staging.PLACE / "changes"
    mounted: list[Path] = []
    try:
        for directory in (lower, changes):
            directory.mkdir(exist_ok=True)
        _idmapped(workspace, lower, user)
        mounted.append(lower)
        options = f"size={size},mode=700,uid={user},gid={user}"
        staging.mount("changes", str(changes), "tmpfs", MS_NOSUID | MS_NODEV, options)
        mounted.append(changes)
        for name in ("upper", "work"):
            (changes / name).mkdir(mode=0o755)
            os.chown(changes / name, user, user)
        yield Layers(str(lower), str(changes / "upper"), str(changes / "work"))
    finally:
        for mount in mounted:
            staging.call("umount2", str(mount).encode(), MNT_DETACH)


def _idmapped(source: Path, target: Path, user: int) -> None:
    """Show `source` at `target` with root's files as `user`'s."""
    with _user_namespace(user) as namespace:
        flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC
        tree = staging.call("syscall", SYS_OPEN_TREE, AT_FDCWD, os.fsencode(source), flags)
        try:
            attributes = bytes(_Attributes(set=MOUNT_ATTR_IDMAP, user_namespace=namespace))
            staging.call("syscall", SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes))
            staging.call("syscall", SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, str(target).encode(), MOVE_MOUNT_F_EMPTY_PATH)
        finally:
            os.close(tree)


@contextlib.contextmanager
def _user_namespace(user: int) -> Iterator[int]:
    """A file descriptor of a user namespace in which 0 is `user`. Some process must be in it when it is mapped."""
    with subprocess.Popen(["unshare", "--user", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                          env={"PATH": "/usr/bin:/bin"}) as holder:  # fmt: skip
        try:
            holder.stdin.write(b".")
            if holder.stdout.read(1) != b".":
                raise SandboxError("no user namespace can be made for the workspace's overlay")
            for kind in ("uid", "gid"):
                Path(f"/proc/{holder.pid}/{kind}_map").write_text(f"0 {user} 1")
            namespace = os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            holder.kill()
    try:
        yield namespace
    finally:
        os.close(namespace)
