"""Workspaces: what a rollout finds at its start. A git checkout of exactly one commit, without history, remotes,
hooks, reflogs or dates that say anything, made once per content and shared read-only by all rollouts.

    ROOT/KE/KEY/checkout       the files and .git
    ROOT/KE/KEY/checkout.tar   the same, packed (see `sandbox.pack`)
    ROOT/KE/KEY/checkout.git.tar   its .git alone, packed

`KEY` is a hash of the content. A task that carries its files gets its repository written directly, without any git
process (a few milliseconds: there are thousands of tiny tasks); a directory is copied and committed by git.
"""

import hashlib
import os
import shutil
import stat
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from lightning_ray.sandbox import pack
from lightning_ray.tasks.base import Task

AUTHOR = "workspace <workspace@localhost>"
DATE = pack.MTIME
BRANCH = "main"
FORMAT = "1"
"""Part of every key; raised when the same content would be laid out differently."""
CONFIG = b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\tlogallrefupdates = false\n"


class Workspaces:
    """See `base.Workspaces`. Safe for several processes on one `root`."""

    def __init__(self, root: Path, of_image: Callable[[str, Path], None] | None = None) -> None:
        """`of_image` copies the checkout of a container image into a directory (`sandbox.backend.Backend.checkout`)."""
        self._root = root.absolute()
        self._of_image = of_image
        self._known: dict[str, Path] = {}

    def prepare(self, task: Task) -> Path:
        """Raises ValueError for a task that carries neither files nor a directory nor an image that is at hand, files
        with impossible names, or a patch that does not apply to its image's checkout."""
        if task.files and task.directory:
            raise ValueError(f"task {task.instance_id} has both `files` and `directory`; give one")
        if task.files:
            files = {name: text.encode() for name, text in task.files.items()}
            for name in files:
                check_name(name, task.instance_id)
            if not any(Path(name).name == ".gitattributes" for name in files):  # they may change what git stores
                return self._made(_key(files.items()), lambda place: _write_members(place, checkout(files)))
            return self._made(_key(files.items()), lambda place: _commit_files(place, files))
        if task.directory:
            if task.directory not in self._known:
                source = Path(task.directory)
                if not source.is_dir():
                    raise ValueError(f"task {task.instance_id}: no directory {task.directory}")
                key = _key(_facts(source))
                self._known[task.directory] = self._made(key, lambda place: _commit_copy(place, source))
            return self._known[task.directory]
        if task.image_name and self._of_image is not None:
            key = _key([("image", task.image_name.encode()), ("patch", task.patch.encode())])
            return self._made(key, lambda place: self._commit_image(place, task))
        where = "; its image's checkout needs sandbox.backend container or kubernetes" if task.image_name else ""
        raise ValueError(f"task {task.instance_id} has neither `files` nor `directory`: nothing to work on{where}")

    def _commit_image(self, place: Path, task: Task) -> None:
        """The image's checkout with the task's bug (`task.patch`, as in SWE-smith) in it."""
        assert self._of_image is not None
        self._of_image(task.image_name, place)
        if task.patch.strip():
            env = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CEILING_DIRECTORIES": str(place.parent)}
            done = subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=place, env=env, capture_output=True,
                                  input=task.patch.encode("utf-8", "surrogateescape"), check=False)  # fmt: skip
            if done.returncode:
                raise ValueError(f"task {task.instance_id}: its patch does not apply to the checkout in "
                                 f"{task.image_name}: {done.stderr.decode('utf-8', 'replace').strip()[:300]}")
        _plain_modes(place)
        _commit(place)

    def _made(self, key: str, make) -> Path:
        """The checkout of `key`; made in a directory aside and renamed, so that it is whole or absent."""
        place = self._root / key[:2] / key
        final = place / "checkout"
        if final.is_dir():
            return final
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".making-", dir=self._root))
        try:
            (aside / "checkout").mkdir()
            make(aside / "checkout")
            pack.packed_beside(aside / "checkout").write_bytes(pack.pack(aside / "checkout"))
            pack.repository_beside(aside / "checkout").write_bytes(pack.pack_repository(aside / "checkout"))
            aside.chmod(0o755)
            try:
                aside.rename(place)
            except OSError:
                if not final.is_dir():  # else another process was faster
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return final


def check_name(name: str, instance_id: str) -> None:
    """Raise ValueError unless `name` is a plain relative path outside `.git`."""
    parts = name.split("/")
    if not all(parts) or "\0" in name or {".", ".."} & set(parts) or ".git" in (part.lower() for part in parts):
        raise ValueError(f"task {instance_id}: {name!r} is not a file name inside a workspace")


def _key(facts: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256(FORMAT.encode())
    for name, content in sorted(facts):
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:40]


def _facts(source: Path) -> list[tuple[str, bytes]]:
    """What identifies a directory on disk without reading it all: names, modes, sizes, times."""
    facts = [("", str(source.resolve()).encode())]
    for directory, folders, names in os.walk(source):
        if ".git" in folders:
            folders.remove(".git")
        for name in names + [folder for folder in folders if os.path.islink(os.path.join(directory, folder))]:
            path = os.path.join(directory, name)
            info = os.lstat(path)
            what = f"{info.st_mode} {info.st_size} {info.st_mtime_ns}"
            facts.append((os.path.relpath(path, source), what.encode()))
    return facts


def checkout(files: dict[str, bytes]) -> dict[str, bytes]:
    """The whole content of a checkout (work tree and `.git`) for regular files of mode 0644, by relative path."""
    objects: dict[str, bytes] = {}

    def store(kind: str, content: bytes) -> bytes:
        data = f"{kind} {len(content)}\0".encode() + content
        digest = hashlib.sha1(data).digest()
        name = digest.hex()
        objects[f".git/objects/{name[:2]}/{name[2:]}"] = zlib.compress(data)
        return digest

    blobs = {name: store("blob", content) for name, content in files.items()}
    tree = _tree({tuple(name.split("/")): blob for name, blob in blobs.items()}, store)
    text = f"tree {tree.hex()}\nauthor {AUTHOR} {DATE} +0000\ncommitter {AUTHOR} {DATE} +0000\n\nworkspace\n"
    commit = store("commit", text.encode())
    return {
        **files,
        **objects,
        ".git/HEAD": f"ref: refs/heads/{BRANCH}\n".encode(),
        ".git/config": CONFIG,
        f".git/refs/heads/{BRANCH}": f"{commit.hex()}\n".encode(),
        ".git/index": _index({name: (blobs[name], len(files[name])) for name in files}),
    }


def _tree(blobs: dict[tuple[str, ...], bytes], store) -> bytes:
    """Store the tree objects of paths; git sorts directories as if their names ended with a slash."""
    entries: dict[bytes, tuple[bytes, bytes]] = {}
    folders: dict[str, dict[tuple[str, ...], bytes]] = {}
    for path, blob in blobs.items():
        if len(path) == 1:
            entries[path[0].encode()] = (b"100644 " + path[0].encode(), blob)
        else:
            folders.setdefault(path[0], {})[path[1:]] = blob
    for folder, inside in folders.items():
        if folder.encode() in entries:
            raise ValueError(f"{folder!r} is both a file and a directory")
        entries[folder.encode() + b"/"] = (b"40000 " + folder.encode(), _tree(inside, store))
    return store("tree", b"".join(head + b"\0" + digest for _, (head, digest) in sorted(entries.items())))


def _index(blobs: dict[str, tuple[bytes, int]]) -> bytes:
    """A git index, version 2 (gitformat-index(5)), with no stat data: git compares contents once and fills it in."""
    out = bytearray(struct.pack(">4sLL", b"DIRC", 2, len(blobs)))
    for name, (blob, size) in sorted(blobs.items(), key=lambda item: item[0].encode()):
        path = name.encode()
        entry = struct.pack(">10L", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, size) + blob
        entry += struct.pack(">H", min(len(path), 0xFFF)) + path
        out += entry + b"\0" * (8 - len(entry) % 8)
    return bytes(out) + hashlib.sha1(out).digest()


def _write_members(place: Path, members: dict[str, bytes]) -> None:
    made = {""}
    for name, content in members.items():
        folder = os.path.dirname(name)
        if folder not in made:
            os.makedirs(place / folder, exist_ok=True)
            made.add(folder)
        (place / name).write_bytes(content)


def _commit_files(place: Path, files: dict[str, bytes]) -> None:
    _write_members(place, files)
    _commit(place)


def _commit_copy(place: Path, source: Path) -> None:
    shutil.copytree(source, place, symlinks=True, ignore=shutil.ignore_patterns(".git"), dirs_exist_ok=True)
    _plain_modes(place)
    _commit(place)


def _plain_modes(place: Path) -> None:
    """Modes as git knows them."""
    for directory, _, names in os.walk(place):
        os.chmod(directory, 0o755)
        for name in names:
            path = os.path.join(directory, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode):
                os.chmod(path, 0o755 if mode & 0o100 else 0o644)


def _commit(place: Path) -> None:
    name, _, email = AUTHOR.partition(" <")
    when = f"{DATE} +0000"
    env = {
        "PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": email.rstrip(">"), "GIT_AUTHOR_DATE": when,
        "GIT_COMMITTER_NAME": name, "GIT_COMMITTER_EMAIL": email.rstrip(">"), "GIT_COMMITTER_DATE": when,
    }  # fmt: skip
    for command in (
        ["init", "-q", "--template=", "-b", BRANCH],
        ["config", "core.logAllRefUpdates", "false"],
        ["add", "-A", "-f", "."],
        ["commit", "-q", "--allow-empty", "--no-gpg-sign", "-m", "workspace"],
        ["repack", "-adq"],
    ):
        subprocess.run(["git", *command], cwd=place, env=env, check=True, capture_output=True)
    for leftover in ("COMMIT_EDITMSG", "logs", "hooks", "description"):
        path = place / ".git" / leftover
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
