"""What every sandbox can do. Backends (bubblewrap, container, kubernetes) satisfy `Sandbox`; nothing else may
run a command that a model wrote.

A sandbox is started from a `Workspace` (a directory with a git checkout of exactly one commit), holds no secret,
and reaches nothing but the proxy endpoint that it was given. `stop` is idempotent and leaves nothing behind.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

WORKSPACE = "/testbed"
"""Where the workspace lies inside every sandbox."""


class SandboxError(Exception):
    """The sandbox itself failed (not the command in it): an infrastructure failure."""


class SandboxUnavailable(SandboxError):
    """This machine cannot give the isolation that was asked for. The message names what is missing and the remedy."""


class SandboxDied(SandboxError):
    """The sandbox's processes are gone while a command ran or before it: killed from inside, or out of memory."""


class PatchUnavailable(SandboxError):
    """No patch can be taken of what a rollout left in its workspace (too large, unreadable): its own doing, so data
    and not an infrastructure failure."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command printed (stdout and stderr merged, capped) and how it ended."""

    output: str
    returncode: int
    timed_out: bool = False
    truncated: bool = False
    """The output was longer than the cap; the rest was read and thrown away."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use."""

    memory_mb: int = 1024
    processes: int = 128
    cpus: float = 1.0
    disk_mb: int = 512
    output_bytes: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory or file that is visible, read-only, inside."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """One sandbox to start. `workspace` is a host directory, seen copy-on-write at `WORKSPACE`."""

    name: str
    workspace: Path
    limits: Limits = field(default_factory=Limits)
    mounts: tuple[Mount, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    image: str = ""
    """Container image of the task; empty: `sandbox.image`. Bubblewrap shows the host's system instead of an image's."""


class Sandbox(Protocol):
    """One isolated place to run commands in."""

    spec: SandboxSpec

    async def start(self) -> None:
        """Bring it up, or raise `SandboxError`. Afterwards `exec` works at once."""

    async def exec(self, command: str, *, timeout_s: float, env: dict[str, str] | None = None,
                   stdin: bytes = b"") -> ExecResult:
        """Run `command` with `bash -c` in the workspace. A timeout kills what the command started."""

    async def put(self, files: dict[str, bytes]) -> None:
        """Write files (paths relative to the workspace) from outside."""

    async def get(self, path: str) -> bytes:
        """The content of one file (relative to the workspace); FileNotFoundError where there is none."""

    async def diff(self) -> str:
        """What changed against the workspace's one commit, untracked files included, as a git patch."""

    async def stop(self) -> None:
        """Kill and remove everything. Idempotent."""
