"""Whether a sandbox isolates: a script that looks at it from inside, and what is wrong with what the script saw.

Every backend runs it before the first rollout (a container backend once for each image), so that a part of the
isolation that is silently missing is an error and no surprise.
"""

import asyncio
import os
from collections.abc import Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_ray.sandbox.base import Sandbox, SandboxError

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
PROGRAMS = ("bash", "git", "tar", "head", "cat", "python3")
"""What must be there inside."""
INSTALL = "install them on this machine, below /usr, or in the image"
OF_BASH = ("PWD", "SHLVL", "_")
"""Environment variables that bash sets by itself."""
TIMEOUT_S = 60.0
SECCOMP_FILTER = 2
"""`Seccomp:` in /proc/PID/status."""

SCRIPT = r"""
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
""".replace("PROGRAMS", " ".join(PROGRAMS))


async def look(sandbox: Sandbox, variables: Collection[str], namespaces: Collection[str],
               without: Collection[str] = ()) -> list[str]:
    """What is wrong with a sandbox that has started. `variables` are the environment variables that it was given,
    `namespaces` those that must be its own; `without` names parts of the isolation that it was started without."""
    done = await sandbox.exec(SCRIPT, timeout_s=TIMEOUT_S)
    if done.returncode or done.timed_out:
        raise SandboxError(f"the probe failed: {done.output.strip()[-300:]}")
    host = {name: os.readlink(f"/proc/self/ns/{name}") for name in namespaces}
    return faults(done.output, host, {*variables, *OF_BASH}, without)


def faults(said: str, host: dict[str, str], variables: set[str], without: Collection[str] = ()) -> list[str]:
    """What is wrong with a sandbox, from the script's output, the host's namespaces, and the environment variables that
    it may have."""
    facts = dict(line.split(" ", 1) if " " in line else (line, "") for line in said.splitlines())
    wrong = [f"its {name} namespace is the host's" for name in host if facts.get(f"namespace.{name}") == host[name]]
    wrong += [f"its {name} namespace is unknown" for name in host if f"namespace.{name}" not in facts]
    if facts.get("Seccomp:") != str(SECCOMP_FILTER) and "system_calls" not in without:
        wrong.append("no system call filter is active")
    if facts.get("NoNewPrivs:") != "1":
        wrong.append("it can gain privileges (NoNewPrivs)")
    if int(facts.get("CapEff:", "1"), 16):
        wrong.append(f"it has capabilities ({facts.get('CapEff:')})")
    if "interfaces" not in without and facts.get("interfaces", "").split() != ["lo"]:
        wrong.append(f"it has network interfaces: {facts.get('interfaces')}")
    leaked = set(facts.get("environment", "").split()) - variables
    if leaked and "environment" not in without:
        wrong.append(f"it sees environment variables of the host: {', '.join(sorted(leaked))}")
    if "nested" in facts and "system_calls" not in without:
        wrong.append("it can make user namespaces")
    if "writable" in facts:
        wrong.append("it can write to /usr")
    if "shell" in facts and "shell" not in without:
        wrong.append("it can reach into the shell that drives it")
    missing = [key.removeprefix("missing.") for key in facts if key.startswith("missing.")]
    if missing:
        wrong.append(f"programs are missing inside: {', '.join(missing)} ({INSTALL})")
    return wrong


def apart(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that runs in a thread and an event loop of its own: the caller may be in one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
