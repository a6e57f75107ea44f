"""One runner's side of a Kubernetes cluster: the objects that it makes and deletes, what it watches, what it owns.

Two watches, one for Jobs and one for pods, serve all sandboxes: they go on from the last resource version, list again
after 410, and are started again after any other break. Nothing is asked for a single rollout. A Lease says that the
runner lives; Jobs whose owner's Lease is gone or has run out belong to nobody, and are deleted at the start, at the
end, and every minute in between. All methods block unless they say otherwise: they are called in threads.
"""

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import urllib3
from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

from lightning_ray.config import SandboxConfig
from lightning_ray.sandbox.base import SandboxError, SandboxSpec, SandboxUnavailable
from lightning_ray.sandbox.kubernetes import manifest
from lightning_ray.sandbox.kubernetes.manifest import CONTAINER, OWNER, PART, RUN, Owner
from lightning_ray.sandbox.kubernetes.states import State, States

log = logging.getLogger(__name__)

TIMEOUT_S = (5.0, 30.0)
"""To connect, and between two parts of an answer."""
TRIES = 5
FIRST_PAUSE_S = 0.2
LATER = {0, 429, 500, 502, 503, 504}
"""Statuses after which the same request is sent again."""
WATCH_S = 240
"""The server ends a watch after so long; it then goes on from where it was."""
WATCH_PAUSE_S = 1.0
LEASE_S = 60
"""Without a renewal; more than the clocks of two nodes differ."""
RENEW_S = 10.0
SWEEP_EVERY = 6
"""Renewals of the Lease between two sweeps."""
LOG_LINES = 50


class Cluster:
    """Opened once for a runner; `close` leaves nothing of it in the cluster."""

    def __init__(self, settings: SandboxConfig, run: str, configuration: client.Configuration | None = None) -> None:
        """`SandboxUnavailable` where the cluster cannot be reached, or does not give what isolation needs;
        `ConfigError` for a bad template. `configuration`: how to reach it, if not by `sandbox.kubernetes.context`."""
        self.settings = settings
        self.namespace = settings.kubernetes.namespace
        self.template = manifest.read_template(settings.kubernetes.template)
        self.owner = Owner(manifest.label(run), secrets.token_hex(5))
        self.configuration = configuration or _configuration(settings.kubernetes.context)
        self.threads = ThreadPoolExecutor(settings.kubernetes.commands_at_once, thread_name_prefix="kubernetes")
        api = client.ApiClient(self.configuration)
        self._core, self._batch = client.CoreV1Api(api), client.BatchV1Api(api)
        self._network, self._leases = client.NetworkingV1Api(api), client.CoordinationV1Api(api)
        self._states = States()
        self._lock = threading.Lock()
        self._waiting: dict[str, set[Callable[[], None]]] = defaultdict(set)
        self._closed = threading.Event()
        self._watches: dict[str, watch.Watch] = {}
        self._reaches: set[str] = set()
        try:
            self._open()
        except SandboxError as error:
            self.close()
            raise SandboxUnavailable(f"the cluster gives no sandboxes in namespace {self.namespace!r}: {error}. "
                                     "jobs/kubernetes/sandboxes.yaml has the namespace and the rights") from error

    def _open(self) -> None:
        self._policy(manifest.no_network(self.namespace))
        self._take_lease()
        for kind, listing in (("Job", self._batch.list_namespaced_job), ("Pod", self._core.list_namespaced_pod)):
            version = self._relist(kind, listing)  # what may not be listed is an error now
            self._start(self._watch, kind, listing, version)
        self._start(self._keep_lease)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, daemon=True, name=f"kubernetes-{work.__name__}").start()

    def close(self) -> None:
        """Delete what this owner has, and stop watching. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        for each in list(self._watches.values()):
            each.stop()
        try:
            self._delete_jobs(f"{OWNER}={self.owner.name}")
            for reach in self._reaches:
                self._gone(self._network.delete_namespaced_network_policy, f"lightning-ray-{reach}")
            self._gone(self._leases.delete_namespaced_lease, f"lightning-ray-{self.owner.name}")
        except SandboxError as error:
            log.warning("what this runner had in the cluster is left to the next sweep: %s", error)
        self.threads.shutdown(wait=False, cancel_futures=True)

    def create(self, spec: SandboxSpec, of_image: bool = False) -> str:
        """Ask for the Job of a sandbox; its name. Asked again for the same one, nothing changes."""
        job = manifest.job(self.settings, self.template, self.owner, spec, of_image)
        name = job["metadata"]["name"]
        with self._lock:
            self._states.expect(name)
        try:
            made = _plain(self._ask(self._batch.create_namespaced_job, self.namespace, job))
        except Exists:
            made = _plain(self._ask(self._batch.read_namespaced_job, name, self.namespace))
            owner = (made["metadata"].get("labels") or {}).get(OWNER)
            if owner != self.owner.name:
                raise SandboxError(f"there is a Job {name} that is not ours (owner {owner})") from None
        if spec.endpoint:
            self._allow_proxy(spec.endpoint)
            with contextlib.suppress(Exists):
                self._ask(self._core.create_namespaced_secret, self.namespace, manifest.secret(made, spec.endpoint))
            self._ask(self._batch.patch_namespaced_job, name, self.namespace, {"spec": {"suspend": False}})
        return name

    def delete(self, job: str) -> None:
        """Delete a Job, its pod, and its Secret. One that is gone is no error."""
        self._gone(self._batch.delete_namespaced_job, job, propagation_policy="Background", grace_period_seconds=0)
        with self._lock:
            self._states.forget(job)
            self._waiting.pop(job, None)

    def state(self, job: str) -> State:
        with self._lock:
            return self._states.get(job)

    async def past(self, job: str, phases: Set[str], timeout_s: float) -> State:
        """The sandbox's state as soon as it has left `phases`, or after `timeout_s`. Does not block."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
                loop.call_soon_threadsafe(changed.set)

        with self._lock:
            self._waiting[job].add(wake)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while self.state(job).phase in phases:
                        await changed.wait()
                        changed.clear()
        finally:
            with self._lock:
                self._waiting[job].discard(wake)
        return self.state(job)

    def last_words(self, job: str) -> str:
        """The end of what the pod itself printed; empty where it cannot be had."""
        pod = self.state(job).pod
        with contextlib.suppress(SandboxError):
            if pod:
                return self._ask(self._core.read_namespaced_pod_log, pod, self.namespace, container=CONTAINER,
                                 tail_lines=LOG_LINES).strip()
        return ""

    def sweep(self) -> list[str]:
        """Delete Jobs of this run that nobody owns, and the Leases that ran out; names of what was deleted."""
        leases = self._ask(self._leases.list_namespaced_lease, self.namespace, label_selector=self._of_run).items
        lives = {each.spec.holder_identity for each in leases if _holds(each.spec)} | {self.owner.name}
        removed = self._delete_jobs(f"{self._of_run},{OWNER} notin ({','.join(sorted(lives))})", lives)
        for each in leases:
            if each.spec.holder_identity not in lives:
                self._gone(self._leases.delete_namespaced_lease, each.metadata.name)
                removed.append(f"Lease {each.metadata.name}")
        return removed

    @property
    def _of_run(self) -> str:
        return f"{PART}=sandbox,{RUN}={self.owner.run}"

    def _delete_jobs(self, selector: str, but: set[str] | frozenset[str] = frozenset()) -> list[str]:
        found = self._ask(self._batch.list_namespaced_job, self.namespace, label_selector=selector).items
        names = [each.metadata.name for each in found if each.metadata.labels.get(OWNER) not in but]
        for name in names:
            self.delete(name)
        return [f"Job {name}" for name in names]

    def _allow_proxy(self, endpoint: str) -> None:
        reach = manifest.reach_of(self.owner, endpoint)
        if reach not in self._reaches:
            self._policy(manifest.proxy_only(self.settings, self.owner, endpoint, self._lease))
            self._reaches.add(reach)

    def _policy(self, policy: dict[str, Any]) -> None:
        try:
            self._ask(self._network.create_namespaced_network_policy, self.namespace, policy)
        except Exists:
            self._ask(self._network.patch_namespaced_network_policy, policy["metadata"]["name"], self.namespace,
                      {"spec": policy["spec"]})

    def _take_lease(self) -> None:
        lease = manifest.lease(self.namespace, self.owner, LEASE_S, _now())
        self._lease = _plain(self._ask(self._leases.create_namespaced_lease, self.namespace, lease))
        self._reaches.clear()  # their policies belong to a Lease

    def _keep_lease(self) -> None:
        rounds = 0
        while not self._closed.wait(RENEW_S):
            rounds += 1
            try:
                self._ask(self._leases.patch_namespaced_lease, self._lease["metadata"]["name"], self.namespace,
                          {"spec": {"renewTime": _now()}})
                if rounds % SWEEP_EVERY == 0 and (removed := self.sweep()):
                    log.warning("removed what dead runners had left: %s", ", ".join(removed))
            except Gone:
                log.warning("the Lease of this runner had run out and was removed; it takes another")
                with contextlib.suppress(SandboxError):  # it is tried again at the next renewal
                    self._take_lease()
            except Exception as error:  # whatever it was: without a Lease the next sweep takes all sandboxes
                log.warning("the Lease of this runner could not be renewed: %s", error)

    def _relist(self, kind: Literal["Job", "Pod"], listing: Callable[..., Any]) -> str | None:
        """List everything; the resource version from which a watch goes on."""
        found = self._ask(listing, self.namespace, label_selector=f"{OWNER}={self.owner.name}")
        self._told(lambda: self._states.listed(kind, [_plain(each) for each in found.items]))
        return found.metadata.resource_version

    def _watch(self, kind: Literal["Job", "Pod"], listing: Callable[..., Any], version: str | None) -> None:
        while not self._closed.is_set():
            watching = self._watches[kind] = watch.Watch()
            try:
                if version is None:
                    version = self._relist(kind, listing)
                for event in watching.stream(listing, self.namespace, label_selector=f"{OWNER}={self.owner.name}",
                                             resource_version=version, timeout_seconds=WATCH_S,
                                             allow_watch_bookmarks=True, _request_timeout=(TIMEOUT_S[0], WATCH_S + 30)):
                    raw = event["raw_object"]
                    version = raw.get("metadata", {}).get("resourceVersion") or version
                    self._told(lambda event=event, raw=raw: {self._states.event(kind, {**event, "object": raw})})
            except Exception as error:  # whatever broke it: no sandbox starts or ends without a watch
                version = None
                if not self._closed.is_set() and not (isinstance(error, ApiException) and error.status == 410):
                    log.warning("the watch of %ss broke off and is started again: %s", kind, _said(error))
                    self._closed.wait(WATCH_PAUSE_S)

    def _told(self, take: Callable[[], set[str | None] | set[str]]) -> None:
        with self._lock:
            wake = [each for name in take() if name for each in self._waiting.get(name, ())]
        for each in wake:
            each()

    def _gone(self, delete: Callable[..., Any], name: str, **more: Any) -> None:
        with contextlib.suppress(Gone):
            self._ask(delete, name, self.namespace, **more)

    def _ask(self, method: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """One request, repeated where that may help. `SandboxError` says what was asked and why it failed."""
        requests = Retrying(retry=retry_if_exception(_may_pass), stop=stop_after_attempt(TRIES), wait=_pause,
                            reraise=True)
        try:
            return requests(method, *arguments, _request_timeout=TIMEOUT_S, **more)
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            kind = {404: Gone, 409: Exists}.get(_status(error), SandboxError)
            raise kind(f"{method.__name__}: {_said(error)}") from error


class Exists(SandboxError):
    """There is an object of this name."""


class Gone(SandboxError):
    """There is no such object."""


def _status(error: BaseException) -> int:
    """0 where no answer came."""
    return getattr(error, "status", 0) or 0


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, ApiException | urllib3.exceptions.HTTPError) and _status(error) in LATER


def _pause(request: RetryCallState) -> float:
    """Seconds before a request is sent again: what the server says, else longer each time."""
    error = request.outcome.exception()
    asked = (getattr(error, "headers", None) or {}).get("Retry-After", "")
    return float(asked) if asked.isdigit() else FIRST_PAUSE_S * 2 ** (request.attempt_number - 1)


def _said(error: Exception) -> str:
    if not isinstance(error, ApiException):
        return f"{type(error).__name__}: {error}"
    body = error.body if isinstance(error.body, str) else ""
    try:
        message = json.loads(body).get("message", "")
    except (ValueError, AttributeError):  # not the API server's own words
        message = ""
    return f"{error.status} {message or error.reason}"


@functools.cache
def _serializer() -> client.ApiClient:
    return client.ApiClient()


def _plain(found: Any) -> dict[str, Any]:
    return _serializer().sanitize_for_serialization(found)


def _holds(lease: client.V1LeaseSpec) -> bool:
    if lease.renew_time is None:
        return False
    return lease.renew_time + timedelta(seconds=lease.lease_duration_seconds or 0) > datetime.now(UTC)


def _now() -> str:
    now = datetime.now(UTC)
    if now.microsecond == 0:  # the client would leave them out, and the API server wants six digits
        now = now.replace(microsecond=1)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _configuration(context: str | None) -> client.Configuration:
    configuration = client.Configuration()
    configuration.retries = 0  # `_ask` repeats
    try:
        if context is None:
            with contextlib.suppress(ConfigException):
                config.load_incluster_config(configuration)
                return configuration
        config.load_kube_config(context=context, client_configuration=configuration)
    except ConfigException as error:
        raise SandboxUnavailable(
            f"sandbox.kubernetes.context: {context!r}: this process runs in no cluster, and there is no kubeconfig "
            f"with it ({error}). Give the context of a kubeconfig, or start the runners in the cluster") from error
    return configuration
