"""What the cluster says about Jobs and pods, and what follows from it. Pure: fed with lists and watch events.

A pod that waits for a node or for its image is pending, with the reason; that is not running. An ended one has the
reason of its end and whose failure it is: its own where it used more than it may, the task's where its image can never
be, the cluster's where a node or a quota took it away.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ray.sandbox.base import Blame, LimitExceeded, SandboxDied, SandboxError
from lightning_ray.sandbox.kubernetes.manifest import CONTAINER, COPIER

JOB_LABEL = "batch.kubernetes.io/job-name"
OLD_JOB_LABEL = "job-name"
NEVER = {"InvalidImageName": "task", "ErrImageNeverPull": "infra"}
"""Reasons of a pending container that waiting does not change."""
OWN_DOING = ("exceeds the limit", "exceeds the total limit", "exceeded its local ephemeral storage limit")
"""In the message of an eviction: the pod wrote more than it may. Any other eviction is the node's."""
BLAME: dict[str, Blame] = {
    "OOMKilled": "harness", "DeadlineExceeded": "infra", "Evicted": "infra", "Deleted": "infra",
    "ContainerStatusUnknown": "infra",
}
"""By the reason of the end; any other is the sandbox's."""
DISRUPTED = "DisruptionTarget"


class NodeFailed(SandboxDied):
    """The cluster took the sandbox away, or gave it no place in time."""

    blame = "infra"


class ImageUnusable(SandboxError):
    """The task's image can never be had."""

    blame = "task"


@dataclass(frozen=True, slots=True)
class State:
    """Where one sandbox is."""

    phase: Literal["pending", "copying", "running", "ended"] = "pending"
    """`copying`: its copier runs, and waits to be filled."""
    pod: str = ""
    reason: str = ""
    message: str = ""
    blame: Blame = "sandbox"

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.reason and self.message else self.reason or self.phase


def failure(state: State, doing: str) -> SandboxError:
    """The error for a sandbox that was not where it should be."""
    kind = {"harness": LimitExceeded, "infra": NodeFailed, "task": ImageUnusable, "sandbox": SandboxDied}[state.blame]
    return kind(f"{doing}: {state}")


def of_pod(pod: Mapping[str, Any]) -> State:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    said = {each.get("name"): each.get("state") or {} for each in (
        *(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))}
    state, copier = said.get(CONTAINER, {}), said.get(COPIER, {})
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    if (disrupted := conditions.get(DISRUPTED)) and disrupted.get("status") == "True":
        return _ended(name, disrupted.get("reason", DISRUPTED), disrupted.get("message", ""), "infra")
    if status.get("phase") in ("Failed", "Succeeded") or "terminated" in state:
        terminated = state.get("terminated") or copier.get("terminated") or {}
        reason = status.get("reason") or terminated.get("reason") or "Ended"
        message = status.get("message") or terminated.get("message") or (
            f"exit code {terminated['exitCode']}" if "exitCode" in terminated else "")
        blame = BLAME.get(reason, "infra" if status.get("reason") else "sandbox")
        if reason == "Evicted" and any(words in message for words in OWN_DOING):
            blame = "harness"
        return _ended(name, reason, message, blame)
    if pod["metadata"].get("deletionTimestamp"):
        return _ended(name, "Deleted", "the pod was deleted", "infra")
    if status.get("phase") == "Running" and "running" in state:
        return State("running", name)
    if "running" in copier:
        return State("copying", name)
    waiting = copier.get("waiting") or state.get("waiting") or {}
    scheduled = conditions.get("PodScheduled") or {}
    if waiting.get("reason") in NEVER:
        return _ended(name, waiting["reason"], waiting.get("message", ""), NEVER[waiting["reason"]])
    if waiting.get("reason"):
        return State("pending", name, waiting["reason"], waiting.get("message", ""), "infra")
    if scheduled.get("status") == "False":
        return State("pending", name, scheduled.get("reason", ""), scheduled.get("message", ""), "infra")
    return State("pending", name, blame="infra")


def of_job(job: Mapping[str, Any]) -> State | None:
    """What the Job itself adds: why it failed. None where it says nothing."""
    if job["metadata"].get("deletionTimestamp"):
        return _ended("", "Deleted", "the Job was deleted", "infra")
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Failed" and condition.get("status") == "True":
            reason = condition.get("reason", "Failed")
            if reason != "BackoffLimitExceeded":  # its pod failed, and says why
                return _ended("", reason, condition.get("message", ""), BLAME.get(reason, "infra"))
    return None


def _ended(pod: str, reason: str, message: str, blame: Any) -> State:
    return State("ended", pod, reason, " ".join(message.split())[:500], blame)


class States:
    """The state of the sandboxes that are expected, by their Job's name. The first end that was seen stays."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    def get(self, job: str) -> State:
        return self._states.get(job, State())

    def expect(self, job: str) -> None:
        self._states.setdefault(job, State())

    def forget(self, job: str) -> None:
        self._states.pop(job, None)

    def listed(self, kind: Literal["Job", "Pod"], objects: Iterable[Mapping[str, Any]]) -> set[str]:
        """Everything of one kind that there is now. Jobs whose state changed; what ran and is gone has ended."""
        objects = list(objects)
        changed = {name for each in objects if (name := self._take(kind, each))}
        there = {job_of(kind, each) for each in objects}
        for name, state in self._states.items():
            if kind == "Pod" and name not in there and state.phase in ("copying", "running"):
                self._states[name] = _ended(state.pod, "Deleted", "it is gone", "infra")
                changed.add(name)
        return changed

    def event(self, kind: Literal["Job", "Pod"], event: Mapping[str, Any]) -> str | None:
        """One watch event; the Job whose state changed."""
        found = event["object"]
        if event["type"] == "BOOKMARK":
            return None
        if event["type"] == "DELETED":
            found = {**found, "metadata": {**found["metadata"], "deletionTimestamp": "now"}}
        return self._take(kind, found)

    def _take(self, kind: str, found: Mapping[str, Any]) -> str | None:
        name = job_of(kind, found)
        state = of_pod(found) if kind == "Pod" else of_job(found)
        before = self._states.get(name)
        if before is None or state is None or state == before or before.phase == "ended":
            return None
        self._states[name] = state
        return name


def job_of(kind: str, found: Mapping[str, Any]) -> str:
    metadata = found["metadata"]
    if kind == "Job":
        return metadata["name"]
    labels = metadata.get("labels") or {}
    return labels.get(JOB_LABEL) or labels.get(OLD_JOB_LABEL) or ""
