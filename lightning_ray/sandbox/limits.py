"""Resource limits of one sandbox, by the best that the machine allows, and the janitor that finds what dead runs left.

`memory`, `pids` and `cpu` are looked for one by one: a cgroup v2 below which this process may make children, else a
cgroup v1 hierarchy, else rlimits (`memory` by RLIMIT_DATA and `pids` by RLIMIT_NPROC, per process and per user
namespace; `cpu` then has no limit). What was found is tried before it is believed. Every sandbox gets cgroups of its
own, named after the process that owns it, so that the janitor can tell whose they were.
"""

import contextlib
import functools
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lightning_ray.sandbox.base import Limits, SandboxError

PREFIX = "lightning_ray."
MARK = "LIGHTNING_RAY_SANDBOX"
"""Environment variable of the outer bubblewrap process (not seen inside): `owner()` of the process that started it,
and more behind a dot."""
CONTROLLERS = ("memory", "pids", "cpu")
FILES = {
    ("memory", 1): "memory.limit_in_bytes", ("pids", 1): "pids.max", ("cpu", 1): "cpu.cfs_quota_us",
    ("memory", 2): "memory.max", ("pids", 2): "pids.max", ("cpu", 2): "cpu.max",
}  # fmt: skip
PERIOD_US = 100_000
OPEN_FILES = 4096


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted cgroup hierarchy and where in it this process is."""

    version: int
    controllers: frozenset[str]
    """Of version 1; a version 2 hierarchy says it in its files."""
    top: Path
    own: Path

    def candidates(self) -> list[Path]:
        """Where children might be made: the process's own cgroup, then those above it."""
        return [self.own, *(above for above in self.own.parents if above.is_relative_to(self.top))]


def hierarchies(mountinfo: str, own_cgroups: str) -> list[Hierarchy]:
    """All mounted hierarchies, from the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    paths: dict[frozenset[str], str] = {}
    for line in own_cgroups.splitlines():
        _, names, path = line.split(":", 2)
        paths[frozenset(names.split(",")) if names else frozenset()] = path
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        root, mount = left.split(" ")[3:5]
        names = frozenset(options.split(",")) & frozenset(CONTROLLERS) if kind == "cgroup" else frozenset()
        if kind == "cgroup" and not names:
            continue
        path = next((path for key, path in paths.items() if (names <= key if names else not key)), "/")
        inside = os.path.relpath(path, root) if path == root or path.startswith(root.rstrip("/") + "/") else "."
        top = Path(mount)
        found.append(Hierarchy(1 if kind == "cgroup" else 2, names, top, top if inside == "." else top / inside))
    return found


def applied(pid: int, limits: Limits) -> dict[str, str]:
    """Which mechanism holds process `pid`, which somebody else put into its cgroups, to `limits`: `cgroup v2`,
    `cgroup v1`, or `none` where no such value is set there."""
    found = dict.fromkeys(CONTROLLERS, "none")
    mounted = hierarchies(Path("/proc/self/mountinfo").read_text(), Path(f"/proc/{pid}/cgroup").read_text())
    for hierarchy in mounted:
        for name in CONTROLLERS:
            file = FILES[name, hierarchy.version]
            with contextlib.suppress(OSError):
                if (hierarchy.own / file).read_text().strip() == settings(name, hierarchy.version, limits)[file]:
                    found[name] = f"cgroup v{hierarchy.version}"
    return found


def unique(name: str) -> str:
    """A name for what belongs to one sandbox, from the sandbox's own."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:64]}.{secrets.token_hex(4)}"


def directory() -> Path:
    """A new one, for what this process holds for sandboxes. `janitor` removes it once the process is gone."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner()}."))


@functools.cache
def owner() -> str:
    """This process, as `PID-START`: unique on this machine since it booted."""
    return f"{os.getpid()}-{_start_time(os.getpid())}"


def _start_time(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def owner_lives(name: str) -> bool:
    """Whether the process named `PID-START` still runs."""
    pid, _, start = name.partition("-")
    return pid.isdigit() and _start_time(int(pid)) == int(start or 0)


def _try(parent: Path, version: int, controllers: frozenset[str]) -> frozenset[str]:
    """Those of `controllers` that a cgroup made below `parent` has, if a process can be moved there."""
    probe = parent / f"{PREFIX}{owner()}.probe"
    try:
        if version == 2:
            enabled = set((parent / "cgroup.subtree_control").read_text().split())
            for name in sorted(controllers - enabled):
                with contextlib.suppress(OSError):  # not offered here, or processes live in this very cgroup
                    (parent / "cgroup.subtree_control").write_text(f"+{name}")
        probe.mkdir(exist_ok=True)
    except OSError:
        return frozenset()
    process = subprocess.Popen(["sleep", "60"], env={"PATH": os.defpath}, stdin=subprocess.DEVNULL)
    try:
        (probe / "cgroup.procs").write_text(str(process.pid))
        return frozenset(name for name in controllers if os.access(probe / FILES[name, version], os.W_OK))
    except OSError:
        return frozenset()
    finally:
        process.kill()
        process.wait()
        remove_cgroup(probe)


@functools.cache
def places() -> dict[str, tuple[int, Path]]:
    """For each controller that can be used: cgroup version, and the cgroup below which sandboxes get theirs."""
    found: dict[str, tuple[int, Path]] = {}
    mounted = hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    for hierarchy in sorted(mounted, key=lambda each: -each.version):
        for parent in hierarchy.candidates():
            missing = frozenset(CONTROLLERS) - found.keys()
            wanted = missing if hierarchy.version == 2 else missing & hierarchy.controllers
            for name in _try(parent, hierarchy.version, wanted) if wanted else ():
                found[name] = (hierarchy.version, parent)
    return found


def in_force() -> dict[str, str]:
    """Which mechanism limits what: `cgroup v2`, `cgroup v1`, `rlimit`, or `none`."""
    fallback = {"memory": "rlimit", "pids": "rlimit", "cpu": "none"}
    return {name: f"cgroup v{places()[name][0]}" if name in places() else fallback[name] for name in CONTROLLERS}


def settings(name: str, version: int, limits: Limits) -> dict[str, str]:
    """What to write where, in order, for one controller. A file that is missing (swap accounting) is passed over."""
    memory = str(limits.memory_mb * 2**20)
    quota = str(max(1000, round(limits.cpus * PERIOD_US)))
    return {
        ("memory", 1): {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
        ("memory", 2): {"memory.max": memory, "memory.swap.max": "0"},
        ("pids", 1): {"pids.max": str(limits.processes)},
        ("pids", 2): {"pids.max": str(limits.processes)},
        ("cpu", 1): {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota},
        ("cpu", 2): {"cpu.max": f"{quota} {PERIOD_US}"},
    }[name, version]


def ulimits(limits: Limits, by_cgroup: set[str]) -> str:
    """rlimits as a line for the shell inside (soft and hard, no process is started for it); what no cgroup limits is
    limited here. A hard limit that is stricter already stays: raising it is refused to a user without rights."""
    kib = {"-f": limits.disk_mb * 1024}
    if "memory" not in by_cgroup:
        kib["-d"] = limits.memory_mb * 1024
    counts = {"-c": 0, "-n": OPEN_FILES}
    if "pids" not in by_cgroup:
        counts["-u"] = limits.processes
    return "; ".join(f"ulimit {flag} {value} 2>/dev/null" for flag, value in (kib | counts).items())


@dataclass
class LimitedGroup:
    """The cgroups of one sandbox. All methods block for well under a millisecond, but for `remove`."""

    name: str
    limits: Limits
    directories: list[Path] = field(default_factory=list)

    def create(self) -> None:
        for controller, (version, parent) in places().items():
            directory = parent / f"{PREFIX}{owner()}.{self.name}"
            try:
                if directory not in self.directories:
                    directory.mkdir()
                    self.directories.append(directory)
                for file, value in settings(controller, version, self.limits).items():
                    with contextlib.suppress(FileNotFoundError), open(directory / file, "r+") as setting:
                        setting.write(value)
            except OSError as error:
                self.remove()
                raise SandboxError(f"cannot make the cgroup {directory}: {error}") from error

    def admit(self, pid: int) -> None:
        """Put `pid` under the limits; what it starts afterwards is under them too."""
        try:
            for directory in self.directories:
                (directory / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise SandboxError(f"cannot put process {pid} under its limits: {error}") from error

    def remove(self, timeout_s: float = 5.0) -> None:
        """Kill what is left in them and remove them. Idempotent."""
        while self.directories:
            remove_cgroup(self.directories[-1], timeout_s)
            self.directories.pop()


def remove_cgroup(directory: Path, timeout_s: float = 5.0) -> None:
    """Kill the processes of one cgroup and remove it."""
    deadline = time.monotonic() + timeout_s
    pause = 0.0005
    while True:
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SandboxError(f"the cgroup {directory} cannot be emptied: {error}") from error
        with contextlib.suppress(OSError):
            for pid in (directory / "cgroup.procs").read_text().split():
                kill(int(pid))
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def marked() -> dict[int, str]:
    """Processes that were started for sandboxes, and the value of their `MARK`."""
    environments = {process.pid: process.info["environ"] or {} for process in psutil.process_iter(["environ"])}
    return {pid: environment[MARK] for pid, environment in environments.items() if MARK in environment}


def janitor() -> list[str]:
    """Remove what dead runs left on this machine (processes, cgroups, directories) and name each thing removed.

    Nothing should ever be left, since sandboxes die with the process that started them; this finds out and proves it.
    What lives, and what is not ours, is not touched.
    """
    removed = []
    for pid, value in marked().items():
        if not owner_lives(value.partition(".")[0]):
            kill(pid)
            removed.append(f"process {pid} of {value}")
    for parent in {parent for _, parent in places().values()}:
        for directory in parent.glob(f"{PREFIX}*"):
            of = directory.name.removeprefix(PREFIX).partition(".")[0]
            if directory.is_dir() and not owner_lives(of):
                remove_cgroup(directory)
                removed.append(f"cgroup {directory}")
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        of = directory.name.removeprefix(PREFIX).partition(".")[0]
        with contextlib.suppress(FileNotFoundError):
            if directory.stat().st_uid != os.geteuid() or owner_lives(of):
                continue
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(f"directory {directory}")
    return removed
