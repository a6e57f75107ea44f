"""What every sandbox can do. Backends (bubblewrap, container, kubernetes) satisfy `Sandbox`; nothing else may
run a command that a model wrote.

A sandbox is started from a `Workspace` (a directory with a git checkout of exactly one commit), holds no secret,
and reaches nothing but the proxy endpoint that it was given. `stop` is idempotent and leaves nothing behind.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from lightning_ray.config import SandboxConfig

WORKSPACE = "/testbed"
"""Where the workspace lies inside every sandbox."""
ENDPOINT_PORT = 8080
"""Port of a rollout's endpoint inside a network namespace of its own."""
ENDPOINT_URL = f"http://127.0.0.1:{ENDPOINT_PORT}"

Blame = Literal["task", "harness", "sandbox", "infra"]
Listen = Callable[[int, int], Awaitable[None]]
"""`listen(pid, port)`: the proxy serves the rollout on 127.0.0.1:`port` in the network namespace of a process of this
machine."""


class SandboxError(Exception):
    """The sandbox itself failed (not the command in it)."""

    blame: ClassVar[Blame] = "sandbox"
    """Whose failure it is; see `harness/stages.py` for what follows from it."""


class SandboxUnavailable(SandboxError):
    """This machine cannot give the isolation that was asked for. The message names what is missing and the remedy."""


class SandboxDied(SandboxError):
    """The sandbox's processes are gone while a command ran or before it: killed from inside, or out of memory."""


class LimitExceeded(SandboxDied):
    """The sandbox was ended because what ran in it used more than it may: its own doing, so data."""

    blame = "harness"


class PatchUnavailable(SandboxError):
    """No patch can be taken of what a rollout left in its workspace (too large, unreadable): its own doing, so data."""

    blame = "harness"


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

    @classmethod
    def of(cls, config: SandboxConfig) -> "Limits":
        return cls(config.memory_mb, config.processes, config.cpus, config.disk_mb, config.output_bytes)


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
    endpoint: str = ""
    """Where the proxy serves this rollout over TCP, its token included. Empty: nothing can be reached."""


class Sandbox(Protocol):
    """One isolated place to run commands in."""

    spec: SandboxSpec

    async def start(self) -> None:
        """Bring it up, or raise `SandboxError`. Afterwards `exec` works at once."""

    async def connect(self, listen: Listen) -> str:
        """Make the rollout's endpoint reachable from inside, and say by which base URL (without `/v1`)."""

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


@asynccontextmanager
async def running(sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    """The sandbox, started, and surely stopped."""
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.stop()


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to have sandboxes, checked on this machine or cluster (`backend.choose`)."""

    make: Callable[[SandboxSpec], Sandbox]
    report: dict[str, Any]
    """What the sandboxes are, for the run's record."""
    janitor: Callable[[], list[str]]
    """Removes what dead runs left, and names each thing removed."""
    checkout: Callable[[str, Path], None] | None = None
    """Copies the checkout that a container image has into a directory; None where images are not at hand."""
    close: Callable[[], None] = lambda: None
    """Ends what the backend itself holds. Idempotent."""
    starts_at_once: int = 8
    """Sandboxes of one runner that may be coming up at the same time."""
