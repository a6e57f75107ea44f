"""What every sandbox with a shell inside can do: `exec`, `put`, `get` and `diff` of the `Sandbox` protocol."""

import asyncio
import secrets
import shlex
from abc import ABC, abstractmethod
from pathlib import Path

from lightning_ray.sandbox import pack
from lightning_ray.sandbox.base import ExecResult, PatchUnavailable, SandboxDied, SandboxError, SandboxSpec

FILE_BYTES = 16 * 2**20
"""Largest file that `get` returns."""
PATCH_BYTES = 8 * 2**20
"""Largest patch that `diff` returns."""
OWN_TIMEOUT_S = 60.0
"""For what `put`, `get` and `diff` run inside."""
NO_SUCH_FILE = 44
"""Exit status of our own commands."""


class Runs(ABC):
    """Runs commands inside, one after the other: `shell.Shell` through pipes, or a backend's own way."""

    async def run(self, command: str, *, timeout_s: float, env: dict[str, str] | None = None, stdin: bytes = b"",
                  output_bytes: int | None = None) -> ExecResult:
        """Like `Sandbox.exec`."""
        raw, returncode, timed_out, truncated = await self.run_raw(command, timeout_s, env, stdin, output_bytes)
        return ExecResult(raw.decode("utf-8", "replace"), returncode, timed_out, truncated)

    @abstractmethod
    async def run_raw(self, command: str, timeout_s: float, env: dict[str, str] | None = None, stdin: bytes = b"",
                      output_bytes: int | None = None) -> tuple[bytes, int, bool, bool]:
        """Output bytes, exit status, whether it timed out, whether output was thrown away."""


class Commands:
    """Mixed into a sandbox, which sets `_shell` when it has started."""

    spec: SandboxSpec
    _shell: Runs | None = None
    _workspace: str
    """Where the workspace lies, as the shell sees it."""
    _scratch: str
    """A writable directory outside it."""
    pid: int
    """Its first process, as this machine numbers it."""

    @property
    def user(self) -> int:
        """The user id that its processes have on this machine."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("\nUid:")[2].split()[0])

    async def exec(self, command: str, *, timeout_s: float, env: dict[str, str] | None = None,
                   stdin: bytes = b"") -> ExecResult:
        return await self._live.run(command, timeout_s=timeout_s, env=env, stdin=stdin)

    @property
    def _live(self) -> Runs:
        if self._shell is None:
            raise SandboxDied("the sandbox is not running")
        return self._shell

    async def put(self, files: dict[str, bytes]) -> None:
        for name in files:
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"not a path below the workspace: {name!r}")
        command = f"tar -xf - -C {self._workspace} --no-same-owner"
        done = await self._live.run(command, timeout_s=OWN_TIMEOUT_S, stdin=pack.pack_files(files))
        if done.returncode:
            raise SandboxError(f"files could not be written into the sandbox: {done.output.strip()}")

    async def get(self, path: str) -> bytes:
        name = shlex.quote(path if path.startswith("/") else f"{self._workspace}/{path}")
        raw, returncode, timed_out, truncated = await self._live.run_raw(
            f"test -f {name} || exit {NO_SUCH_FILE}; cat -- {name}", OWN_TIMEOUT_S, output_bytes=FILE_BYTES
        )
        if returncode == NO_SUCH_FILE:
            raise FileNotFoundError(path)
        if returncode or timed_out or truncated:
            raise SandboxError(f"{path} cannot be read, or is larger than {FILE_BYTES} bytes")
        return raw

    async def diff(self) -> str:
        """Taken with the workspace's own repository, brought anew from outside: what was done to `.git` inside
        (commits, configuration, hooks, ignored files) makes no difference. Bytes that are not UTF-8 come as
        surrogate escapes. `PatchUnavailable` where the patch is too large or cannot be taken.
        """
        try:
            repository = await asyncio.to_thread(pack.read_repository, self.spec.workspace)
        except OSError as error:
            raise SandboxError(f"the workspace's own repository cannot be read: {error}") from error
        place = f"{self._scratch}/{secrets.token_hex(8)}"
        git = f"git --git-dir={place}/.git --work-tree={self._workspace} -c core.quotePath=false"
        command = (
            f"mkdir {place} && tar -xf - -C {place} 2>/dev/null && cd {self._workspace} && "
            f"{{ {git} add -A --ignore-errors . >/dev/null 2>&1; "
            f"{git} diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames "
            f"--src-prefix=a/ --dst-prefix=b/ HEAD 2>/dev/null; }}; status=$?; rm -rf {place}; exit $status"
        )
        env = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_OPTIONAL_LOCKS": "0"}
        raw, returncode, timed_out, truncated = await self._live.run_raw(
            command, OWN_TIMEOUT_S, env, repository, PATCH_BYTES
        )
        if truncated:
            raise PatchUnavailable(f"the patch is larger than {PATCH_BYTES} bytes")
        if returncode or timed_out:
            reason = "git took too long" if timed_out else raw[-500:].decode("utf-8", "replace")
            raise PatchUnavailable(f"no patch can be taken of the workspace: {reason}")
        return raw.decode("utf-8", "surrogateescape")
