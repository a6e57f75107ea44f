"""`lightning-ray capture`: run a harness once against a model, and say what a trainer would get of it.

Engine, proxy, sandbox, rollout and grading are those of training; log-probs are recomputed by the learner's model code
once the engine is gone. `settings` checks all input before anything starts and raises `ConfigError`; `capture` raises
`CaptureFailed` where a part of ours cannot run.
"""

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from lightning_ray.calls import end
from lightning_ray.config import Config, ConfigError, TasksConfig
from lightning_ray.harness.checks import check_harness
from lightning_ray.harness.command import LOG_CHARS
from lightning_ray.harness.pool import WorkerPool
from lightning_ray.harness.report import Ending, Parity, Report, report
from lightning_ray.harness.rollouts import ProxyClient, Rollouts
from lightning_ray.harness.runner import ProxyActor
from lightning_ray.harness.spec import RolloutSpec, command_plan
from lightning_ray.policy.directory import longest_context, read_json
from lightning_ray.policy.source import check_policy
from lightning_ray.proxy.endpoint import OpenRollout
from lightning_ray.ray_session import RaySession
from lightning_ray.sandbox import backend
from lightning_ray.sandbox.base import Backend, SandboxUnavailable
from lightning_ray.scratch import Scratch
from lightning_ray.tasks import files, one_line_bugs
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.workspaces import Workspaces
from lightning_ray.trajectory.call import Trajectory
from lightning_ray.trajectory.samples import rollout_samples
from lightning_ray.trajectory.selection import select

LONGEST_CONTEXT = 32768
"""Tokens, where policy.max_context is not set and the model could take more: the KV cache must hold it."""
TIMEOUT_S = 600.0
"""The agent's clock where harness.timeout_s is not set: one rollout, on a machine that may be slow."""
STOP_TIMEOUT_S = 20
END_S = 5.0


class CaptureFailed(RuntimeError):
    """The engine, the proxy or the sandbox could not do its part."""


@dataclass(frozen=True, slots=True)
class Capture:
    """What to run. Everything in it has been checked."""

    config: Config
    model_dir: Path
    task: Task
    backend: Backend | None
    """None: without a sandbox."""
    parity: bool


def settings(
    *, model: Path | None, command: Sequence[str], config: Path | None = None, task: Path | None = None,
    mounts: Sequence[str] = (), sandboxed: bool = True, parity: bool = True, overrides: Sequence[str] = (),
) -> Capture:
    """Checks everything. Raises `ConfigError`, naming field, value and remedy."""
    given: dict[str, Any] = {"harness": {}}
    if model is not None:
        given["policy"] = {"path": str(model), "warm_start": None}
    if command:
        given["harness"] |= {"kind": "command", "command": list(command)}
    if mounts:
        given["harness"]["mounts"] = dict(map(mount, mounts))
    made = Config.load(config, overrides, given)
    if made.policy.path is None:
        raise ConfigError("capture: no model was given. Name a model directory with --model DIR")
    if not command and config is None:
        raise ConfigError("capture: no command was given. Write it after --, as: lightning-ray capture --model DIR -- "
                          "mini -t '{task}'")
    if made.generator.tensor_parallel > 1:
        raise ConfigError(f"generator.tensor_parallel: {made.generator.tensor_parallel} is too many here, capture runs "
                          "one engine on one GPU. Set it to 1")
    check_policy(made.policy)
    model_dir = made.policy.path.expanduser().absolute()
    made = with_defaults(made, read_json("policy.path", model_dir / "config.json"))
    if sandboxed:
        check_harness(made.harness, in_image=made.sandbox.backend != "bubblewrap")
        chosen = _backend(made)
    else:
        _check_on_host(made)
        chosen = None
    work = files.load(task)[0] if task else one_line_bugs.generate(TasksConfig(train=1, heldout=0)).train[0]
    return Capture(made, model_dir, work, chosen, parity)


def mount(text: str) -> tuple[str, str]:
    """`HOST[:INSIDE]` as (host path, path inside)."""
    host, _, inside = text.partition(":")
    source = Path(host).expanduser().absolute()
    if not host or not source.exists():
        raise ConfigError(f"--mount: {host!r} does not exist. Give HOST[:INSIDE], a directory or file of this machine "
                          "and where the sandbox shows it")
    return str(source), inside or str(source)


def with_defaults(config: Config, model: dict[str, Any]) -> Config:
    """`config` with a context length that the model has and time enough, where neither was set. `model`: the content of
    its config.json."""
    policy, harness = config.policy, config.harness
    longest = longest_context(model)
    if "max_context" not in policy.model_fields_set and longest:
        policy = policy.model_copy(update={"max_context": min(int(longest), LONGEST_CONTEXT)})
    if "timeout_s" not in harness.model_fields_set:
        harness = harness.model_copy(update={"timeout_s": TIMEOUT_S})
    return config.model_copy(update={"policy": policy, "harness": harness})


def _backend(config: Config) -> Backend:
    name, remedy = config.sandbox.backend, "To run the harness with your own rights instead, say --no-sandbox"
    try:
        chosen = backend.choose(config.sandbox)
    except SandboxUnavailable as error:
        raise ConfigError(f"sandbox.backend: {name!r} cannot isolate here. {error}. {remedy}") from None
    if chosen.report["backend"] == "none" and config.harness.kind == "command":
        raise ConfigError("sandbox.allow_unsafe: this machine gives no namespace for a command harness to find its "
                          f"endpoint in. {remedy}")
    return chosen


def _check_on_host(config: Config) -> None:
    harness = config.harness
    if harness.kind != "command":
        raise ConfigError("--no-sandbox: a Python harness executes its commands in a sandbox. Leave --no-sandbox out")
    for name in ("files", "mounts"):
        if getattr(harness, name):
            raise ConfigError(f"harness.{name}: {getattr(harness, name)} is for the sandbox. Leave it out, or leave "
                              "--no-sandbox out")
    program = harness.command[0] if harness.command else ""
    path = harness.env.get("PATH", os.environ.get("PATH"))
    if not program or shutil.which(program, path=path) is None:
        raise ConfigError(f"harness.command: there is no program {program!r} on this machine's PATH. Install it, or "
                          "give its full path")


def capture(what: Capture) -> Report:
    """Starts the parts, runs the harness, stops them, compares log-probs. Raises `CaptureFailed`."""
    config, scratch = what.config, Scratch()
    session = RaySession.start(config)
    actors: list[ray.actor.ActorHandle] = []
    try:
        proxy = ProxyActor(_start(what, scratch, actors))
        trajectory = asyncio.run(run_harness(what, scratch.path, proxy))
    except RayError as error:
        raise CaptureFailed(_cause(error)) from error
    finally:
        for actor in reversed(actors):  # the proxy first: it asks the engine
            end([actor], STOP_TIMEOUT_S)
        session.stop()
        scratch.remove()
        if what.backend is not None:
            what.backend.close()
    return summary(what, trajectory, _parity(what, trajectory) if what.parity else None)


def summary(what: Capture, trajectory: Trajectory, parity: Parity | None) -> Report:
    config = what.config
    return report(trajectory.calls, ending(what, trajectory), max_context=config.policy.max_context,
                  train=config.capture.train, parity=parity, tool_parser=config.policy.tool_parser)


def ending(what: Capture, trajectory: Trajectory) -> Ending:
    facts = what.backend.report if what.backend else {"backend": "none", "unsafe": ["--no-sandbox was given"]}
    notes = trajectory.notes
    graded = trajectory.end == "graded" and what.backend is not None
    return Ending(
        end=trajectory.end, reason=trajectory.reason, reward=trajectory.reward if graded else None,
        exit_status=notes.get("exit_status", ""), log=notes.get("harness_log", ""),
        seconds=trajectory.timings.get("run", 0.0), sandbox=facts["backend"],
        unsafe="; ".join(facts.get("unsafe", [])),
    )


def _start(what: Capture, scratch: Scratch, actors: list) -> ray.actor.ActorHandle:
    """The proxy, with an engine behind it. Both import vLLM, at the same time."""
    from lightning_ray.generator.worker import GeneratorWorker
    from lightning_ray.proxy.actor import Proxy

    config, model = what.config, str(what.model_dir)
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    generator = GeneratorWorker.options(num_cpus=0, num_gpus=gpus).remote(
        model, config.generator, config.policy, config.run.seed)
    proxy = Proxy.options(max_restarts=0).remote(
        config.proxy, config.policy, model, [generator], str(scratch.path / "journal"))
    actors += [generator, proxy]
    ray.get([generator.ready.remote(), proxy.start.remote()])
    return proxy


def _cause(error: RayError) -> str:
    """What a part of ours said, without Ray's account of where."""
    cause = getattr(error, "cause", None)
    return f"{type(cause).__name__}: {cause}" if cause is not None else str(error)


async def run_harness(what: Capture, directory: Path, client: ProxyClient) -> Trajectory:
    """One rollout through `client`. Workspaces and the files of worker processes go below `directory`."""
    config = what.config
    workspaces = Workspaces(directory / "workspaces", what.backend and what.backend.checkout)
    name = f"capture-{secrets.token_hex(4)}"
    if what.backend is None:
        return await _on_host(what, client, workspaces.prepare(what.task), name)
    once = config.model_copy(update={"runners": config.runners.model_copy(update={"infra_retries": 0})})
    pool = None
    if config.harness.kind == "python":
        pool = WorkerPool(config.harness.entry, 1, directory)
        await pool.start()
    rollouts = Rollouts(once, client, workspaces, what.backend.make, pool, what.backend.report)
    spec = RolloutSpec(name, name, what.task, "train", config.run.seed, config.sampling.temperature)
    try:
        return await rollouts.run(spec)
    finally:
        await rollouts.stop()
        if pool is not None:
            await pool.stop()


async def _on_host(what: Capture, client: ProxyClient, workspace: Path, name: str) -> Trajectory:
    """The command with this user's rights and environment, in a copy of the workspace. Nothing is graded."""
    config = what.config
    harness = config.harness
    directory = workspace.parent.parent.parent / name
    await asyncio.to_thread(shutil.copytree, workspace, directory, symlinks=True)
    endpoint = await client.open(OpenRollout(name, "train", config.sampling, config.run.seed, harness.max_calls,
                                             harness.max_tokens))
    plan = command_plan(harness, what.task.problem_statement, config.policy.name, endpoint.base_url)
    log = directory.with_suffix(".log")
    started = time.monotonic()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *plan.argv, cwd=directory, env={**os.environ, **plan.env}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True)
    try:
        status = f"exit code {await asyncio.wait_for(process.wait(), harness.timeout_s)}"
    except TimeoutError:
        status = f"Timeout after {harness.timeout_s:g} s"
    finally:
        seconds = time.monotonic() - started
        await _end(process)
        calls = await client.finish(name)
    good = status == "exit code 0"
    return Trajectory(
        name, name, what.task.instance_id, calls, end="graded" if good else "harness_failed",
        reason="not graded without a sandbox" if good else status, timings={"run": seconds},
        notes={"exit_status": status, "harness_log": log.read_text(errors="replace")[-LOG_CHARS:]})


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of the command and its children (they share a session)."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        await asyncio.wait_for(process.wait(), END_S)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _parity(what: Capture, trajectory: Trajectory) -> Parity | None:
    """None where no token is trainable."""
    config = what.config
    selected = replace(trajectory, calls=select(trajectory.calls, config.capture.train))
    samples, _, _ = rollout_samples(selected, advantage=1.0, rollout=0, max_tokens=config.policy.max_context)
    if not samples:
        return None
    from lightning_ray.learner.model import UnsupportedModel
    from lightning_ray.learner.parity import gaps

    try:
        found = gaps(what.model_dir, samples, config.learner, config.sampling.temperature)
    except UnsupportedModel as error:
        raise CaptureFailed(f"the learner cannot train this model ({error}). For the rest, say --no-parity") from error
    return Parity(len(found), float(found.mean()), float(found.max()), config.sampling.temperature)
