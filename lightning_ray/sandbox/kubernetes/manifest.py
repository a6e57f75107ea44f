"""What the cluster is asked for: Jobs, Secrets, network policies and Leases, as plain data. Pure.

A sandbox is a Job with one pod that waits; commands enter by its exec subresource. The user's template may add what
places a pod (node selectors, tolerations, volumes, pull secrets ...); a field that could loosen the isolation, or that
we set ourselves, is refused by its name.
"""

import hashlib
import ipaddress
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from lightning_ray.config import SandboxConfig
from lightning_ray.config.reading import ConfigError, merged
from lightning_ray.sandbox.base import WORKSPACE, SandboxSpec
from lightning_ray.sandbox.filesystem import PERSONAL, USER

CONTAINER = "sandbox"
COPIER = "copier"
"""Runs before the sandbox where something is to be copied in, which the sandbox then sees read-only."""
SCRATCH = "/run"
SCRATCH_MB = 64
COPIED_MB = 256
"""Room for host directories that are copied in (a grader's test runner)."""
NAME_CHARS = 52
"""A Job's pods have its name and eleven more characters, and a name has 63."""
WAIT = "while :; do sleep 3600 & wait $!; done"
"""What the pod itself runs: process 1 takes in orphans, and signals from inside do not end it."""
COPIED = f"{SCRATCH}/copied"
COPY = f"mkfifo {COPIED} && read -r _ <{COPIED}; rm {COPIED}"
"""What the copier runs: it ends when it is told to."""

PART, RUN, OWNER, REACH = (f"lightning-ray/{name}" for name in ("part", "run", "owner", "reach"))
ROLLOUT = "lightning-ray/rollout"
OURS = "lightning-ray/"
COPIES = "copied-"
GIT = {"safe.directory": "*", "user.name": USER, "user.email": f"{USER}@sandbox"}
"""The workspace's directory is a volume, which belongs to root; and the user id may have no name in the image."""
SANDBOX = {PART: "sandbox"}

FREE = (
    "apiVersion", "kind", "metadata.labels", "metadata.annotations",
    "spec.template.metadata.labels", "spec.template.metadata.annotations",
    *(f"spec.template.spec.{name}" for name in (
        "affinity", "hostUsers", "imagePullSecrets", "nodeSelector", "priorityClassName", "runtimeClassName",
        "schedulerName", "tolerations", "topologySpreadConstraints", "volumes", "securityContext.runAsUser",
        "securityContext.runAsGroup", "securityContext.fsGroup", "securityContext.supplementalGroups")),
    *(f"spec.template.spec.containers.{CONTAINER}.{name}" for name in (
        "image", "imagePullPolicy", "env", "resources.requests", "volumeMounts")),
)  # fmt: skip
"""What a template may set."""
VOLUMES = {"emptyDir", "persistentVolumeClaim", "configMap", "image", "ephemeral"}
"""Kinds of volumes that a template may add: no host path, and nothing that holds a secret."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The runner process that Jobs belong to."""

    run: str
    name: str

    @property
    def labels(self) -> dict[str, str]:
        return {**SANDBOX, RUN: self.run, OWNER: self.name}


def label(text: str) -> str:
    """`text` as a label's value."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-._") or "x"


def job_name(owner: Owner, rollout: str) -> str:
    """The same for the same rollout of the same owner, and for no other."""
    digest = hashlib.sha256("\0".join((owner.run, owner.name, rollout)).encode()).hexdigest()[:12]
    slug = re.sub(r"[^a-z0-9]+", "-", rollout.lower()).strip("-")
    return f"lr-{slug[: NAME_CHARS - 16].strip('-')}-{digest}"


def reach_of(owner: Owner, endpoint: str) -> str:
    """Label of the sandboxes that may reach the proxy behind `endpoint`."""
    return f"{owner.name}-{urlsplit(endpoint).port}"


def job(config: SandboxConfig, template: Mapping[str, Any], owner: Owner, spec: SandboxSpec,
        of_image: bool = False) -> dict[str, Any]:
    """The Job of one sandbox. One with an endpoint begins suspended: its Secret, which the Job owns, comes first.
    `of_image`: the workspace is what the image has there, and no volume."""
    name = job_name(owner, spec.name)
    labels = owner.labels | ({REACH: reach_of(owner, spec.endpoint)} if spec.endpoint else {})
    settings = config.kubernetes
    theirs = _pod(template)
    volumes = {each: place for each, place in _volumes(spec).items() if not (of_image and each == "workspace")}
    container = {
        **_container(spec, volumes, settings.read_only_root), "image": image(config, template, spec),
        **({"envFrom": [{"secretRef": {"name": name}}]} if spec.endpoint else {}),
    }
    pod = {
        "restartPolicy": "Never", "serviceAccountName": settings.service_account, "automountServiceAccountToken": False,
        "enableServiceLinks": False, "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000,
                            "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": each, "emptyDir": {"sizeLimit": f"{size}Mi"}} for each, (_, size) in
                    volumes.items()],
    }
    ours = {
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": name, "namespace": settings.namespace, "labels": labels,
                     "annotations": {ROLLOUT: spec.name}},
        "spec": {
            "backoffLimit": 0, "ttlSecondsAfterFinished": settings.ttl_s,
            "activeDeadlineSeconds": int(settings.pending_timeout_s + settings.lifetime_s),
            **({"suspend": True} if spec.endpoint else {}),
            "template": {"metadata": {"labels": labels, "annotations": {ROLLOUT: spec.name}}, "spec": pod},
        },
    }
    result = merged(ours, dict(template))
    place = result["spec"]["template"]["spec"]
    added = next(iter(theirs.get("containers", [])), {})
    place["containers"] = [_joined(container, {k: v for k, v in added.items() if k != "image"}, "env", "volumeMounts")]
    if spec.mounts:
        place["initContainers"] = [_copier(place["containers"][0])]
    place["volumes"] = [*pod["volumes"], *theirs.get("volumes", [])]
    return result


def image(config: SandboxConfig, template: Mapping[str, Any], spec: SandboxSpec) -> str:
    """The task's, else the template's, else `sandbox.image`."""
    containers = _pod(template).get("containers") or [{}]
    return spec.image or containers[0].get("image") or config.image


def _pod(template: Mapping[str, Any]) -> dict[str, Any]:
    return template.get("spec", {}).get("template", {}).get("spec", {})


def _container(spec: SandboxSpec, volumes: Mapping[str, tuple[str, int]], read_only_root: bool) -> dict[str, Any]:
    room = sum(size for _, size in volumes.values())
    limits = {"cpu": f"{spec.limits.cpus:g}", "memory": f"{spec.limits.memory_mb}Mi", "ephemeral-storage": f"{room}Mi"}
    environment = {**PERSONAL, **git_settings(GIT), **spec.env}
    return {
        "name": CONTAINER, "command": ["/bin/bash", "-c", WAIT], "workingDir": WORKSPACE,
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "privileged": False, "runAsNonRoot": True,
                            "readOnlyRootFilesystem": read_only_root, "capabilities": {"drop": ["ALL"]},
                            "seccompProfile": {"type": "RuntimeDefault"}},
        "volumeMounts": [{"name": name, "mountPath": path, **({"readOnly": True} if name.startswith(COPIES) else {})}
                         for name, (path, _) in volumes.items()],
    }


def git_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that make them git's own, whatever files the image has."""
    numbered = [each for number, (key, value) in enumerate(settings.items())
                for each in ((f"GIT_CONFIG_KEY_{number}", key), (f"GIT_CONFIG_VALUE_{number}", value))]
    return {"GIT_CONFIG_COUNT": str(len(settings)), **dict(numbered)}


def _copier(container: Mapping[str, Any]) -> dict[str, Any]:
    """Like the sandbox's own container, but what is copied can be written to."""
    mounts = [{"name": each["name"], "mountPath": each["mountPath"]} for each in container["volumeMounts"]
              if each["name"].startswith((COPIES, "run"))]
    kept = {key: container[key] for key in ("image", "imagePullPolicy", "resources", "securityContext")
            if key in container}
    return {**kept, "name": COPIER, "command": ["/bin/bash", "-c", COPY], "volumeMounts": mounts}


def _volumes(spec: SandboxSpec) -> dict[str, tuple[str, int]]:
    """Name -> path and size (MB) of what is not the image's."""
    disk = spec.limits.disk_mb
    places = {"workspace": (WORKSPACE, disk), "tmp": ("/tmp", disk), "run": (SCRATCH, SCRATCH_MB)}
    for number, path in enumerate(copied_to(spec)):
        places[f"{COPIES}{number}"] = (path, COPIED_MB)
    return places


def copied_to(spec: SandboxSpec) -> list[str]:
    """Directories inside that hold what is copied in of `spec.mounts`; none lies in another."""
    wanted = sorted({m.target if m.source.is_dir() else posixpath.dirname(m.target) for m in spec.mounts})
    return [path for path in wanted if not any(path.startswith(f"{other}/") for other in wanted)]


def _joined(ours: dict[str, Any], theirs: dict[str, Any], *lists: str) -> dict[str, Any]:
    """Merged mappings; of the named lists both parts are kept."""
    both = merged(ours, theirs)
    for name in lists:
        both[name] = [*ours.get(name, []), *theirs.get(name, [])]
    return both


def secret(job: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    """The endpoint with its token; the cluster deletes it with its Job. `job` is as the cluster returned it."""
    name = job["metadata"]["name"]
    return {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": True,
        "metadata": {"name": name, "namespace": job["metadata"]["namespace"], "labels": job["metadata"]["labels"],
                     "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": name,
                                          "uid": job["metadata"]["uid"], "blockOwnerDeletion": True}]},
        "stringData": {"LIGHTNING_RAY_BASE_URL": endpoint},
    }


def no_network(namespace: str) -> dict[str, Any]:
    """Sandboxes reach nothing and are reached by nothing, name resolution included."""
    return {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "lightning-ray-sandbox", "namespace": namespace},
        "spec": {"podSelector": {"matchLabels": SANDBOX}, "policyTypes": ["Ingress", "Egress"]},
    }


def proxy_only(config: SandboxConfig, owner: Owner, endpoint: str, lease: Mapping[str, Any]) -> dict[str, Any]:
    """The exception for sandboxes with an endpoint: one TCP port of their runner's proxy. Goes with its Lease."""
    settings, reach = config.kubernetes, reach_of(owner, endpoint)
    if settings.proxy_pods:
        peer: dict[str, Any] = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.proxy_namespace}},
            "podSelector": {"matchLabels": settings.proxy_pods}}
    else:
        address = ipaddress.ip_address(urlsplit(endpoint).hostname or "")
        peer = {"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}
    return {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": f"lightning-ray-{reach}", "namespace": settings.namespace, "labels": owner.labels,
                     "ownerReferences": [{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                                          "name": lease["metadata"]["name"], "uid": lease["metadata"]["uid"]}]},
        "spec": {"podSelector": {"matchLabels": {**SANDBOX, REACH: reach}}, "policyTypes": ["Egress"],
                 "egress": [{"to": [peer], "ports": [{"protocol": "TCP", "port": urlsplit(endpoint).port}]}]},
    }


def lease(namespace: str, owner: Owner, seconds: int, now: str) -> dict[str, Any]:
    """Says that the owner lives, for so many seconds from `now` (RFC 3339 with microseconds)."""
    return {
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": f"lightning-ray-{owner.name}", "namespace": namespace, "labels": owner.labels},
        "spec": {"holderIdentity": owner.name, "leaseDurationSeconds": seconds, "renewTime": now},
    }


def read_template(path: Path | None) -> dict[str, Any]:
    """The user's template. `ConfigError` names the field that may not be in it."""
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.expanduser().read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _fault(path, f"cannot be read as YAML ({error}). Give a part of a Job") from None
    if not isinstance(content, dict):
        raise _fault(path, f"holds a {type(content).__name__}. Give a part of a Job, as `spec: ...`")
    for field, wanted in (("apiVersion", "batch/v1"), ("kind", "Job")):
        if content.get(field, wanted) != wanted:
            raise _fault(path, f"{field}: {content[field]!r} is not {wanted!r}")
    for field, value in _fields(content, ""):
        _check(path, field, value)
    return content


def _fields(content: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Each field of a template that is allowed as a whole, or no further known; containers by name."""
    for key, value in content.items():
        field = f"{prefix}{key}"
        if field == "spec.template.spec.containers":
            entries = {str(each.get("name")) if isinstance(each, dict) else "?": each for each in value or []}
            yield from _fields(entries, f"{field}.")
        elif isinstance(value, dict) and any(free.startswith(f"{field}.") for free in FREE):
            yield from _fields(value, f"{field}.")
        elif not (isinstance(value, str) and field == f"spec.template.spec.containers.{CONTAINER}.name"):
            yield field, value


def _check(path: Path, field: str, value: Any) -> None:
    if field not in FREE:
        raise _fault(path, f"{field} may not be set (it is ours, or could loosen the isolation). What may be: "
                           f"{', '.join(FREE[2:])}")
    if field.endswith((".labels", ".annotations")) and (own := [key for key in value or () if key.startswith(OURS)]):
        raise _fault(path, f"{field}: {own[0]!r} is ours. Take another prefix")
    if field.endswith(("runAsUser", "runAsGroup", "fsGroup")) and (not isinstance(value, int) or value < 1):
        raise _fault(path, f"{field}: {value!r} is root or no id. Give one from 1 on")
    if field.endswith("hostUsers") and value is not False:
        raise _fault(path, f"{field}: {value!r} must be false, or absent")
    if field.endswith(".volumes"):
        for volume in value or ():
            if odd := set(volume) - {"name"} - VOLUMES:
                raise _fault(path, f"{field}: {volume.get('name')!r} is of the kind {odd.pop()}, which may not be "
                                   f"shown in a sandbox. What may be: {', '.join(sorted(VOLUMES))}")
    if field.endswith(".env"):
        for entry in value or ():
            if "valueFrom" in entry:
                raise _fault(path, f"{field}: {entry.get('name')!r} has valueFrom: a sandbox holds no secret. Give a "
                                   "value")


def _fault(path: Path, what: str) -> ConfigError:
    return ConfigError(f"sandbox.kubernetes.template: {path}: {what}")
