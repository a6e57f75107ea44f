"""Which sandbox a run gets. Fail-closed: what was asked for is tried on this machine by starting one sandbox and
looking at it from inside and outside; where anything is missing, `SandboxUnavailable` names it and the remedy. Only
`sandbox.allow_unsafe: true` goes on with less, and what it goes on without is in the report.
"""

import asyncio
import contextlib
import functools
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ray.config import SandboxConfig
from lightning_ray.sandbox import bubblewrap, filesystem, limits, seccomp, uids
from lightning_ray.sandbox.base import Sandbox, SandboxError, SandboxSpec, SandboxUnavailable
from lightning_ray.sandbox.bubblewrap import Bubblewrap
from lightning_ray.sandbox.unconfined import Unconfined

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
PROGRAMS = ("bash", "git", "tar", "head", "cat", "python3")
"""What must be there inside."""
OF_BASH = ("PWD", "SHLVL", "_")
"""Environment variables that bash sets by itself."""
PROBE_TIMEOUT_S = 60.0
SECCOMP_FILTER = 2
"""`Seccomp:` in /proc/PID/status."""

PROBE = r"""
for name in user mnt pid net ipc uts cgroup; do echo "namespace.$name $(readlink /proc/self/ns/$name)"; done
while read -r key value; do
  case $key in Seccomp:|NoNewPrivs:|CapEff:) echo "$key $value";; esac
done </proc/self/status
echo "interfaces $(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | sort | tr '\n' ' ')"
echo "environment $(tr '\0' '\n' </proc/$$/environ | cut -d= -f1 | sort | tr '\n' ' ')"
ls /proc/1/fd/ >/dev/null 2>&1 && echo "shell open"
unshare --user true 2>/dev/null && echo "nested yes"
for name in PROGRAMS; do command -v $name >/dev/null || echo "missing.$name yes"; done
touch /usr/lightning_ray_probe 2>/dev/null && echo "writable /usr"
exit 0
"""


@dataclass(frozen=True)
class Backend:
    """How to make a sandbox, and what it is, for the run's record."""

    make: Callable[[SandboxSpec], Sandbox]
    report: dict[str, Any]


def choose(config: SandboxConfig) -> Backend:
    """Check this machine and pick. Takes about 50 ms. Callable from any thread, with or without an event loop."""
    if config.backend != "bubblewrap":
        raise SandboxUnavailable(f"sandbox.backend: {config.backend!r} is not there yet; use bubblewrap")
    without: dict[str, str] = {}
    for part, ask in (("system_calls", seccomp.program), ("user", uids.of_this_process)):
        try:
            ask()
        except SandboxUnavailable as error:
            if not config.allow_unsafe:
                raise
            without[part] = str(error)
    make = functools.partial(Bubblewrap, without=frozenset(without))
    try:
        faults = look(make, set(without))
    except SandboxError as error:
        reason = f"no sandbox can be started: {error}{remedy(namespace_facts())}"
        if not config.allow_unsafe:
            raise SandboxUnavailable(reason) from error
        return Backend(Unconfined, unconfined_report(reason))
    if faults and not config.allow_unsafe:
        raise SandboxUnavailable("the sandbox does not isolate: " + "; ".join(faults))
    return Backend(make, report(without, faults))


def check(config: SandboxConfig) -> None:
    """Raise `SandboxUnavailable` where this machine cannot give what the settings ask for."""
    choose(config)


def report(without: dict[str, str], faults: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "backend": "bubblewrap",
        "bubblewrap": bubblewrap.version(),
        "namespaces": list(NAMESPACES),
        "user": "own uid" if os.geteuid() == 0 and "user" not in without else "user namespace",
        "system_calls": "none" if "system_calls" in without else "seccomp",
        "limits": limits.in_force(),
    }
    unsafe = [*without.values(), *faults]
    return {**facts, "unsafe": unsafe} if unsafe else facts


def unconfined_report(reason: str) -> dict[str, Any]:
    return {
        "backend": "none", "namespaces": [], "user": "the runner's own", "system_calls": "none",
        "limits": {"memory": "rlimit", "pids": "none", "cpu": "none"}, "unsafe": [reason],
    }  # fmt: skip


def look(make: Callable[[SandboxSpec], Bubblewrap], without: set[str]) -> list[str]:
    """Start one sandbox and say what is wrong with it."""
    found: list[list[str] | BaseException] = []

    def work() -> None:  # a thread of its own: the caller may have a running event loop
        try:
            found.append(asyncio.run(_look(make, without)))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


async def _look(make: Callable[[SandboxSpec], Bubblewrap], without: set[str]) -> list[str]:
    directory = Path(tempfile.mkdtemp(prefix="lightning_ray-check-"))
    sandbox = make(SandboxSpec(f"check-{secrets.token_hex(4)}", directory))
    try:
        await sandbox.start()
        done = await sandbox.exec(PROBE.replace("PROGRAMS", " ".join(PROGRAMS)), timeout_s=PROBE_TIMEOUT_S)
        host = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
        user = sandbox.user
    finally:
        await sandbox.stop()
        shutil.rmtree(directory, ignore_errors=True)
    if done.returncode or done.timed_out:
        raise SandboxError(f"the probe failed: {done.output.strip()[-300:]}")
    allowed = {*filesystem.environment(sandbox.spec), *OF_BASH}
    return faults(done.output, host, allowed, user if os.geteuid() == 0 and "user" not in without else None, without)


def faults(probe: str, host: dict[str, str], variables: set[str], user: int | None, without: set[str]) -> list[str]:
    """What is wrong with a sandbox, from the probe's output, the host's namespaces, the environment variables that it
    was given, and the user id that its processes have on the host (None: needs none of its own)."""
    facts = dict(line.split(" ", 1) if " " in line else (line, "") for line in probe.splitlines())
    wrong = [f"its {name} namespace is the host's" for name in host if facts.get(f"namespace.{name}") == host[name]]
    wrong += [f"its {name} namespace is unknown" for name in host if f"namespace.{name}" not in facts]
    if facts.get("Seccomp:") != str(SECCOMP_FILTER) and "system_calls" not in without:
        wrong.append("no system call filter is active")
    if facts.get("NoNewPrivs:") != "1":
        wrong.append("it can gain privileges (NoNewPrivs)")
    if int(facts.get("CapEff:", "1"), 16):
        wrong.append(f"it has capabilities ({facts.get('CapEff:')})")
    if facts.get("interfaces", "").split() != ["lo"]:
        wrong.append(f"it has network interfaces: {facts.get('interfaces')}")
    if leaked := set(facts.get("environment", "").split()) - variables:
        wrong.append(f"it sees environment variables of the host: {', '.join(sorted(leaked))}")
    if "nested" in facts and "system_calls" not in without:
        wrong.append("it can make user namespaces")
    if "writable" in facts:
        wrong.append("it can write to /usr")
    if "shell" in facts:
        wrong.append("it can reach into the shell that drives it")
    if user == 0:
        wrong.append("it runs as root")
    missing = [key.removeprefix("missing.") for key in facts if key.startswith("missing.")]
    if missing:
        wrong.append(f"programs are missing inside: {', '.join(missing)} (install them on this machine, below /usr)")
    return wrong


def namespace_facts() -> dict[str, str]:
    """What this machine says about user namespaces."""
    facts = {"container": "yes" if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() else "no"}
    for name in ("user/max_user_namespaces", "kernel/unprivileged_userns_clone",
                 "kernel/apparmor_restrict_unprivileged_userns"):
        with contextlib.suppress(OSError):
            facts[name] = Path("/proc/sys", name).read_text().strip()
    return facts


def remedy(facts: dict[str, str]) -> str:
    """What to do about a machine that allows no sandbox, as the end of a sentence."""
    ways = []
    if facts.get("user/max_user_namespaces") == "0":
        ways.append("`sysctl user.max_user_namespaces=15000`")
    if facts.get("kernel/unprivileged_userns_clone") == "0":
        ways.append("`sysctl kernel.unprivileged_userns_clone=1`")
    if facts.get("kernel/apparmor_restrict_unprivileged_userns") == "1":
        ways.append("`sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or an AppArmor profile for bwrap")
    if facts.get("container") == "yes":
        ways.append("starting this container with `--security-opt seccomp=unconfined --security-opt "
                    "apparmor=unconfined --security-opt systempaths=unconfined`")
    if not ways:
        ways.append("a kernel and policy that let this user make namespaces (try `unshare -Urn true`)")
    return f". What may help: {'; '.join(ways)}"
