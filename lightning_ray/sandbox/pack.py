"""A workspace as one tar archive: how it gets into a sandbox without a host path being visible there.

Modes are reduced to what git knows (0644, 0755), owners and times are neutral, and the order is fixed, so that the same
files give the same bytes.
"""

import io
import os
import stat
import tarfile
from pathlib import Path
from typing import IO

MTIME = 1_577_836_800
"""2020-01-01T00:00:00Z, also the date of a workspace's one commit."""


def pack(directory: Path) -> bytes:
    """All files, directories and symbolic links below `directory`; names start with `./`."""
    return pack_members(_walk(directory, "."))


def pack_files(files: dict[str, bytes]) -> bytes:
    """Files by relative path."""
    return pack_members([(f"./{name}", 0o100644, data) for name, data in files.items()])


def pack_members(members: list[tuple[str, int, bytes]]) -> bytes:
    """(name, mode, content) of each member; the content of a symbolic link is its target."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, mode, content in members:
            member = tarfile.TarInfo(name)
            member.mtime = MTIME
            if stat.S_ISDIR(mode):
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            elif stat.S_ISLNK(mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(content)
            else:
                member.mode, member.size = 0o755 if mode & 0o100 else 0o644, len(content)
            archive.addfile(member, io.BytesIO(content) if stat.S_ISREG(mode) else None)
    return buffer.getvalue()


def _walk(directory: Path, name: str) -> list[tuple[str, int, bytes]]:
    found: list[tuple[str, int, bytes]] = []
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            mode = entry.stat(follow_symlinks=False).st_mode
            inside = f"{name}/{entry.name}"
            if stat.S_ISDIR(mode):
                found += [(inside, mode, b""), *_walk(Path(entry.path), inside)]
            elif stat.S_ISLNK(mode):
                found.append((inside, mode, os.fsencode(os.readlink(entry.path))))
            elif stat.S_ISREG(mode):
                found.append((inside, mode, Path(entry.path).read_bytes()))
    return found


def packed_beside(workspace: Path) -> Path:
    """Where the pack of a prepared workspace lies, if its maker wrote one. A prepared workspace never changes."""
    return workspace.with_name(workspace.name + ".tar")


def repository_beside(workspace: Path) -> Path:
    """Where the pack of its repository alone lies, which is what a patch is taken with."""
    return workspace.with_name(workspace.name + ".git.tar")


def pack_repository(workspace: Path) -> bytes:
    """`.git` and what is in it."""
    git = workspace / ".git"
    return pack_members([("./.git", git.stat().st_mode, b""), *_walk(git, "./.git")])


def read_repository(workspace: Path) -> bytes:
    """The pack of the workspace's repository."""
    try:
        return repository_beside(workspace).read_bytes()
    except FileNotFoundError:
        return pack_repository(workspace)


def open_pack(workspace: Path) -> int:
    """A file descriptor at the start of the workspace's pack; the caller closes it."""
    try:
        return os.open(packed_beside(workspace), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        descriptor = os.memfd_create("workspace")
        with open(os.dup(descriptor), "wb") as file:
            file.write(pack(workspace))
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor


def extract(archive: IO[bytes], target: Path, without: str) -> None:
    """The files, directories and links of a tar archive whose members lie below one directory, into `target`, as this
    user's. What lies below a directory named `without` is left out. Raises OSError, tarfile.TarError."""

    def chosen(member: tarfile.TarInfo, to: str) -> tarfile.TarInfo | None:
        _, _, inside = member.name.rstrip("/").partition("/")
        if not inside or without in inside.split("/") or not (member.isreg() or member.isdir() or member.issym()):
            return None
        plain = member.replace(name=inside, uid=None, gid=None, uname=None, gname=None, deep=False)
        return tarfile.tar_filter(plain, to)

    with tarfile.open(fileobj=archive, mode="r|") as members:
        members.extractall(target, filter=chosen)
