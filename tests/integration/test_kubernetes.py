"""The kubernetes backend against an API server (`tests/kubernetes_api.py`): sandboxes, watches, ownership, refusals."""

import asyncio
import json
import socket
import time
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from lightning_ray.config import RewardConfig, SandboxConfig
from lightning_ray.sandbox.base import (
    LimitExceeded,
    SandboxDied,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
)
from lightning_ray.sandbox.kubernetes import cluster as clusters
from lightning_ray.sandbox.kubernetes import manifest
from lightning_ray.sandbox.kubernetes.backend import open_backend
from lightning_ray.sandbox.kubernetes.states import ImageUnusable, NodeFailed
from lightning_ray.tasks.grading import grader_for
from lightning_ray.tasks.workspaces import Workspaces
from tests.kubernetes_api import FIXTURES, Cluster
from tests.sandboxes import make_task

JOBS, PODS, SECRETS = "batch/v1/jobs", "v1/pods", "v1/secrets"
LEASES, POLICIES = "coordination.k8s.io/v1/leases", "networking.k8s.io/v1/networkpolicies"
ROLES = Path(__file__).parents[2] / "jobs" / "kubernetes" / "sandboxes.yaml"
ENDPOINT = "http://127.0.0.1:8080/r/TOKEN"
SETTINGS = SandboxConfig(backend="kubernetes", image="sandbox:1", kubernetes={"pending_timeout_s": 20})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("pods")) as server:
        yield server


@pytest.fixture(scope="module")
def backend(server):
    backend = open_backend(SETTINGS, "tests", server.configuration)
    yield backend
    backend.close()
    assert server.names(JOBS) == server.names(PODS) == server.names(SECRETS) == server.names(LEASES) == []


@pytest.fixture
def workspace(tmp_path):
    return Workspaces(tmp_path).prepare(make_task())


@pytest.fixture
def make(backend, workspace, server):
    """Makes sandboxes; checks that nothing of them stays behind."""
    yield lambda name, **more: backend.make(SandboxSpec(name, workspace, **more))
    server.plan = lambda job: [FIXTURES["running"]]
    server.refuse = lambda request: None
    assert server.names(JOBS) == server.names(SECRETS) == []


async def test_a_sandbox_in_a_pod_does_what_every_sandbox_does(make, server):
    sandbox = make("r0", endpoint=ENDPOINT)
    await sandbox.start()
    try:
        done = await sandbox.exec("cat README.md; echo err >&2; id -u; exit 3", timeout_s=10)
        assert (done.output, done.returncode) == ("A shop.\nerr\n1000\n", 3)
        done = await sandbox.exec("cat; echo $A", timeout_s=10, env={"A": "it's"}, stdin=b"x" * 300_000)
        assert done.output == "x" * 300_000 + "it's\n" and not done.truncated
        done = await sandbox.exec("cat", timeout_s=10, stdin=b"y" * 3_000_000)  # more than is kept, both ways at once
        assert done.truncated and len(done.output) == SETTINGS.output_bytes
        assert (await sandbox.exec(f"echo {'z' * 200_000} | wc -c", timeout_s=10)).output == "200001\n"
        assert (await sandbox.exec("kill -9 $$", timeout_s=10)).returncode == 137
        await sandbox.put({"shop.py": b"new\n"})
        assert await sandbox.get("shop.py") == b"new\n"
        with pytest.raises(FileNotFoundError):
            await sandbox.get("nothing")
        done = await sandbox.exec("git commit -q --allow-empty -m x && git log -1 --format=%an", timeout_s=10)
        assert done.output == "agent\n"
        await sandbox.exec("echo 1 > added; rm -rf .git", timeout_s=10)
        patch = await sandbox.diff()
        assert "+new" in patch and "+++ b/added" in patch
        assert await sandbox.connect(None) == ENDPOINT
    finally:
        await sandbox.stop()
    await sandbox.stop()
    with pytest.raises(SandboxDied):
        await sandbox.exec("true", timeout_s=1)
    sent = json.dumps(server.requests)
    assert "exec?command" in sent and "README" not in sent and "TOKEN" not in sent  # what an audit would keep


async def test_a_timeout_kills_what_the_command_started_and_nothing_else(make):
    sandbox = make("r0")
    await sandbox.start()
    try:
        await sandbox.exec("sleep 1234 & echo started", timeout_s=5)
        started = time.monotonic()
        done = await sandbox.exec("(setsid sleep 4321 &); echo hm; while :; do sleep 0.01; done", timeout_s=0.5)
        assert (done.timed_out, done.output) == (True, "hm\n") and time.monotonic() - started < 8
        done = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout_s=5)
        assert "sleep 1234" in done.output and "sleep 4321" not in done.output
        assert (await sandbox.exec("yes", timeout_s=0.5)).truncated
    finally:
        await sandbox.stop()


async def test_a_background_process_that_holds_the_output_does_not_hold_its_command(make):
    sandbox = make("r0")
    await sandbox.start()
    try:
        started = time.monotonic()
        done = await sandbox.exec("(sleep 60 &); echo hi; exit 4", timeout_s=30)
        assert (done.output, done.returncode, done.timed_out) == ("hi\n", 4, False)
        assert time.monotonic() - started < 5
    finally:
        await sandbox.stop()


async def test_no_endpoint_no_secret_and_no_way_out(make, server):
    sandbox = make("r0")
    await sandbox.start()
    job = server.object(JOBS, sandbox.job)
    assert manifest.REACH not in job["metadata"]["labels"] and server.names(SECRETS) == []
    with pytest.raises(SandboxError, match="reaches nothing"):
        await sandbox.connect(None)
    await sandbox.stop()


async def test_an_endpoint_comes_by_a_secret_and_a_policy_before_the_pod_starts(make, server):
    sandbox = make("r1", endpoint=ENDPOINT)
    await sandbox.start()
    try:
        (name,) = server.names(SECRETS)
        secret, job = server.object(SECRETS, name), server.object(JOBS, sandbox.job)
        assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
        assert job["spec"]["suspend"] is False
        reach = job["metadata"]["labels"][manifest.REACH]
        assert f"lightning-ray-{reach}" in server.names(POLICIES)
        done = await sandbox.exec("echo $LIGHTNING_RAY_BASE_URL", timeout_s=5)
        assert done.output == ENDPOINT + "\n"
    finally:
        await sandbox.stop()


async def test_law8_a_killed_pod_is_told_by_its_reason(make, server):
    for status, kind, words in (("oom_killed", LimitExceeded, "OOMKilled"), ("evicted", NodeFailed, "Evicted")):
        sandbox = make(f"r-{status}")
        await sandbox.start()
        running = asyncio.create_task(sandbox.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.end, sandbox.job, FIXTURES[status])
        with pytest.raises(kind, match=f"while a command ran.*the pod's last words.*{words}"):
            await running
        await sandbox.stop()


async def test_pending_is_not_running_and_has_its_own_clock(make, server, backend, monkeypatch):
    server.plan = lambda job: [FIXTURES["unschedulable"], FIXTURES["creating"], FIXTURES["running"]]
    sandbox = make("late")
    await sandbox.start()
    await sandbox.stop()
    settings = SETTINGS.kubernetes.model_copy(update={"pending_timeout_s": 0.5})
    monkeypatch.setattr(backend.make.args[0], "settings", SETTINGS.model_copy(update={"kubernetes": settings}))
    for status, kind, words in (
        ("unschedulable", NodeFailed, r"did not run within 0\.5 s: Unschedulable: 0/3 nodes are available"),
        ("image_pull", NodeFailed, r"did not run within 0\.5 s: ImagePullBackOff"),
        ("invalid_image", ImageUnusable, "ended at once: InvalidImageName"),
        ("ended_by_itself", SandboxDied, "ended at once: Error: exit code 2"),
    ):
        server.plan = lambda job, status=status: [FIXTURES[status]]
        with pytest.raises(kind, match=words):
            await make(f"never-{status}").start()


async def test_creation_is_repeated_safely(backend, make, server):
    cluster = backend.make.args[0]
    sandbox = make("r0", endpoint=ENDPOINT)
    name = await asyncio.to_thread(cluster.create, sandbox.spec)
    answers = iter([503, 429])

    def busy(request):
        status = next(answers, None) if request.method == "POST" else None
        return status and web.Response(status=status, headers={"Retry-After": "0"})

    server.refuse = busy
    await sandbox.start()
    assert sandbox.job == name and server.names(JOBS) == [name] == server.names(SECRETS)
    await sandbox.stop()
    other = manifest.job(SETTINGS, {}, cluster.owner, make("r1").spec)
    other["metadata"]["labels"] = {}
    await asyncio.to_thread(cluster._batch.create_namespaced_job, cluster.namespace, other)
    with pytest.raises(SandboxError, match="that is not ours"):
        await asyncio.to_thread(cluster.create, make("r1").spec)
    await asyncio.to_thread(cluster.delete, other["metadata"]["name"])


async def test_a_cancelled_start_leaves_nothing(make, server):
    server.plan = lambda job: [FIXTURES["unschedulable"]]
    starting = asyncio.create_task(make("r0", endpoint=ENDPOINT).start())
    await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert server.names(JOBS) == []


async def test_one_watch_serves_all_and_nothing_is_polled(make, server):
    before = len(server.requests)
    sandboxes = [make(f"r{number}") for number in range(6)]
    await asyncio.gather(*[each.start() for each in sandboxes])
    await asyncio.gather(*[each.stop() for each in sandboxes])
    asked = [path for method, path in server.requests[before:] if method == "GET" and "/exec?" not in path]
    assert asked == []


async def test_a_watch_that_is_too_old_lists_again_and_misses_nothing(server, workspace):
    too_old = json.dumps(FIXTURES["gone"]).encode() + b"\n"
    refused = []

    def expire(request):
        if "watch" in request.query and len(refused) < 2:
            refused.append(request.query["watch"])
            return web.Response(body=too_old, content_type="application/json")
        return None

    server.refuse = expire
    before = len(server.requests)
    backend = await asyncio.to_thread(open_backend, SETTINGS, "again", server.configuration)
    server.refuse = lambda request: None
    sandbox = backend.make(SandboxSpec("r0", workspace))
    await sandbox.start()
    await sandbox.stop()
    await asyncio.to_thread(backend.close)
    asked = [path for method, path in server.requests[before:] if method == "GET"]
    lists = [path for path in asked if "owner%3D" in path and "watch=" not in path]
    assert len(refused) == 2 and len(lists) >= 4  # of each kind at the start, and again after 410
    assert any("watch=" in path and "resourceVersion=" in path for path in asked)


async def test_law8_what_nobody_owns_is_deleted_and_what_is_owned_stays(server, backend, workspace, monkeypatch):
    monkeypatch.setattr(clusters, "LEASE_S", 0)
    dead = await asyncio.to_thread(clusters.Cluster, SETTINGS, "tests", server.configuration)
    monkeypatch.setattr(clusters, "LEASE_S", 60)
    alive = await asyncio.to_thread(clusters.Cluster, SETTINGS, "tests", server.configuration)
    other = await asyncio.to_thread(clusters.Cluster, SETTINGS, "another-run", server.configuration)
    spec = SandboxSpec("r0", workspace)
    orphan, *kept = [await asyncio.to_thread(each.create, spec) for each in (dead, alive, other)]
    removed = await asyncio.to_thread(backend.janitor)
    assert [each for each in removed if each.startswith("Job")] == [f"Job {orphan}"]
    assert set(server.names(JOBS)) == set(kept)
    assert await asyncio.to_thread(backend.janitor) == []
    for each in (dead, alive, other):
        await asyncio.to_thread(each.close)
    assert server.names(JOBS) == []


@pytest.mark.parametrize(("path", "words"), [
    ("networkpolicies", "create_namespaced_network_policy: 403 networkpolicies is forbidden"),
    ("leases", "403 leases is forbidden"), ("pods?", "list_namespaced_pod: 403 pods? is forbidden"),
])
def test_law6_without_the_rights_for_isolation_nothing_starts(server, path, words):
    body = {"kind": "Status", "status": "Failure", "code": 403, "message": f"{path} is forbidden"}
    server.refuse = lambda request: web.json_response(body, status=403) if path in request.path_qs else None
    try:
        with pytest.raises(SandboxUnavailable) as error:
            open_backend(SETTINGS, "tests", server.configuration)
    finally:
        server.refuse = lambda request: None
    assert words in str(error.value) and "sandboxes.yaml" in str(error.value)


def test_law6_a_network_that_does_not_enforce_policies_is_refused(server):
    before = server.names(LEASES)
    with socket.create_server(("127.0.0.1", 0)) as open_port:
        server.environment["KUBERNETES_SERVICE_PORT"] = str(open_port.getsockname()[1])
        with pytest.raises(SandboxUnavailable, match="does not enforce network policies"):
            open_backend(SETTINGS, "tests", server.configuration)
    server.environment["KUBERNETES_SERVICE_PORT"] = "9"
    assert server.names(JOBS) == [] and server.names(LEASES) == before


async def test_law6_the_role_in_jobs_allows_what_is_asked_and_hardly_more(server, workspace, monkeypatch):
    monkeypatch.setattr(clusters, "RENEW_S", 0.05)
    before = len(server.requests)
    backend = await asyncio.to_thread(open_backend, SETTINGS, "rights", server.configuration)
    sandbox = backend.make(SandboxSpec("r0", workspace, endpoint=ENDPOINT))
    await sandbox.start()
    await asyncio.to_thread(backend.make.args[0].last_words, sandbox.job)
    await sandbox.stop()
    await asyncio.sleep(0.2)
    await asyncio.to_thread(backend.close)
    asked = {right(method, path) for method, path in server.requests[before:]}
    role = next(each for each in yaml.safe_load_all(ROLES.read_text()) if each["kind"] == "Role")
    allowed = {(verb, name) for rule in role["rules"] for name in rule["resources"] for verb in rule["verbs"]}
    assert asked <= allowed
    assert allowed - asked <= {("get", "jobs"), ("patch", "networkpolicies"), ("create", "pods/exec")}


def right(method: str, path: str) -> tuple[str, str]:
    """The verb and the resource that a request needs."""
    path, _, query = path.partition("?")
    resource, *name = path.partition("/namespaces/")[2].split("/")[1:]
    verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(method) or (
        "get" if name else "watch" if "watch=" in query else "list")
    return verb, "/".join([resource, *name[1:]])


async def test_a_task_whose_checkout_lies_in_its_image_gets_it(backend, server, tmp_path):
    checkout = server.images["task:1"] = tmp_path / "image"
    (checkout / ".git").mkdir(parents=True)
    (checkout / ".git" / "HEAD").write_text("history")
    (checkout / "shop.py").write_text("def total(a, b):\n    return a + b\n")
    bug = ("diff --git a/shop.py b/shop.py\n--- a/shop.py\n+++ b/shop.py\n@@ -1,2 +1,2 @@\n def total(a, b):\n"
           "-    return a + b\n+    return a - b\n")
    task = make_task(files={}, image_name="task:1", patch=bug)
    workspace = await asyncio.to_thread(Workspaces(tmp_path / "w", backend.checkout).prepare, task)
    assert (workspace / "shop.py").read_text() == "def total(a, b):\n    return a - b\n"
    assert (workspace / ".git" / "HEAD").read_text() != "history"
    sandbox = backend.make(SandboxSpec("r0", workspace, image="task:1"))
    await sandbox.start()
    assert server.object(JOBS, sandbox.job)["spec"]["template"]["spec"]["containers"][0]["image"] == "task:1"
    assert (await sandbox.exec("git log --oneline | wc -l; cat shop.py", timeout_s=5)).output.startswith("1\ndef total")
    await sandbox.stop()
    with pytest.raises(SandboxError, match="cannot be read: it is empty"):
        await asyncio.to_thread(backend.checkout, "without:1", tmp_path / "nothing")
    assert server.names(JOBS) == []


async def test_a_grader_brings_its_test_runner_into_a_pod(backend, tmp_path):
    task = make_task(grader="swe", FAIL_TO_PASS=["test_shop.py::test_adds"], PASS_TO_PASS=[], grading={
        "files": {"test_shop.py": "from shop import total\n\ndef test_adds():\n    assert total(3, 5) == 8\n"}})
    patch = ("diff --git a/shop.py b/shop.py\n--- a/shop.py\n+++ b/shop.py\n@@ -1,2 +1,2 @@\n def total(a, b):\n"
             "-    return a - b\n+    return a + b\n")
    grader = grader_for(task, RewardConfig())
    sandbox = backend.make(SandboxSpec("r0.grade", Workspaces(tmp_path).prepare(task), mounts=grader.mounts))
    await sandbox.start()
    try:
        assert (await grader.grade(task, patch, sandbox)).reason == "passed"
        done = await sandbox.exec("touch /opt/runner/x; chmod -R u+w /opt/runner; ls /run", timeout_s=5)
        assert done.output.count("Read-only file system") >= 2 and "copied" not in done.output
    finally:
        await sandbox.stop()
