"""What follows from what the cluster says: recorded statuses and watch events, as the API reference describes them."""

import itertools
import json
from pathlib import Path

import pytest
from kubernetes import client

from lightning_ray.sandbox.base import LimitExceeded, SandboxDied
from lightning_ray.sandbox.kubernetes.backend import faults
from lightning_ray.sandbox.kubernetes.channel import exit_status, script
from lightning_ray.sandbox.kubernetes.states import (
    ImageUnusable,
    NodeFailed,
    State,
    States,
    failure,
    of_job,
    of_pod,
)

OBJECTS = json.loads((Path(__file__).parent / "kubernetes_objects.json").read_text())


def pod(status, job="j1", **metadata):
    return {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "sandbox"}]}, "status": OBJECTS[status],
            "metadata": {"name": f"{job}-x", "labels": {"batch.kubernetes.io/job-name": job}, **metadata}}


def job(status, name="j1"):
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "status": OBJECTS[status]}


@pytest.fixture
def states():
    states = States()
    states.expect("j1")
    return states


@pytest.mark.parametrize("status", [name for name, each in OBJECTS.items() if "phase" in each])
def test_the_recorded_statuses_are_what_kubernetes_knows(status):
    api = client.ApiClient()
    read = api.sanitize_for_serialization(api.deserialize(json.dumps(pod(status)), "V1Pod", "application/json"))
    assert read["status"].keys() == OBJECTS[status].keys()


@pytest.mark.parametrize(("status", "phase", "reason", "blame"), [
    ("running", "running", "", "sandbox"),
    ("unschedulable", "pending", "Unschedulable", "infra"), ("creating", "pending", "ContainerCreating", "infra"),
    ("copying", "copying", "", "sandbox"), ("copied", "pending", "PodInitializing", "infra"),
    ("copier_image_pull", "pending", "ErrImagePull", "infra"), ("copier_killed", "ended", "OOMKilled", "harness"),
    ("image_pull", "pending", "ImagePullBackOff", "infra"), ("invalid_image", "ended", "InvalidImageName", "task"),
    ("oom_killed", "ended", "OOMKilled", "harness"), ("ended_by_itself", "ended", "Error", "sandbox"),
    ("evicted", "ended", "Evicted", "infra"), ("evicted_disk", "ended", "Evicted", "harness"),
    ("evicted_storage", "ended", "Evicted", "harness"), ("preempted", "ended", "PreemptionByScheduler", "infra"),
    ("node_shutdown", "ended", "Terminated", "infra"),
])
def test_law8_a_pods_end_has_its_reason_and_whose_failure_it_is(status, phase, reason, blame):
    state = of_pod(pod(status))
    assert (state.phase, state.reason, state.blame, state.pod) == (phase, reason, blame, "j1-x")


@pytest.mark.parametrize(("status", "kind"), [
    ("oom_killed", LimitExceeded), ("evicted", NodeFailed), ("invalid_image", ImageUnusable),
    ("ended_by_itself", SandboxDied), ("unschedulable", NodeFailed),
])
def test_a_failure_blames_whom_the_state_blames_and_says_why(status, kind):
    state = of_pod(pod(status))
    error = failure(state, "it is gone")
    assert type(error) is kind and error.blame == state.blame and state.reason in str(error)


def test_a_deleted_pod_or_job_has_ended(states):
    assert of_pod(pod("running", deletionTimestamp="2026-12-01T00:00:00Z")).reason == "Deleted"
    states.event("Pod", {"type": "ADDED", "object": pod("running")})
    assert states.event("Pod", {"type": "DELETED", "object": pod("running")}) == "j1"
    assert (states.get("j1").phase, states.get("j1").blame) == ("ended", "infra")


def test_the_job_says_why_only_where_its_pod_does_not():
    assert of_job(job("job_deadline")).reason == "DeadlineExceeded"
    assert of_job(job("job_backoff")) is None
    assert of_job({"metadata": {"name": "j1"}}) is None


def test_the_first_end_stays(states):
    for status in ("creating", "running", "oom_killed"):
        assert states.event("Pod", {"type": "MODIFIED", "object": pod(status)}) == "j1"
    assert states.event("Job", {"type": "MODIFIED", "object": job("job_deadline")}) is None
    assert states.event("Pod", {"type": "DELETED", "object": pod("oom_killed")}) is None
    assert states.get("j1").reason == "OOMKilled"


def test_what_has_not_changed_or_is_not_ours_wakes_nobody(states):
    assert states.event("Pod", {"type": "ADDED", "object": pod("running")}) == "j1"
    assert states.event("Pod", {"type": "MODIFIED", "object": pod("running")}) is None
    assert states.event("Pod", {"type": "ADDED", "object": pod("running", "someone-elses")}) is None
    assert states.event("Pod", OBJECTS["bookmark"]) is None
    states.forget("j1")
    assert states.event("Pod", {"type": "MODIFIED", "object": pod("oom_killed")}) is None
    assert states.get("j1") == State()


def test_a_list_tells_what_was_missed(states):
    states.expect("j2")
    states.expect("j3")
    states.event("Pod", {"type": "ADDED", "object": pod("running")})
    states.event("Pod", {"type": "ADDED", "object": pod("running", "j2")})
    assert states.listed("Pod", [pod("oom_killed", "j2")]) == {"j1", "j2"}
    assert (states.get("j1").reason, states.get("j2").reason) == ("Deleted", "OOMKilled")
    assert states.get("j3") == State()  # no pod yet


@pytest.mark.parametrize("order", list(itertools.permutations(["list", "added", "running"])))
def test_in_whatever_order_lists_and_events_come_a_running_pod_runs(states, order):
    for each in order:
        if each == "list":
            states.listed("Pod", [pod("running")])
        else:
            states.event("Pod", {"type": "ADDED", "object": pod("creating" if each == "added" else "running")})
    states.event("Pod", {"type": "MODIFIED", "object": pod("running")})
    assert states.get("j1").phase == "running"


def test_an_exit_status_is_the_api_servers_word():
    causes = {"causes": [{"reason": "ExitCode", "message": "7"}]}
    assert exit_status({"status": "Success"}) == 0
    assert exit_status({"status": "Failure", "reason": "NonZeroExitCode", "details": causes}) == 7
    with pytest.raises(SandboxDied, match="container not found"):
        exit_status({"status": "Failure", "reason": "InternalError", "message": 'container not found ("sandbox")'})


def test_a_script_brings_its_environment_and_refuses_odd_names():
    assert script("echo $A\n", {"A": "it's"}) == b"export A='it'\"'\"'s'\necho $A\n"
    with pytest.raises(ValueError, match="A;B"):
        script("true", {"A;B": "x"})


GOOD = "Seccomp: 2\nNoNewPrivs: 1\nCapEff: 0000000000000000\ninterfaces eth0 lo\nenvironment PATH SECRET\nshell open\n"


@pytest.mark.parametrize(("said", "words"), [
    ("", []), ("root yes\n", ["it runs as root"]), ("token yes\n", ["a service account's token"]),
    ("network 10.0.0.1\n", ["reaches the API server at 10.0.0.1"]),
    ("network.unknown yes\n", ["cannot be tried"]), ("missing.git yes\n", ["programs are missing inside: git"]),
])
def test_law6_what_is_wrong_with_a_pod_is_said(said, words):
    wrong = faults(GOOD + said)
    assert len(wrong) == len(words) and all(word in each for word, each in zip(words, wrong, strict=True))
