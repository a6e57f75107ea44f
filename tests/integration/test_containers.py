"""What only the container backend has: a daemon, images, labels. Skipped where there is no Podman (`podman.py`)."""

import asyncio
import hashlib
import http.server
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from lightning_ray.config import Config, ConfigError, RewardConfig, SandboxConfig
from lightning_ray.harness.rollouts import Rollouts
from lightning_ray.harness.spec import RolloutSpec
from lightning_ray.sandbox import backend, container, limits
from lightning_ray.sandbox.base import Limits, Mount, SandboxDied, SandboxError, SandboxSpec, SandboxUnavailable
from lightning_ray.sandbox.container import Containers, daemon
from lightning_ray.tasks.grading import grader_for
from lightning_ray.tasks.workspaces import Workspaces
from tests import podman, sandboxes
from tests.integration.scripted_proxy import Answer, ScriptedProxy
from tests.sandboxes import FILES, RIGHT, graded_files, make_task

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workspace(tmp_path) -> Path:
    return Workspaces(tmp_path / "workspaces").prepare(make_task())


@pytest.fixture(scope="module")
def image(containers) -> str:
    return containers.report["image"].partition(" ")[0]


@pytest.fixture(scope="module")
def odd_images(containers, image):
    """Images with a checkout of their own at the workspace's place, and without git."""
    client = daemon.client()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        files = {"shop.py": RIGHT["shop.py"], "built.so": "x", ".git/config": "secret", "sub/.git/x": "x"}
        for name, text in files.items():
            member = tarfile.TarInfo(f"testbed/{name}")
            member.size, member.uid, member.mode = len(text), 12345, 0o600
            tar.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("testbed/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    alone = client.create_host_config(network_mode="none")
    made = client.create_container(image, ["rm", "/usr/bin/git"], host_config=alone)["Id"]
    client.put_archive(made, "/", archive.getvalue())
    client.commit(made, "checkout-in-image", "1")
    client.start(made)
    client.wait(made)
    client.commit(made, "no-git", "1")
    client.remove_container(made)
    yield "checkout-in-image:1", "no-git:1"
    client.remove_image("no-git:1")
    client.remove_image("checkout-in-image:1")


def left_by(owner: str) -> tuple[list[str], list[Path]]:
    """Containers and directories of a process."""
    return daemon.owned(owner), list(Path("/tmp").glob(f"{limits.PREFIX}{owner}.*/pipes"))


def test_the_report_says_what_it_is(containers):
    report = containers.report
    assert report["backend"] == "container" and " Engine " in report["daemon"]
    assert {"mnt", "pid", "net", "ipc", "uts"} <= set(report["namespaces"])
    assert set(report["limits"]) == {"memory", "pids", "cpu"}
    assert all(kind.startswith("cgroup v") for kind in report["limits"].values()) and "unsafe" not in report


def test_a_container_needs_an_image():
    with pytest.raises(ConfigError, match=r"sandbox\.image: .* names no image"):
        Config.load(None, ["--sandbox.backend", "container"])


def chosen_in_a_fresh_thread(config: SandboxConfig) -> str:
    """The error of choosing where no client exists yet (each thread has its own)."""
    found = []

    def work():
        try:
            backend.choose(config)
        except SandboxUnavailable as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def test_no_daemon_and_a_daemon_elsewhere_are_errors_with_a_remedy(monkeypatch, tmp_path):
    config = SandboxConfig(backend="container", image="x")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert "podman system service" in chosen_in_a_fresh_thread(config)
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    assert "not one of this machine" in chosen_in_a_fresh_thread(config)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"NetworkMode": "host"}, "its net namespace is the host's.*it has network interfaces"),
        ({"SecurityOpt": ["seccomp=unconfined"]}, "no system call filter.*it can gain privileges"),
        ({"PidsLimit": 0}, "its pids is not limited"),
    ],
)
def test_a_daemon_that_does_not_do_as_it_is_told_is_found_out(containers, image, monkeypatch, change, fault):
    settings = container._settings

    def changed(*arguments):
        made = settings(*arguments)
        made["HostConfig"] |= change
        return made

    monkeypatch.setattr(container, "_settings", changed)
    with pytest.raises(SandboxUnavailable, match=fault):
        backend.choose(SandboxConfig(backend="container", image=image))
    assert daemon.owned(limits.owner()) == []


def test_a_runtime_that_the_daemon_would_not_use_is_an_error(containers, image):
    config = SandboxConfig(backend="container", image=image, container={"runtime": "runsc"})
    told = r"'runsc' is not used: .* takes no runtime.*containers\.conf" if daemon.is_podman() else "runsc"
    with pytest.raises(SandboxUnavailable, match=told):
        backend.choose(config)


def test_a_missing_image_is_an_error_before_the_first_rollout(containers):
    config = {"backend": "container", "image": "localhost:1/no/such-image:9"}
    with pytest.raises(SandboxUnavailable, match=r"no/such-image:9.*pull is `never`"):
        backend.choose(SandboxConfig(**config, container={"pull": "never"}))
    with pytest.raises(SandboxUnavailable, match=r"no/such-image:9' cannot be pulled"):
        backend.choose(SandboxConfig(**config))


class Registry(http.server.BaseHTTPRequestHandler):
    """One image of one empty layer, by the registry's HTTP API (OCI distribution specification)."""

    LAYER = bytes(10240)
    CONFIG = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {
        "type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(LAYER).hexdigest()}"]}}).encode()
    TYPE = "application/vnd.oci.image.manifest.v1+json"

    def do_GET(self):
        def part(kind: str, data: bytes) -> dict:
            return {"mediaType": f"application/vnd.oci.image.{kind}", "size": len(data),
                    "digest": f"sha256:{hashlib.sha256(data).hexdigest()}"}

        config, layer = part("config.v1+json", self.CONFIG), part("layer.v1.tar", self.LAYER)
        manifest = json.dumps(
            {"schemaVersion": 2, "mediaType": self.TYPE, "config": config, "layers": [layer]}).encode()
        found = {"/v2/": b"{}", "/v2/some/image/manifests/1": manifest,
                 f"/v2/some/image/blobs/{config['digest']}": self.CONFIG,
                 f"/v2/some/image/blobs/{layer['digest']}": self.LAYER}.get(self.path)
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(found or b"")))
        self.send_header("Content-Type", self.TYPE if "manifests" in self.path else "application/octet-stream")
        self.end_headers()
        self.wfile.write(found or b"")

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


def test_an_image_that_the_daemon_lacks_is_pulled_once(containers):
    if not podman.registry:
        pytest.skip("this daemon pulls from no registry of ours")
    name = f"{podman.registry}/some/image:1"
    host, _, port = podman.registry.partition(":")
    with http.server.ThreadingHTTPServer((host, int(port)), Registry) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with pytest.raises(SandboxUnavailable, match="has no bash"):  # it is there, and of no use
                backend.choose(SandboxConfig(backend="container", image=name))
        finally:
            server.shutdown()
    assert daemon.image(name, pull=False)["Id"]
    daemon.client().remove_image(name)


async def test_an_image_that_lacks_a_program_is_refused(odd_images, image, workspace):
    containers = Containers(SandboxConfig(backend="container", image=image))
    with pytest.raises(SandboxUnavailable, match="programs are missing inside: git"):
        await containers.make(SandboxSpec("x", workspace, image=odd_images[1])).start()


async def test_a_task_may_name_an_image_whose_own_checkout_is_hidden(containers, odd_images, workspace):
    sandbox = containers.make(SandboxSpec("own-image", workspace, image=odd_images[0]))
    await sandbox.start()
    try:
        done = await sandbox.exec("ls -A; touch new && rm new; git status --porcelain", timeout_s=20)
        assert done.output.split() == [".git", "README.md", "shop.py", "tools"]
        assert await sandbox.diff() == ""
    finally:
        await sandbox.stop()


BUG = """\
--- a/shop.py
+++ b/shop.py
@@ -1,2 +1,2 @@
 def total(a, b):
-    return a + b
+    return a - b
"""


async def test_a_task_whose_checkout_is_in_its_image_gets_it_with_its_bug(containers, odd_images, tmp_path):
    task = make_task({}, image_name=odd_images[0], patch=BUG)
    workspace = Workspaces(tmp_path, containers.checkout).prepare(task)
    assert (workspace / "shop.py").read_text() == FILES["shop.py"] and os.readlink(workspace / "link") == "/etc/passwd"
    assert {path.name for path in workspace.iterdir()} == {".git", "shop.py", "built.so", "sub", "link"}
    assert "secret" not in (workspace / ".git/config").read_text() and not list((workspace / "sub").iterdir())
    sandbox = containers.make(SandboxSpec("x", workspace, image=task.image_name))
    await sandbox.start()
    try:
        done = await sandbox.exec("git log --oneline | wc -l; git status --porcelain; stat -c %a shop.py", timeout_s=20)
        assert done.output == "1\n644\n"
        await sandbox.exec("sed -i 's/-/+/' shop.py", timeout_s=20)
        patch = await sandbox.diff()
    finally:
        await sandbox.stop()
    grader = grader_for(task, RewardConfig(timeout_s=60))
    grading = containers.make(SandboxSpec("grade", workspace, image=task.image_name))
    await grading.start()
    try:
        assert (await grader.grade(task, patch, grading)).passed
    finally:
        await grading.stop()


def test_what_is_wrong_with_a_checkout_in_an_image_is_named(containers, odd_images, image, tmp_path):
    workspaces = Workspaces(tmp_path, containers.checkout)
    with pytest.raises(ValueError, match=r"patch does not apply to the checkout in checkout-in-image:1: .*nothing\.py"):
        workspaces.prepare(make_task({}, image_name=odd_images[0], patch=BUG.replace("shop", "nothing")))
    with pytest.raises(SandboxError, match="no checkout at /testbed"):
        workspaces.prepare(make_task({}, image_name=image))
    assert list(tmp_path.glob("*/*")) == [] and daemon.owned(limits.owner()) == []


async def test_stop_is_idempotent_and_leaves_nothing(containers, workspace):
    descriptors = len(os.listdir("/proc/self/fd"))
    sandbox = containers.make(SandboxSpec("stopped/odd name", workspace))
    await sandbox.start()
    await sandbox.exec("setsid sleep 500 >/dev/null 2>&1 &", timeout_s=10)
    pids = [sandbox.pid, *map(int, Path(f"/proc/{sandbox.pid}/task/{sandbox.pid}/children").read_text().split())]
    assert len(pids) == 2 and all(map(len, left_by(limits.owner())))
    await sandbox.stop()
    await sandbox.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert left_by(limits.owner()) == ([], [])
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2 * daemon.THREADS  # connections that are kept open
    with pytest.raises(SandboxDied):
        await sandbox.exec("true", timeout_s=1)
    with pytest.raises(SandboxError, match="started once"):
        await sandbox.start()


async def test_what_a_sandbox_could_not_remove_goes_with_its_backend(containers, image, workspace, monkeypatch):
    made = Containers(SandboxConfig(backend="container", image=image))
    sandbox = made.make(SandboxSpec("x", workspace))
    await sandbox.start()
    with monkeypatch.context() as patch:
        patch.setattr(daemon, "remove", lambda container: (_ for _ in ()).throw(SandboxError("the daemon is away")))
        with pytest.raises(SandboxError, match="is away"):
            await sandbox.stop()
    assert len(daemon.owned(limits.owner())) == 1
    await asyncio.to_thread(made.close)
    assert left_by(limits.owner()) == ([], []) and not made.names


async def test_a_start_that_is_cancelled_leaves_nothing(containers, workspace):
    made = [containers.make(SandboxSpec(f"cancelled-{number}", workspace)) for number in range(3)]
    starts = [asyncio.create_task(sandbox.start()) for sandbox in made]
    await asyncio.sleep(0.1)
    for start in starts:
        start.cancel()
    await asyncio.gather(*starts, return_exceptions=True)
    await asyncio.gather(*(sandbox.stop() for sandbox in made))
    deadline = time.monotonic() + 20
    while left_by(limits.owner()) != ([], []):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_what_is_missing_is_named_and_leaves_nothing(containers, workspace, tmp_path):
    for wrong, spec in {
        "no-such-mount": SandboxSpec("x", workspace, mounts=(Mount(tmp_path / "no-such-mount", "/opt/x"),)),
        "no-such-workspace": SandboxSpec("x", tmp_path / "no-such-workspace"),
        "relative": SandboxSpec("x", workspace, mounts=(Mount(tmp_path, "relative"),)),
    }.items():
        with pytest.raises(SandboxError, match=wrong):
            await containers.make(spec).start()
    assert left_by(limits.owner()) == ([], [])


async def test_a_container_that_its_daemon_removes_is_a_dead_sandbox(containers, workspace):
    async with sandboxes.running(workspace, make=containers.make) as sandbox:
        command = asyncio.create_task(sandbox.exec("sleep 99", timeout_s=60))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(daemon.remove, daemon.owned(limits.owner())[0])
        with pytest.raises(SandboxDied):
            await command


async def test_grading_happens_in_a_container_of_its_own(containers, tmp_path):
    made = []

    def make(spec):
        made.append(spec)
        return containers.make(spec)

    assert (await graded_files(RIGHT, tmp_path, make=make)).passed
    assert (await graded_files({"shop.py": "import os\nos._exit(0)\n"}, tmp_path, make=make)).reason == "ended_early"
    assert len(made) == 4


async def test_limits_are_those_asked_for(containers, workspace):
    asked = Limits(memory_mb=200, processes=33, cpus=0.4)
    async with sandboxes.running(workspace, limits=asked, make=containers.make) as sandbox:
        assert set(limits.applied(sandbox.pid, asked).values()) <= {"cgroup v1", "cgroup v2"}
        assert set(limits.applied(sandbox.pid, Limits(memory_mb=201, processes=34, cpus=0.5)).values()) == {"none"}


AGENT = """
import json, os, subprocess, urllib.request

while True:
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "total must add"}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
                                     {"Content-Type": "application/json"})
    command = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if command == "submit":
        break
    subprocess.run(command, shell=True, check=True)
"""


async def test_rollouts_in_containers_reach_their_endpoints_and_are_graded(containers, tmp_path):
    """A command harness of the image's own python; the container of one rollout is killed under it."""
    made = []

    def make(spec):
        made.append(containers.make(spec))
        return made[-1]

    def answer(rollout, number: int) -> Answer:
        if rollout.opened.rollout_id == "r1":
            os.kill(next(each for each in made if each.spec.name == "r1").pid, signal.SIGKILL)
        return Answer(["sed -i 's/a - b/a + b/' shop.py", "submit"][number])

    config = Config(harness={"kind": "command", "command": ["python3", "/tmp/agent.py"], "timeout_s": 60,
                             "files": {"/tmp/agent.py": AGENT}})  # fmt: skip
    proxy = ScriptedProxy(answer)
    await proxy.start()
    rollouts = Rollouts(config, proxy, Workspaces(tmp_path), make, None, {})
    try:
        records = await asyncio.gather(*(
            rollouts.run(RolloutSpec(f"r{number}", "g", make_task(), "train", 0, 1.0)) for number in range(3)))
    finally:
        await rollouts.stop()
        await proxy.stop()
    assert [(record.end, record.passed, len(record.calls)) for record in records] == [("graded", True, 2)] * 3
    assert [record.notes["attempts"] for record in records] == [1, 2, 1]
    assert "SandboxDied" in records[1].notes["failures"][0] and left_by(limits.owner()) == ([], [])


OWNER = textwrap.dedent("""
    import asyncio, sys
    from pathlib import Path
    from lightning_ray.config import SandboxConfig
    from lightning_ray.sandbox import backend, limits
    from lightning_ray.sandbox.base import SandboxSpec

    async def main():
        chosen = await asyncio.to_thread(backend.choose, SandboxConfig(backend="container", image=sys.argv[1]))
        made = [chosen.make(SandboxSpec(f"orphan{number}", Path(sys.argv[2]))) for number in range(2)]
        await asyncio.gather(*(sandbox.start() for sandbox in made))
        print(limits.owner(), *(sandbox.pid for sandbox in made), flush=True)
        await asyncio.gather(*(sandbox.exec("setsid sleep 1000 & sleep 2", timeout_s=1000) for sandbox in made))
        await asyncio.sleep(1000)

    asyncio.run(main())
""")


def test_nothing_stays_behind_when_the_owner_is_killed(containers, image, workspace):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, image, str(workspace)], stdout=subprocess.PIPE, text=True,
                             cwd=ROOT)
    name, *pids = owner.stdout.readline().split()
    assert not [line for line in daemon.janitor() if name in line]  # its owner lives: nothing of it is touched
    assert len(daemon.owned(name)) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):  # the shell reads the end of its script
        assert time.monotonic() < deadline, "a container outlives the process that started it"
        time.sleep(0.05)
    assert len([line for line in containers.janitor() if line.startswith("container") and name in line]) == 2
    assert left_by(name) == ([], []) and not [line for line in containers.janitor() if name in line]


def test_containers_of_other_machines_and_of_others_are_not_touched(containers, image):
    client = daemon.client()
    dead = {daemon.OWNER: "999999999-1"}
    others = [client.create_container(image, ["true"], labels=labels)["Id"] for labels in (
        dead | {daemon.PLACE: "another boot pid:[1]"}, {"of": "somebody"})]
    ours = client.create_container(image, ["true"], labels=dead | {daemon.PLACE: daemon.place()})["Id"]
    try:
        assert f"container {ours[:12]} of 999999999-1" in daemon.janitor()
        assert {each["Id"] for each in client.containers(all=True)} >= set(others)
    finally:
        for each in others:
            daemon.remove(each)
