"""What a rollout's capture must survive its process with: one append-only file for each rollout.

An entry is its length (4 bytes), the CRC-32 of its body (4 bytes), and the body: a pickled tuple whose first item is
its kind. A file that ends in the middle of an entry (the process died while writing) is good up to there. Entries are
written before the harness sees what they say; they are handed to the kernel, not forced to the disk: they survive the
process, not the machine, and with the machine the rollout is gone as well.

Files lie in a private directory and are written by this code alone, so pickle is safe here.
"""

import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

HEAD = struct.Struct("<II")
SUFFIX = ".journal"


class Journal:
    """The file of one rollout, open for appending."""

    def __init__(self, directory: Path, rollout_id: str) -> None:
        self.path = directory / (quote(rollout_id, safe="") + SUFFIX)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, *entry: Any) -> None:
        """Write one entry. OSError where the disk is full."""
        body = pickle.dumps(entry, protocol=pickle.HIGHEST_PROTOCOL)
        data = HEAD.pack(len(body), zlib.crc32(body)) + body
        written = os.write(self._file, data)
        if written != len(data):
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes could be written")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        """The rollout's calls are in safe hands."""
        self.close()
        self.path.unlink(missing_ok=True)


def read(path: Path) -> list[tuple]:
    """All whole entries of a journal; what follows the last whole one is cut off the file."""
    data = path.read_bytes()
    entries: list[tuple] = []
    at = 0
    while at + HEAD.size <= len(data):
        length, check = HEAD.unpack_from(data, at)
        body = data[at + HEAD.size:at + HEAD.size + length]
        if len(body) != length or zlib.crc32(body) != check:
            break
        entries.append(pickle.loads(body))
        at += HEAD.size + length
    if at < len(data):
        os.truncate(path, at)
    return entries


def journals(directory: Path) -> list[Path]:
    return sorted(directory.glob("*" + SUFFIX))
