"""The container daemon of this machine, Docker or Podman, by Docker's API: the one that DOCKER_HOST names, or
/var/run/docker.sock.

The client blocks, so every call is made in a thread, with a client of that thread's own. Each container carries labels
that say which process owns it, by which `janitor` finds what dead runs left.
"""

import contextlib
import functools
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils import kwargs_from_env, parse_repository_tag
from requests.exceptions import RequestException
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from lightning_ray.sandbox import limits, pack
from lightning_ray.sandbox.base import SandboxError, SandboxUnavailable

FAULTS = (DockerException, RequestException)
"""What a call may raise."""
THREADS = 8
"""Calls at once; more only wait for each other in the daemon."""
TIMEOUT_S = 120.0
PULL_TIMEOUT_S = 3600.0
OWNER, PLACE = "lightning_ray.owner", "lightning_ray.place"
"""Labels of a container."""
REMOVED_TIMEOUT_S = 30.0
LINKS = 8
LARGEST_FILE = 64 * 2**20

_thread = threading.local()


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Where containers are started and stopped."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="containers")


def client() -> APIClient:
    """The calling thread's. `SandboxUnavailable` where there is no daemon, or it is another machine's."""
    if not hasattr(_thread, "client"):
        settings = kwargs_from_env()
        host = settings.get("base_url", "unix:///var/run/docker.sock")
        if not host.startswith(("unix:", "http+unix:")):
            raise SandboxUnavailable(f"the container daemon at {host} is not one of this machine; the sandbox's files, "
                                     "processes and network must be reachable. Set DOCKER_HOST=unix:///...")
        try:
            _thread.client = APIClient(version="auto", timeout=TIMEOUT_S, **settings)
        except FAULTS as error:
            raise SandboxUnavailable(
                f"no container daemon answers at {host} ({error}). Start Docker, or `podman system service --time=0 "
                "unix://SOCKET` and set DOCKER_HOST=unix://SOCKET") from error
    return _thread.client


def name() -> str:
    """The daemon and its version."""
    found = client().version()
    engine = (found.get("Components") or [{}])[0].get("Name", "Engine")
    return f"{'Docker Engine' if engine == 'Engine' else engine} {found['Version']}"


@functools.cache
def has_own_user_namespace() -> bool:
    """Whether the ids inside containers are other ids outside (a daemon without root rights, or with remapped ids)."""
    options = client().info().get("SecurityOptions") or []
    return any(f"name={kind}" in option for option in options for kind in ("userns", "rootless"))


@functools.cache
def is_podman() -> bool:
    """Podman takes a seccomp profile as a path, Docker as text; and it fills a tmpfs from the image unless told not
    to."""
    return name().startswith("Podman")


def labels() -> dict[str, str]:
    """Of a container that this process owns."""
    return {OWNER: limits.owner(), PLACE: place()}


@functools.cache
def place() -> str:
    """Where process ids mean what they mean here: this boot and this pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def remove(container: str) -> None:
    """Kill and remove one, and wait until it is gone. Idempotent."""
    try:
        for attempt in Retrying(retry=retry_if_exception(_may_pass), stop=stop_after_delay(REMOVED_TIMEOUT_S),
                                wait=wait_exponential(0.01, max=0.5), reraise=True):
            with attempt:
                client().remove_container(container, force=True, v=True)
    except NotFound:
        return
    except FAULTS as error:
        raise SandboxError(f"the container {container} cannot be removed: {error}") from error


def _may_pass(error: BaseException) -> bool:
    """409: it is being removed already; Podman's 500: it is just ending by itself."""
    return isinstance(error, APIError) and (error.status_code == 409 or error.is_server_error())


def owned(by: str) -> list[str]:
    """Ids of the containers of one owner (`limits.owner()`), running or not."""
    return [each["Id"] for each in _labelled() if each["Labels"].get(OWNER) == by]


def _labelled() -> list[dict[str, Any]]:
    found = client().containers(all=True, filters={"label": [f"{PLACE}={place()}"]})
    return [each for each in found if OWNER in each["Labels"]]


def janitor() -> list[str]:
    """Remove the containers of processes that are dead, and name them. Others' are not touched."""
    removed = []
    for each in _labelled():
        if not limits.owner_lives(each["Labels"][OWNER]):
            remove(each["Id"])
            removed.append(f"container {each['Id'][:12]} of {each['Labels'][OWNER]}")
    return removed


def image(reference: str, pull: bool) -> dict[str, Any]:
    """What the daemon says about an image, which it pulls where it does not have it and may."""
    with contextlib.suppress(ImageNotFound):
        return client().inspect_image(reference)
    if not pull:
        raise SandboxError(f"there is no image {reference!r}, and sandbox.container.pull is `never`. Pull or build it")
    repository, tag = parse_repository_tag(reference)
    try:
        puller = APIClient(version="auto", timeout=PULL_TIMEOUT_S, **kwargs_from_env())
        with contextlib.closing(puller):
            said = list(puller.pull(repository, tag=tag or "latest", stream=True, decode=True))
            if faults := [line["error"] for line in said if "error" in line]:
                raise SandboxError(f"the image {reference!r} cannot be pulled: {faults[0]}")
            return puller.inspect_image(reference)
    except FAULTS as error:
        raise SandboxError(f"the image {reference!r} cannot be pulled: {error}") from error


@contextlib.contextmanager
def unstarted(image: str) -> Iterator[str]:
    """A container that only shows what is in an image, removed afterwards."""
    container = client().create_container(image, ["true"], labels=labels())["Id"]
    try:
        yield container
    finally:
        remove(container)


def exists(container: str, path: str) -> bool:
    try:
        parts, _ = client().get_archive(container, path)
    except NotFound:
        return False
    parts.close()
    return True


class _Stream:
    """Parts of an answer, as far as `tarfile` needs a file to read it as a stream."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts

    def read(self, size: int) -> bytes:
        return next((part for part in self._parts if part), b"")


def extract(container: str, path: str, target: Path, without: str) -> bool:
    """Copy a directory's files, directories and links into `target`, as this user's; whether there is such a directory.
    What lies below a directory named `without` is left out."""
    try:
        parts, _ = client().get_archive(container, path)
    except NotFound:
        return False
    pack.extract(_Stream(parts), target, without)
    return True


def read(container: str, path: str) -> bytes | None:
    """The content of a file of a container, links followed; None where there is none."""
    for _ in range(LINKS):
        try:
            parts, _ = client().get_archive(container, path)
        except NotFound:
            return None
        archive = io.BytesIO()
        for part in parts:
            archive.write(part)
            if archive.tell() > LARGEST_FILE:
                raise SandboxError(f"{path} in the image is larger than {LARGEST_FILE} bytes")
        archive.seek(0)
        with tarfile.open(fileobj=archive) as opened:
            member = opened.next()
            if member is None or not (member.isreg() or member.issym()):
                return None
            if member.isreg():
                file = opened.extractfile(member)
                return file.read() if file else None
        path = os.path.normpath(os.path.join(os.path.dirname(path), member.linkname))
    return None
