"""Directories on this machine's disk that live as long as a process: workspaces, homes of worker processes, an engine's
sockets.

Each holds a lock of its process, which the kernel gives back however the process ends. `sweep` removes the directories
whose lock is free, so that nothing of a killed process stays behind once another one starts on this machine.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "lightning-ray-"
_LOCK = ".lock"


class Scratch:
    """A directory that only this user may write to. `private`: others (the sandboxes') may not look into it either."""

    def __init__(self, *, private: bool = False) -> None:
        base = Path(tempfile.gettempdir())
        made = Path(tempfile.mkdtemp(prefix=f".new-{PREFIX}", dir=base))
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.chmod(0o700 if private else 0o755)
        self.path = base / made.name.removeprefix(".new-")
        made.rename(self.path)  # `sweep` sees it only now, with its lock taken

    def remove(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep() -> list[Path]:
    """Remove what dead processes of this user left; returns what was removed."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or just removed by its owner
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        finally:
            os.close(lock)
    return removed
