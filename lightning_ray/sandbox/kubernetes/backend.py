"""The kubernetes backend: opens the cluster, runs one Job, and looks at it from inside before the first rollout.

A network policy is no isolation where the cluster's network does not enforce it, which the API server does not say: the
Job tries to reach the API server, and a connection is a refusal to start.
"""

import functools
import io
import secrets
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from kubernetes.client import Configuration

from lightning_ray.config import SandboxConfig
from lightning_ray.sandbox import pack, probe
from lightning_ray.sandbox.base import Backend, Limits, SandboxError, SandboxSpec, SandboxUnavailable, running
from lightning_ray.sandbox.kubernetes.cluster import Cluster
from lightning_ray.sandbox.kubernetes.sandbox import KubernetesSandbox

CHECKOUT_BYTES = 2**30
STARTS_AT_ONCE = 1000
"""Pods that wait cost the runner nothing; how many run at once is `runners.rollouts`."""
ELSEWHERE = ("interfaces", "environment", "shell")
"""Parts of the common look that say nothing here: a pod has an interface and its image's variables, and no shell of
ours is inside."""
REPORT = {
    "user": "non-root", "system_calls": "seccomp RuntimeDefault", "network": "NetworkPolicy",
    "limits": {"memory": "cgroup", "cpu": "cgroup", "pids": "the node's (podPidsLimit)"},
}
SCRIPT = probe.SCRIPT.removesuffix("exit 0\n") + r"""
[ "$(id -u)" = 0 ] && echo "root yes"
[ -e /var/run/secrets/kubernetes.io ] && echo "token yes"
if [ -n "$KUBERNETES_SERVICE_HOST" ]; then
  for try in 1 2 3; do  # a network may take a moment to know a new pod
    reached=
    timeout 5 bash -c 'exec 3<>"/dev/tcp/$KUBERNETES_SERVICE_HOST/$KUBERNETES_SERVICE_PORT"' 2>/dev/null || break
    reached=yes; sleep 1
  done
  [ -n "$reached" ] && echo "network $KUBERNETES_SERVICE_HOST"
else echo "network.unknown yes"; fi
exit 0
"""


def open_backend(config: SandboxConfig, run: str, configuration: Configuration | None = None) -> Backend:
    """Raises `SandboxUnavailable` and `ConfigError`. Takes as long as a pod needs to start, its image included."""
    cluster = Cluster(config, run, configuration)
    try:
        left = cluster.sweep()
        wrong = probe.apart(_look(cluster))
    except SandboxError as error:
        cluster.close()
        raise SandboxUnavailable(f"no sandbox can be started in the cluster: {error}") from error
    except BaseException:
        cluster.close()
        raise
    if wrong and not config.allow_unsafe:
        cluster.close()
        raise SandboxUnavailable("the sandbox does not isolate: " + "; ".join(wrong))
    report: dict[str, Any] = {"backend": "kubernetes", "namespace": cluster.namespace, "image": config.image, **REPORT}
    report |= {key: value for key, value in (("unsafe", wrong), ("removed", left)) if value}
    return Backend(make=functools.partial(KubernetesSandbox, cluster), report=report, janitor=cluster.sweep,
                   checkout=functools.partial(checkout, cluster), close=cluster.close, starts_at_once=STARTS_AT_ONCE)


def checkout(cluster: Cluster, image: str, target: Path) -> None:
    """Copy the checkout that an image has at the workspace's place, without its repository. Blocks: for threads."""
    probe.apart(_checkout(cluster, image, target))


async def _checkout(cluster: Cluster, image: str, target: Path) -> None:
    name = f"checkout-{secrets.token_hex(4)}"
    spec = SandboxSpec(name, target, Limits.of(cluster.settings), image=image)
    async with running(KubernetesSandbox(cluster, spec, of_image=True)) as sandbox:
        archive = await sandbox.archive(CHECKOUT_BYTES)
    try:
        pack.extract(io.BytesIO(archive), target, without=".git")
    except (OSError, tarfile.TarError) as error:
        raise SandboxError(f"the checkout in the image {image!r} cannot be copied: {error}") from error


async def _look(cluster: Cluster) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="lightning_ray-check-") as directory:
        spec = SandboxSpec(f"check-{secrets.token_hex(4)}", Path(directory), Limits.of(cluster.settings))
        async with running(KubernetesSandbox(cluster, spec)) as sandbox:
            done = await sandbox.exec(SCRIPT, timeout_s=probe.TIMEOUT_S)
    if done.returncode or done.timed_out:
        raise SandboxError(f"the probe failed: {done.output.strip()[-300:]}")
    return faults(done.output)


def faults(said: str) -> list[str]:
    """What is wrong with a pod, from the script's output."""
    wrong = probe.faults(said, {}, set(), ELSEWHERE)
    facts = dict(line.partition(" ")[::2] for line in said.splitlines())
    if "root" in facts:
        wrong.append("it runs as root")
    if "token" in facts:
        wrong.append("it has a service account's token")
    if "network" in facts:
        wrong.append(f"it reaches the API server at {facts['network']}: the cluster's network does not enforce network "
                     "policies (install a network plugin that does, as Calico or Cilium)")
    if "network.unknown" in facts:
        wrong.append("whether network policies are enforced cannot be tried: the pod does not know the API server")
    return wrong
