"""The rollouts of one runner: sandbox, harness and grading of each, driven by asyncio in one process.

INIT (workspace, sandbox, endpoint) -> RUN (the agent's clock starts) -> its diff is taken, its endpoint revoked, its
sandbox stopped -> GRADE (another sandbox over the pristine workspace). Each stage has places of its own. `run` never
raises for anything that a rollout can do; what a failure means is decided in `harness/stages.py`. A cancelled rollout
is cleaned up before the cancellation goes on.
"""

import asyncio
import dataclasses
import logging
import shlex
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from lightning_ray.config import Config
from lightning_ray.harness import shaping, stages
from lightning_ray.harness.command import run_command
from lightning_ray.harness.pool import Execute, WorkerPool
from lightning_ray.harness.spec import HarnessResult, RolloutSpec, command_plan, mounts
from lightning_ray.harness.stages import Attempt, Failure, StageFailed, blamed_on
from lightning_ray.proxy.endpoint import Endpoint, OpenRollout, Status
from lightning_ray.sandbox.base import WORKSPACE, ExecResult, Limits, Sandbox, SandboxSpec
from lightning_ray.tasks.base import Task, Workspaces
from lightning_ray.tasks.grading import grader_for
from lightning_ray.trajectory.call import Call, Trajectory

log = logging.getLogger(__name__)

COMMAND_GRACE_S = 15.0
"""How much longer than its clock a command harness may take to write files and to be killed."""
GRADE_GRACE_S = 30.0
"""How much longer than `reward.timeout_s` grading may take, its sandbox included, before it is given up."""


class ProxyClient(Protocol):
    """What a rollout needs of its proxy (`proxy/actor.py`)."""

    async def open(self, rollout: OpenRollout) -> Endpoint: ...

    async def listen(self, rollout_id: str, pid: int, port: int) -> None: ...

    async def finish(self, rollout_id: str) -> list[Call]: ...

    async def status(self, rollout_id: str) -> Status: ...


class Rollouts:
    """Runs rollouts. `sandbox` makes one that is not started; `pool` is needed for a Python harness only."""

    def __init__(self, config: Config, proxy: ProxyClient, workspaces: Workspaces,
                 sandbox: Callable[[SandboxSpec], Sandbox], pool: WorkerPool | None, facts: dict[str, Any],
                 starts_at_once: int = 8) -> None:
        self._config = config
        self._proxy = proxy
        self._workspaces = workspaces
        self._sandbox = sandbox
        self._pool = pool
        self._facts = facts
        self._limits = Limits.of(config.sandbox)
        self._init_places = asyncio.Semaphore(starts_at_once)
        self._run_places = asyncio.Semaphore(config.runners.rollouts)
        self._grade_places = asyncio.Semaphore(config.runners.grading)
        self._running: set[asyncio.Task] = set()
        self._cleaning: set[asyncio.Task] = set()

    async def run(self, spec: RolloutSpec) -> Trajectory:
        """One rollout, from workspace to grade."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._run(spec)
        finally:
            self._running.discard(task)

    async def stop(self) -> None:
        """Cancel every rollout and wait until each is cleaned up."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.gather(*self._cleaning, return_exceptions=True)

    async def _run(self, spec: RolloutSpec) -> Trajectory:
        attempts: list[Attempt] = []
        while True:
            attempt = await self._attempt(spec, len(attempts))
            attempts.append(attempt)
            if not stages.again(attempt.failure, spec.lost + len(attempts) - 1, self._config.runners.infra_retries):
                record = stages.trajectory(spec, attempts, {"limits": self._facts.get("limits", "")})
                return shaping.shape(record, spec.mode, self._config.reward.length_penalty)

    async def _attempt(self, spec: RolloutSpec, number: int) -> Attempt:
        attempt = Attempt()
        name = spec.attempt(number)
        try:
            async with self._run_places:
                with blamed_on("infra", "init"):
                    await self._agent(spec, name, attempt)
            attempt.failure = stages.judge_run(attempt.result, attempt.endpoint)
            if attempt.failure is None:
                await self._grade(spec.task, name, attempt)
        except StageFailed as failed:
            attempt.failure = failed.failure
        return attempt

    async def _agent(self, spec: RolloutSpec, name: str, attempt: Attempt) -> None:
        """INIT and RUN. Afterwards the attempt has its calls and its patch, and nothing of the agent is left."""
        sandbox = None
        opened = False
        started = time.monotonic()
        try:
            async with self._init_places:
                with stages.reading_task("init"):
                    workspace = await asyncio.to_thread(self._workspaces.prepare, spec.task)
                with blamed_on("proxy", "init"):
                    opened = True
                    endpoint = await self._proxy.open(self._open_rollout(spec, name))
                inside = self._config.harness.kind == "command"
                sandbox = self._sandbox(SandboxSpec(
                    name, workspace, self._limits, mounts(self._config.harness), image=spec.task.image_name,
                    endpoint=endpoint.base_url if inside else ""))
                with blamed_on("sandbox", "init"):
                    await sandbox.start()
                with blamed_on("proxy", "init"):
                    if inside:
                        inner = await sandbox.connect(partial(self._proxy.listen, name))
                        endpoint = dataclasses.replace(endpoint, base_url=inner)
            attempt.timings["init"] = time.monotonic() - started
            attempt.result = await self._run_harness(spec, name, sandbox, endpoint, attempt)
            opened = False
            if attempt.result.ok:
                with blamed_on("infra", "run"):
                    attempt.patch = await sandbox.diff()
        finally:
            if opened:
                attempt.calls = await self._quietly(self._proxy.finish(name), f"closing the endpoint of {name}") or []
            if sandbox is not None:
                await self._quietly(sandbox.stop(), f"stopping the sandbox of {name}")

    async def _run_harness(self, spec: RolloutSpec, name: str, sandbox: Sandbox, endpoint: Endpoint,
                           attempt: Attempt) -> HarnessResult:
        """RUN: until the harness has ended and its endpoint is revoked."""
        running = time.monotonic()
        try:
            with blamed_on("infra", "run"):
                result = await self._harness(spec, name, sandbox, endpoint)
        finally:
            attempt.timings["run"] = time.monotonic() - running
        with blamed_on("proxy", "run"):
            attempt.calls = await self._surely(self._proxy.finish(name))
            if not result.ok:
                attempt.endpoint = await self._proxy.status(name)
        return result

    async def _harness(self, spec: RolloutSpec, name: str, sandbox: Sandbox, endpoint: Endpoint) -> HarnessResult:
        harness = self._config.harness
        limit = harness.timeout_s + (COMMAND_GRACE_S if harness.kind == "command" else 0.0)
        try:
            async with asyncio.timeout(limit) as clock:
                if harness.kind == "command":
                    plan = command_plan(harness, spec.task.problem_statement, self._config.policy.name,
                                        endpoint.base_url)
                    with blamed_on("sandbox", "run"):
                        return await run_command(sandbox, plan, harness.timeout_s, harness.result)
                request = {
                    "task": {"instance_id": spec.task.instance_id, "repo": spec.task.repo,
                             "problem_statement": spec.task.problem_statement},
                    "base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": self._config.policy.name,
                    "settings": harness.settings,
                }
                return await self._pool.run(name, request, self._execute_in(sandbox))
        except TimeoutError:
            if not clock.expired():
                raise
            return HarnessResult("Timeout", ok=False, detail=f"after {harness.timeout_s:g} s")

    def _execute_in(self, sandbox: Sandbox) -> Execute:
        """How a Python harness's commands are run."""
        async def execute(command: str, cwd: str, timeout: float | None, env: dict[str, str]) -> ExecResult:
            if cwd not in ("", WORKSPACE):
                command = f"cd {shlex.quote(cwd)} || exit 1\n{command}"
            with blamed_on("sandbox", "run"):
                return await sandbox.exec(command, timeout_s=timeout or self._config.sandbox.command_timeout_s, env=env)
        return execute

    async def _grade(self, task: Task, name: str, attempt: Attempt) -> None:
        """GRADE, repeated where grading itself failed."""
        if not attempt.patch.strip():
            attempt.grade = stages.empty_patch()
            return
        started = time.monotonic()
        failure: Failure | None = None
        for number in range(self._config.runners.infra_retries + 1):
            try:
                async with self._grade_places:
                    await self._grade_once(task, f"{name}.grade{number or ''}", attempt)
            except StageFailed as failed:
                failure = failed.failure
                if failure.is_data:
                    break
            else:
                return
            finally:
                attempt.timings["grade"] = time.monotonic() - started
        attempt.failure = failure

    async def _grade_once(self, task: Task, name: str, attempt: Attempt) -> None:
        with stages.reading_task("grade"):
            workspace = await asyncio.to_thread(self._workspaces.prepare, task)
            grader = grader_for(task, self._config.reward)
        sandbox = self._sandbox(SandboxSpec(name, workspace, self._limits, grader.mounts, image=task.image_name))
        try:
            with blamed_on("grader", "grade"):
                await sandbox.start()
                async with asyncio.timeout(self._config.reward.timeout_s + GRADE_GRACE_S):
                    attempt.grade = await grader.grade(task, attempt.patch, sandbox)
        finally:
            await self._quietly(sandbox.stop(), f"stopping the sandbox {name}")

    async def _surely(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await `work`, which goes on to its end even where the rollout is cancelled meanwhile."""
        task = asyncio.create_task(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
        return await asyncio.shield(task)

    async def _quietly(self, work: Coroutine[Any, Any, Any], what: str) -> Any:
        """`_surely`, where a failure must hide neither the rollout's result nor its error: it is logged, and what is
        left of a sandbox is the janitor's."""
        try:
            return await self._surely(work)
        except Exception as error:
            log.warning("%s failed: %s", what, stages.describe(error))
            return None

    def _open_rollout(self, spec: RolloutSpec, name: str) -> OpenRollout:
        sampling = self._config.sampling.model_copy(update={"temperature": spec.temperature})
        harness = self._config.harness
        return OpenRollout(name, spec.mode, sampling, spec.seed, harness.max_calls, harness.max_tokens)
