"""Peak memory of a run: the processes that this one started, sampled while it runs."""

import threading

import psutil

SAMPLE_EVERY_S = 5.0
"""Reading a process's proportional share costs milliseconds; peaks of a run last longer than this."""


class PeakMemory:
    """Samples the proportional set size (shared pages counted once) of this process and all its descendants."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    @classmethod
    def start(cls) -> "PeakMemory":
        memory = cls()
        memory._thread.start()
        return memory

    def stop(self) -> float:
        """Ends the sampling. GiB."""
        self._ended.set()
        self._thread.join()
        return self.peak_bytes / 2**30

    def _sample(self) -> None:
        while not self._ended.is_set():
            self.peak_bytes = max(self.peak_bytes, tree_bytes(psutil.Process()))
            self._ended.wait(SAMPLE_EVERY_S)


def tree_bytes(root: psutil.Process) -> int:
    """Proportional set size of a process and its descendants, in bytes. Processes that end meanwhile count 0."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
