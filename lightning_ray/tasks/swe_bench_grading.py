"""Predictions for SWE-bench judged: here, in our sandboxes, or by swebench's own harness in containers.

Both give an `Outcome` for each prediction, with the same words, and are compared by a test. `resolved` and `unresolved`
are verdicts on a patch; `empty_patch`, `patch_rejected` and `timeout` count as unresolved in SWE-bench's rate and are
told apart here; `error` is a failure of the environment and no verdict. Both rest on swebench's `get_eval_report`.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_ray.config import ConfigError, RewardConfig
from lightning_ray.sandbox.base import Limits, Sandbox, SandboxError, SandboxSpec, running
from lightning_ray.tasks.base import Grade, Task
from lightning_ray.tasks.eval_script import ENVIRONMENT_FAILED
from lightning_ray.tasks.grading import grader_for
from lightning_ray.tasks.workspaces import Workspaces
from lightning_ray.trajectory.call import Trajectory

Verdict = Literal["resolved", "unresolved", "empty_patch", "patch_rejected", "timeout", "error"]
VERDICTS: tuple[Verdict, ...] = ("resolved", "unresolved", "empty_patch", "patch_rejected", "timeout", "error")
HARNESS = "import sys; from swebench.cli.cli import main; sys.argv[0] = 'swebench'; main()"
LOGS = Path("logs/run_evaluation")
"""Where the harness writes, below the directory that it is started in."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one prediction."""

    verdict: Verdict
    reason: str
    seconds: float = 0.0


def verdict_of(reason: str) -> Verdict:
    """A grader's reason (`tasks/eval_script.py`) in SWE-bench's words."""
    kind = reason.partition(":")[0]
    if kind == "passed":
        return "resolved"
    if kind == ENVIRONMENT_FAILED:
        return "error"
    return kind if kind in ("empty_patch", "patch_rejected", "timeout") else "unresolved"


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """Of one rollout in an evaluation's `results.json`, whose patch was judged here. One that left none because its
    harness failed is unresolved."""
    if record["end"] == "infra_failed":
        return Outcome("error", record["reason"])
    verdict = verdict_of(record["reason"]) if record["end"] == "graded" else "unresolved"
    return Outcome(verdict, record["reason"], record["seconds"])


async def judge_here(tasks: Sequence[Task], predictions: Mapping[str, Mapping[str, str]], *,
                     make: Callable[[SandboxSpec], Sandbox], workspaces: Workspaces, limits: Limits, timeout_s: float,
                     at_once: int = 2) -> dict[str, Outcome]:
    """Outcomes by instance id, of the tasks that have a prediction. Each is judged in a sandbox of its own."""
    config = RewardConfig(timeout_s=timeout_s, on_suspicion="flag")
    places = asyncio.Semaphore(at_once)

    async def grade(task: Task, patch: str) -> Grade:
        grader = grader_for(task, config)
        workspace = await asyncio.to_thread(workspaces.prepare, task)
        spec = SandboxSpec(f"judge.{task.instance_id}", workspace, limits, grader.mounts, image=task.image_name)
        async with running(make(spec)) as sandbox:
            return await grader.grade(task, patch, sandbox)

    async def judge(task: Task) -> Outcome:
        async with places:
            started = time.monotonic()
            try:
                reason = (await grade(task, predictions[task.instance_id]["model_patch"])).reason
            except (SandboxError, ValueError) as error:  # no sandbox, or no checkout
                reason = f"{ENVIRONMENT_FAILED}: {error}"
            return Outcome(verdict_of(reason), reason, time.monotonic() - started)

    chosen = [task for task in tasks if task.instance_id in predictions]
    return dict(zip([task.instance_id for task in chosen], await asyncio.gather(*map(judge, chosen)), strict=True))


def judge_by_harness(data: Path, predictions: Path, instances: Sequence[str], *, out: Path, run_id: str,
                     timeout_s: float, workers: int) -> dict[str, Outcome]:
    """Runs `swebench eval` on the predictions of these instances, in the directory `out`, and reads what it wrote.
    The daemon is the one that DOCKER_HOST names. Raises `ConfigError` with the last words where it ends badly or could
    judge none."""
    words = [sys.executable, "-c", HARNESS, "eval", str(data.absolute()), "-p", str(predictions.absolute()), "--run-id",
             run_id, "-j", str(workers), "-t", str(int(timeout_s)), "--report-dir", "."]
    for name in instances:
        words += ["-i", name]
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(words, cwd=out, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    (out / f"{run_id}.log").write_text(done.stdout)
    if done.returncode:
        raise ConfigError(f"swebench eval ended with status {done.returncode}: {' '.join(done.stdout.split())[-500:]}. "
                          "Does DOCKER_HOST name a running daemon, and does it have the instances' images?")
    outcomes = {prediction["instance_id"]: read_log(prediction, out / LOGS / run_id)
                for prediction in map(json.loads, predictions.read_text().splitlines())
                if prediction["instance_id"] in instances}
    ran = [outcome for outcome in outcomes.values() if outcome.verdict != "empty_patch"]
    if ran and all(outcome.verdict == "error" for outcome in ran):
        raise ConfigError(f"swebench eval could judge none of {len(ran)} patches, the first for {ran[0].reason}. "
                          "Can the daemon run the instances' images, with a network?")
    return outcomes


def read_log(prediction: Mapping[str, str], logs: Path) -> Outcome:
    """What swebench's harness wrote about one prediction. `logs` is the directory of its run."""
    from swebench.harness.constants import APPLY_PATCH_FAIL, LOG_INSTANCE, LOG_REPORT, LOG_TEST_OUTPUT

    if not prediction["model_patch"]:
        return Outcome("empty_patch", "empty_patch")
    name = prediction["instance_id"]
    place = logs / prediction["model_name_or_path"].replace("/", "__") / name
    said = {file: (place / file).read_text(errors="replace") if (place / file).is_file() else ""
            for file in (LOG_REPORT, LOG_INSTANCE, LOG_TEST_OUTPUT)}
    if said[LOG_REPORT]:
        report = json.loads(said[LOG_REPORT])[name]
        if report.get("infra_failure"):
            return Outcome("error", f"{ENVIRONMENT_FAILED}: {report['infra_failure_reason']}")
        return Outcome("resolved", "passed") if report["resolved"] else Outcome("unresolved", "tests_failed")
    if APPLY_PATCH_FAIL in said[LOG_INSTANCE]:
        return Outcome("patch_rejected", "patch_rejected")
    if "Timeout error:" in said[LOG_TEST_OUTPUT]:
        return Outcome("timeout", "timeout")
    return Outcome("error", f"{ENVIRONMENT_FAILED}: {' '.join(said[LOG_INSTANCE].split())[-300:] or 'no log'}")


def as_rollout(instance_id: str, outcome: Outcome, sample: int, patch: str) -> Trajectory:
    """An outcome as the record of a rollout whose calls are not known, for `evaluation.scores`."""
    return Trajectory(
        f"{instance_id}-s{sample}", "predictions", instance_id, [],
        "infra_failed" if outcome.verdict == "error" else "graded", reason=outcome.reason,
        passed=outcome.verdict == "resolved", patch=patch, timings={"grade": outcome.seconds})


def counted(outcomes: Sequence[Mapping[str, Outcome]], instances: int) -> dict[str, object]:
    """Verdicts by kind, and SWE-bench's own rate: of all instances of the file, those resolved in the first sample."""
    kinds = [outcome.verdict for sample in outcomes for outcome in sample.values()]
    resolved = sum(outcome.verdict == "resolved" for outcome in outcomes[0].values())
    return {"verdicts": {kind: kinds.count(kind) for kind in VERDICTS},
            "swe_bench": {"resolved": resolved, "instances": instances, "rate": resolved / instances}}
