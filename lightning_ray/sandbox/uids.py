"""User ids for sandboxes started as root: each live sandbox has one that nothing else on the machine uses.

A process claims a block of ids by a lock on a file, which the kernel gives back when the process is gone, and hands
them out in turn, so that an id comes around as late as possible. An ordinary user needs none of this: its user
namespace already separates it.
"""

import fcntl
import functools
import itertools
import os
import threading
from pathlib import Path

from lightning_ray.sandbox.base import SandboxUnavailable

BLOCK = 2048
HIGH = (1_500_000_000, 1_900_000_000)
LOW = (24_576, 57_344)
"""Ranges that are tried in this order: far above every real user; high in a user namespace of 65,536 ids."""


def mapped_range(uid_map: str) -> tuple[int, int] | None:
    """The range of ids to use, from the text of /proc/self/uid_map; None where neither range is mapped."""
    extents = [tuple(int(field) for field in line.split()) for line in uid_map.splitlines() if line.strip()]
    for low, high in (HIGH, LOW):
        if any(start <= low and high <= start + length for start, _, length in extents):
            return low, high
    return None


class Uids:
    """Hands out user ids. Thread-safe."""

    def __init__(self, directory: Path, low: int, high: int) -> None:
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for first in range(low, high - BLOCK + 1, BLOCK):
            self._file = os.open(directory / f"{first}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._file)
                continue
            self._ids = itertools.cycle(range(first, first + BLOCK))
            self._taken: set[int] = set()
            return
        raise SandboxUnavailable(f"all blocks of sandbox user ids are claimed (locks in {directory}); stop other runs")

    def take(self) -> int:
        """An id that no live sandbox has."""
        with self._lock:
            if len(self._taken) == BLOCK:
                raise SandboxUnavailable(f"one process holds {BLOCK} sandboxes at once at most; start another runner")
            uid = next(uid for uid in self._ids if uid not in self._taken)
            self._taken.add(uid)
            return uid

    def give_back(self, uid: int) -> None:
        with self._lock:
            self._taken.discard(uid)


@functools.cache
def of_this_process() -> Uids | None:
    """The ids of this process when it runs as root, else None."""
    if os.geteuid() != 0:
        return None
    usable = mapped_range(Path("/proc/self/uid_map").read_text())
    if usable is None:
        raise SandboxUnavailable(
            "as root, but no user ids for sandboxes are mapped here (/proc/self/uid_map); run as an ordinary user"
        )
    return Uids(Path("/run/lightning_ray/uids"), *usable)
