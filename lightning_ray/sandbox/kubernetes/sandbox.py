"""A sandbox that is a Job in a Kubernetes cluster: one pod without rights, token or network but its runner's proxy."""

import asyncio
import posixpath

from lightning_ray.sandbox import pack
from lightning_ray.sandbox.base import WORKSPACE, Listen, SandboxError, SandboxSpec
from lightning_ray.sandbox.commands import Commands
from lightning_ray.sandbox.kubernetes import manifest
from lightning_ray.sandbox.kubernetes.channel import PodShell
from lightning_ray.sandbox.kubernetes.cluster import Cluster
from lightning_ray.sandbox.kubernetes.states import failure

UNPACK_TIMEOUT_S = 300.0


class KubernetesSandbox(Commands):
    """See `base.Sandbox`. Belongs to the event loop that started it."""

    _workspace = WORKSPACE
    _scratch = manifest.SCRATCH

    def __init__(self, cluster: Cluster, spec: SandboxSpec) -> None:
        self.spec = spec
        self._cluster = cluster
        self._job: str | None = None
        self._asking: asyncio.Future[str] | None = None
        self._stopped = False

    @property
    def job(self) -> str:
        """Its Job's name."""
        if self._job is None:
            raise SandboxError("the sandbox is not running")
        return self._job

    async def start(self) -> None:
        if self._stopped or self._asking:
            raise SandboxError("a sandbox is started once")
        self._asking = asyncio.ensure_future(asyncio.to_thread(self._cluster.create, self.spec))
        try:
            self._job = await asyncio.shield(self._asking)
            pod = await self._placed(self._job)
            self._shell = PodShell(self._cluster, self._job, pod, self.spec.limits.output_bytes)
            await self._unpack()
        except BaseException:
            await self.stop()
            raise

    async def _placed(self, job: str) -> str:
        """The pod, as soon as it runs. Waiting for a node or an image has a clock of its own."""
        limit = self._cluster.settings.kubernetes.pending_timeout_s
        state = await self._cluster.past(job, "pending", limit)
        if state.phase == "running":
            return state.pod
        what = f"did not run within {limit:g} s" if state.phase == "pending" else "ended at once"
        raise failure(state, f"the Job {job} {what}")

    async def _unpack(self) -> None:
        with open(pack.open_pack(self.spec.workspace), "rb") as file:
            await self._untar(WORKSPACE, file.read())
        for mount in self.spec.mounts:
            if mount.source.is_dir():
                await self._untar(mount.target, pack.pack(mount.source))
            else:
                directory, name = posixpath.split(mount.target)
                await self._untar(directory, pack.pack_files({name: mount.source.read_bytes()}))

    async def _untar(self, directory: str, archive: bytes) -> None:
        done = await self._live.run(f"mkdir -p {directory} && tar -xf - -C {directory} --no-same-owner",
                                    timeout_s=UNPACK_TIMEOUT_S, stdin=archive)
        if done.returncode or done.timed_out:
            raise SandboxError(f"{directory} of the sandbox {self.spec.name} cannot be filled: {done.output.strip()}")

    async def connect(self, listen: Listen) -> str:
        if not self.spec.endpoint:
            raise SandboxError("this sandbox was made without an endpoint, and reaches nothing")
        return self.spec.endpoint

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._asking is None:
            return
        self._shell = None
        self._job = None
        name = manifest.job_name(self._cluster.owner, self.spec.name)
        await asyncio.wait([self._asking])  # what is being made is deleted as well
        await asyncio.to_thread(self._cluster.delete, name)
