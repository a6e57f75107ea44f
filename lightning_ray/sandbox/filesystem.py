"""What a bubblewrap sandbox sees: the argument list that builds its file system, environment and namespaces.

The system is read-only: /usr (and its aliases /bin, /lib ...) from the host, a small /etc of our own, /proc of its own,
a minimal /dev. Writable are the workspace, /tmp, /run and /dev/shm, each a tmpfs with a size. Everything of the user's
is absent unless it is mounted explicitly. /usr/src and /usr/local/src, where container images keep applications, are
hidden.
"""

import atexit
import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from lightning_ray.sandbox import limits
from lightning_ray.sandbox.base import WORKSPACE, SandboxSpec
from lightning_ray.sandbox.overlay import Layers

USER = "agent"
UID = 1000
"""The user inside, whatever the id outside."""
SCRATCH = "/run"
"""A small writable place that `diff` and the like use, apart from /tmp, which a command may have filled."""
SCRATCH_BYTES = 64 * 2**20
SHELL = "/.shell"
"""The shell that drives a sandbox."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PERSONAL = {"HOME": "/tmp", "LANG": "C.UTF-8", "USER": USER, "LOGNAME": USER, "TERM": "dumb"}
"""Environment variables in every sandbox."""
INTERPRETER = "/opt/python"
"""Where the running interpreter is mounted when the system has none."""

ETC = {
    "passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\n{USER}:x:{UID}:{UID}:{USER}:/tmp:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": f"root:x:0:\n{USER}:x:{UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "gitconfig": f"[user]\n\tname = {USER}\n\temail = {USER}@sandbox\n[safe]\n\tdirectory = *\n"
    "[init]\n\tdefaultBranch = main\n[core]\n\tpager = cat\n[advice]\n\tdetachedHead = false\n",
}
COPIED = ("ld.so.cache", "ld.so.conf")
"""Files of the host's /etc that programs need and that say nothing about the user."""
BOUND = ("alternatives", "ld.so.conf.d")
"""Directories of the same kind."""
ALIASES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
HIDDEN = ("/usr/src", "/usr/local/src")


@functools.cache
def etc() -> dict[str, bytes]:
    """The files of /etc inside."""
    files = {name: text.encode() for name, text in ETC.items()}
    for name in COPIED:
        if (path := Path("/etc") / name).is_file():
            files[name] = path.read_bytes()
    return files


@functools.cache
def own_directory() -> Path:
    """A directory that everyone may look into and that is removed by `remove_own_directory`, when this process ends by
    itself, or by `limits.janitor`."""
    directory = limits.directory()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    directory.chmod(0o755)
    return directory


def remove_own_directory() -> None:
    """For a process that will be killed. No sandbox of it may be up; the next one would have another directory."""
    if own_directory.cache_info().currsize:
        shutil.rmtree(own_directory(), ignore_errors=True)
    own_directory.cache_clear()
    unreadable_shell.cache_clear()


def unreadable(name: str, program: bytes) -> Path:
    """A copy of bash that may be executed but not read, for the shell that drives a sandbox.

    The kernel keeps the memory and the file descriptors of a process with such a program (it is not "dumpable",
    prctl(2)) from others of the same user: what runs inside cannot read the driving shell's script or write its
    answers.
    """
    shell = own_directory() / name
    shell.write_bytes(program)
    shell.chmod(0o111)
    return shell


@functools.cache
def unreadable_shell() -> Path:
    """This machine's bash."""
    return unreadable("bash", Path("/bin/bash").read_bytes())


@functools.cache
def system_python() -> str:
    """The interpreter inside, as an absolute path there."""
    for directory in ("/usr/bin", "/usr/local/bin"):
        path = Path(directory) / "python3"
        if path.exists() and path.resolve().is_relative_to("/usr"):
            return str(path)
    return f"{INTERPRETER}/bin/python3"


def environment(spec: SandboxSpec) -> dict[str, str]:
    """All environment variables inside."""
    path = PATH
    if system_python().startswith(INTERPRETER):
        path += f":{INTERPRETER}/bin"
    return {"PATH": path, **PERSONAL, **spec.env}


def arguments(spec: SandboxSpec, keep: Callable[[int], int], reach: Callable[[Path], str],
              workspace: Layers | None = None) -> list[str]:
    """bubblewrap's arguments up to (not including) the command. Without layers the workspace is an empty tmpfs.

    `keep` takes a file descriptor that bubblewrap shall inherit, owns it from then on, and returns it. `reach` gives a
    path under which bubblewrap's user can reach a path of ours.
    """

    def data_fd(name: str, data: bytes) -> str:
        descriptor = keep(os.memfd_create(name))
        os.write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return str(descriptor)

    def sized(size: int, mode: str, target: str) -> list[str]:
        return ["--size", str(size), "--perms", mode, "--tmpfs", target]

    disk = spec.limits.disk_mb * 2**20
    args = (
        "--unshare-user --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try --die-with-parent "
        f"--new-session --as-pid-1 --uid {UID} --gid {UID} --hostname sandbox --clearenv"
    ).split()
    for name, value in environment(spec).items():
        args += ["--setenv", name, value]
    args += ["--ro-bind", "/usr", "/usr"]
    for alias in ALIASES:
        path = Path("/") / alias
        if path.is_symlink():
            args += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    for hidden in HIDDEN:
        if os.path.isdir(hidden):
            args += [*sized(4096, "0555", hidden), "--remount-ro", hidden]
    args += ["--perms", "0755", "--dir", "/etc"]
    for name, data in etc().items():
        args += ["--perms", "0644", "--file", data_fd(name, data), f"/etc/{name}"]
    for name in BOUND:
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if system_python().startswith(INTERPRETER):
        args += ["--ro-bind", reach(Path(sys.base_prefix)), INTERPRETER]
    args += ["--proc", "/proc", "--dev", "/dev", *sized(SCRATCH_BYTES, "1777", "/dev/shm"), "--remount-ro", "/dev"]
    args += [*sized(disk, "1777", "/tmp"), *sized(SCRATCH_BYTES, "0755", SCRATCH), "--dir", "/var", "--dir", "/root"]
    args += ["--symlink", "/tmp", "/var/tmp"]
    args += sized(disk, "0755", WORKSPACE) if workspace is None else [
        "--overlay-src", workspace.lower, "--overlay", workspace.upper, workspace.work, WORKSPACE]
    args += ["--ro-bind", reach(unreadable_shell()), SHELL]
    for mount in spec.mounts:
        mount.source.stat()  # bubblewrap's own message would not name it
        args += ["--ro-bind", reach(mount.source), mount.target]
    return [*args, "--remount-ro", "/", "--chdir", WORKSPACE]
