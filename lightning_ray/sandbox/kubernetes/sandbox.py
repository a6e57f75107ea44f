"""A sandbox that is a Job in a Kubernetes cluster: one pod without rights, token or network but its runner's proxy."""

import asyncio
import posixpath

from lightning_ray.sandbox import pack
from lightning_ray.sandbox.base import WORKSPACE, Listen, SandboxError, SandboxSpec
from lightning_ray.sandbox.commands import Commands
from lightning_ray.sandbox.kubernetes import manifest
from lightning_ray.sandbox.kubernetes.channel import PodShell
from lightning_ray.sandbox.kubernetes.cluster import Cluster
from lightning_ray.sandbox.kubernetes.manifest import COPIED, COPIER
from lightning_ray.sandbox.kubernetes.states import failure

UNPACK_TIMEOUT_S = 300.0


class KubernetesSandbox(Commands):
    """See `base.Sandbox`. Belongs to the event loop that started it."""

    _workspace = WORKSPACE
    _scratch = manifest.SCRATCH

    def __init__(self, cluster: Cluster, spec: SandboxSpec, of_image: bool = False) -> None:
        """`of_image`: the workspace inside is what the image has there, and `spec.workspace` is not looked at."""
        self.spec = spec
        self._of_image = of_image
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
        self._asking = asyncio.ensure_future(asyncio.to_thread(self._cluster.create, self.spec, self._of_image))
        try:
            self._job = await asyncio.shield(self._asking)
            if self.spec.mounts:
                await self._copy(await self._placed("copying", {"pending"}))
            pod = await self._placed("running", {"pending", "copying"})
            self._shell = PodShell(self._cluster, self._job, pod, self.spec.limits.output_bytes)
            if not self._of_image:
                with open(pack.open_pack(self.spec.workspace), "rb") as file:
                    await self._untar(self._shell, WORKSPACE, file.read())
        except BaseException:
            await self.stop()
            raise

    async def _placed(self, wanted: str, before: set[str]) -> str:
        """The pod, as soon as it is where it should be. Waiting for a node or an image has a clock of its own."""
        limit = self._cluster.settings.kubernetes.pending_timeout_s
        state = await self._cluster.past(self.job, before, limit)
        if state.phase == wanted:
            return state.pod
        what = "ended at once" if state.phase == "ended" else f"did not run within {limit:g} s"
        raise failure(state, f"the Job {self.job} {what}")

    async def _copy(self, pod: str) -> None:
        """Bring in what is to be seen read-only, and let the sandbox itself begin."""
        copier = PodShell(self._cluster, self.job, pod, self.spec.limits.output_bytes, COPIER)
        for mount in self.spec.mounts:
            if mount.source.is_dir():
                await self._untar(copier, mount.target, pack.pack(mount.source))
            else:
                directory, name = posixpath.split(mount.target)
                await self._untar(copier, directory, pack.pack_files({name: mount.source.read_bytes()}))
        # a moment later, or the command would end with its container before it could say so
        ending = f"until [ -p {COPIED} ]; do sleep 0.1; done; sleep 0.2; echo >{COPIED}"
        await copier.run(f"({ending}) >/dev/null 2>&1 &", timeout_s=UNPACK_TIMEOUT_S)

    async def _untar(self, shell: PodShell, directory: str, archive: bytes) -> None:
        done = await shell.run(f"mkdir -p {directory} && tar -xf - -C {directory} --no-same-owner",
                               timeout_s=UNPACK_TIMEOUT_S, stdin=archive)
        if done.returncode or done.timed_out:
            raise SandboxError(f"{directory} of the sandbox {self.spec.name} cannot be filled: {done.output.strip()}")

    async def archive(self, most: int) -> bytes:
        """The workspace as a tar archive of at most so many bytes; its members are below one directory."""
        directory, name = posixpath.split(WORKSPACE)
        raw, returncode, timed_out, truncated = await self._live.run_raw(
            f'[ -n "$(ls -A)" ] || {{ echo it is empty; exit 1; }}; tar -cf - -C {directory} --exclude=.git {name}',
            UNPACK_TIMEOUT_S, output_bytes=most)
        if returncode or timed_out or truncated:
            said = f"it is larger than {most} bytes" if truncated else raw[-300:].decode("utf-8", "replace").strip()
            raise SandboxError(f"{WORKSPACE} of the sandbox {self.spec.name} cannot be read: {said}")
        return raw

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
