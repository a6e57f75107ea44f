"""Which sandbox a run gets. Fail-closed: what was asked for is tried on this machine by starting one sandbox and
looking at it from inside and outside; where anything is missing, `SandboxUnavailable` names it and the remedy. Only
`sandbox.allow_unsafe: true` goes on with less, and what it goes on without is in the report.
"""

import contextlib
import functools
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_ray.config import SandboxConfig
from lightning_ray.sandbox import bubblewrap, filesystem, limits, overlay, probe, seccomp, uids
from lightning_ray.sandbox.base import Backend, SandboxError, SandboxSpec, SandboxUnavailable, running
from lightning_ray.sandbox.bubblewrap import Bubblewrap
from lightning_ray.sandbox.unconfined import Unconfined


def choose(config: SandboxConfig, run: str = "run") -> Backend:
    """Check this machine, or the cluster, and pick. Bubblewrap takes about 50 ms. Callable from any thread, with or
    without an event loop. `run` names the run where a cluster's objects must be told apart."""
    if config.backend == "kubernetes":
        from lightning_ray.sandbox.kubernetes.backend import open_backend

        return open_backend(config, run)
    return _container(config) if config.backend == "container" else _bubblewrap(config)


def _container(config: SandboxConfig) -> Backend:
    from lightning_ray.sandbox.container import Containers, daemon  # its client library takes 0.2 s to import

    containers = Containers(config)
    return Backend(make=containers.make, report=containers.report(), checkout=containers.images.checkout,
                   janitor=lambda: limits.janitor() + daemon.janitor(), close=containers.close)


def _bubblewrap(config: SandboxConfig) -> Backend:
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
        faults = probe.apart(_faults(make, set(without)))
    except SandboxError as error:
        reason = f"no sandbox can be started: {error}{remedy(namespace_facts())}"
        if not config.allow_unsafe:
            raise SandboxUnavailable(reason) from error
        return Backend(make=Unconfined, report=unconfined_report(reason), janitor=limits.janitor)
    if faults and not config.allow_unsafe:
        raise SandboxUnavailable("the sandbox does not isolate: " + "; ".join(faults))
    return Backend(make=make, report=report(without, faults), janitor=limits.janitor)


def check(config: SandboxConfig) -> None:
    """Raise `SandboxUnavailable` where this machine cannot give what the settings ask for, `ConfigError` for settings
    that fit nowhere. A cluster is asked by the runners, which may run where this process does not."""
    if config.backend == "kubernetes":
        from lightning_ray.sandbox.kubernetes.manifest import read_template

        read_template(config.kubernetes.template)
    else:
        choose(config).close()


def report(without: dict[str, str], faults: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "backend": "bubblewrap",
        "bubblewrap": bubblewrap.version(),
        "namespaces": list(probe.NAMESPACES),
        "user": "own uid" if os.geteuid() == 0 and "user" not in without else "user namespace",
        "system_calls": "none" if "system_calls" in without else "seccomp",
        "limits": limits.in_force(),
        "large_workspaces": f"copied: {refusal}" if (refusal := overlay.refusal()) else "overlaid",
    }
    unsafe = [*without.values(), *faults]
    return {**facts, "unsafe": unsafe} if unsafe else facts


def unconfined_report(reason: str) -> dict[str, Any]:
    return {
        "backend": "none", "namespaces": [], "user": "the runner's own", "system_calls": "none",
        "limits": {"memory": "rlimit", "pids": "none", "cpu": "none"}, "unsafe": [reason],
    }  # fmt: skip


async def _faults(make: Callable[[SandboxSpec], Bubblewrap], without: set[str]) -> list[str]:
    """Start one sandbox and say what is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="lightning_ray-check-") as directory:
        async with running(make(SandboxSpec(f"check-{secrets.token_hex(4)}", Path(directory)))) as sandbox:
            found = await probe.look(sandbox, filesystem.environment(sandbox.spec), probe.NAMESPACES, without)
            if os.geteuid() == 0 and "user" not in without and sandbox.user == 0:
                found.append("it runs as root")
    return found


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
