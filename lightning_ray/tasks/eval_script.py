"""The `swe` grader the SWE-bench way: an `eval_script` runs in the task's own container image, and swebench's log
parsers read what it printed.

`task.grading` is `{"eval_script", "log_parser", "eval_type": "pass_and_fail" or "fail_only", "version"}`, all text, and
`"whole_patch": true` where the agent's patch is let in whole, in SWE-bench's own ways of applying one. The script
brings the test files and their names, so it enters only now, through stdin. The verdict rests on text that the
candidate's process can print, as in SWE-bench itself: it is comparable with published figures, and weaker than the
other graders.
"""

import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lightning_ray.config import RewardConfig
from lightning_ray.sandbox.base import Sandbox
from lightning_ray.tasks.base import Grade, Task
from lightning_ray.tasks.patches import Filtered
from lightning_ray.tasks.verdicts import APPLY_TIMEOUT_S, Grader, grading_data, named

SHOWN = 1000
ENVIRONMENT_FAILED = "environment_failed"
PATCH = "/tmp/patch.diff"


class EvalScriptGrading(BaseModel):
    """`task.grading` of this grader."""

    model_config = ConfigDict(extra="forbid")

    eval_script: str = Field(min_length=1)
    log_parser: str
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    version: str = ""
    whole_patch: bool = False
    """As SWE-bench does it, for figures that are compared with published ones: what a patch may not touch in training
    is let in as well, and only counted as suspicious."""


class EvalScriptGrader(Grader):
    """See the module."""

    def __init__(self, task: Task, config: RewardConfig) -> None:
        from swebench.harness.log_parsers import PARSER_REGISTRY  # half a second: only where it is used
        from swebench.harness.utils import make_test_spec

        grading = grading_data(EvalScriptGrading, task)
        if grading.log_parser not in PARSER_REGISTRY:
            raise ValueError(f"task {task.instance_id}: grading.log_parser: swebench has no {grading.log_parser!r}")
        if not task.FAIL_TO_PASS:
            raise ValueError(f"task {task.instance_id}: FAIL_TO_PASS names no test")
        self._whole_patch = grading.whole_patch
        super().__init__(config.model_copy(update={"on_suspicion": "flag"}) if self._whole_patch else config)
        self._spec = make_test_spec({
            **grading.model_dump(exclude={"whole_patch"}),
            "instance_id": task.instance_id, "image": task.image_name, "repo": task.repo,
            "FAIL_TO_PASS": task.FAIL_TO_PASS, "PASS_TO_PASS": task.PASS_TO_PASS,
        })  # fmt: skip

    async def _let_in(self, patch: str, filtered: Filtered, sandbox: Sandbox) -> str | None:
        return await (let_in_whole(patch, sandbox) if self._whole_patch
                      else super()._let_in(patch, filtered, sandbox))

    async def _judge(self, task: Task, patch: str, filtered: Filtered, sandbox: Sandbox) -> Grade:
        script = self._spec.eval_script.encode()
        done = await sandbox.exec("exec bash -s", timeout_s=self._config.timeout_s, stdin=script)
        if done.timed_out:
            return self._finish("timeout", filtered, {"output": done.output[-SHOWN:]})
        if done.truncated:
            return self._finish("too_much_output", filtered, {"output": done.output[:SHOWN]})
        reason, report = self._verdict(task, patch if self._whole_patch else filtered.patch, done.output)
        return self._finish(reason, filtered, report)

    def _verdict(self, task: Task, patch: str, log: str) -> tuple[str, dict[str, Any]]:
        from swebench.harness.grading import get_eval_report

        prediction = {"instance_id": task.instance_id, "model_name_or_path": "policy", "model_patch": patch}
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "log"
            path.write_text(log)
            found = get_eval_report(self._spec, prediction, str(path), include_tests_status=True)[task.instance_id]
        if found.get("infra_failure"):
            return f"{ENVIRONMENT_FAILED}: {found['infra_failure_reason']}", {"output": log[-SHOWN:]}
        status = found.get("tests_status")
        if status is None:
            return "no_test_results", {"output": log[-SHOWN:]}
        failed = [name for kind in status.values() for name in kind["failure"]]
        report = {"tests": {name: "passed" for kind in status.values() for name in kind["success"]}
                  | dict.fromkeys(failed, "failed")}  # fmt: skip
        if found["resolved"]:
            return "passed", report
        return named("tests_failed", failed), report


async def let_in_whole(patch: str, sandbox: Sandbox) -> str | None:
    """Applies the whole patch by the first of SWE-bench's commands that takes it. The reason, where that alone decides:
    `empty_patch`, or `patch_rejected: ` with the last words."""
    from swebench.harness.run_evaluation import GIT_APPLY_CMDS

    if not patch:
        return "empty_patch"
    written = await sandbox.exec(f"cat > {PATCH}", timeout_s=APPLY_TIMEOUT_S,
                                 stdin=patch.encode("utf-8", "surrogateescape"))
    if written.returncode:
        return f"{ENVIRONMENT_FAILED}: the patch cannot be written: {written.output[-200:]}"
    clean = "git checkout -- . ; git clean -fdq"
    first, *others = (f"{command} {PATCH}" for command in GIT_APPLY_CMDS)
    tried = " || ".join([first, *(f"{{ {clean}; {command}; }}" for command in others),
                         f"git apply --check --reverse {PATCH}"])
    done = await sandbox.exec(tried, timeout_s=APPLY_TIMEOUT_S)
    return None if done.returncode == 0 else f"patch_rejected: {' '.join(done.output.split())[-300:]}"
