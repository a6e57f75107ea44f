"""The `command` grader: the exit status of a command over the pristine checkout with the agent's filtered patch.

`task.grading` is `{"command": "make check", "files": {path: text}, "env": {name: value}}`; `files` enter only now, over
whatever is there. Status 0 is a pass. What the command runs of the candidate's code can end it with status 0: a
command that proves more than its exit status is the task's to give.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lightning_ray.config import RewardConfig
from lightning_ray.sandbox.base import Mount, Sandbox
from lightning_ray.tasks import patches
from lightning_ray.tasks.base import Grade, Task
from lightning_ray.tasks.verdicts import finish, grading_data, let_in

SHOWN = 1000
"""Characters of the command's output that the report keeps."""


class CommandGrading(BaseModel):
    """`task.grading` of the `command` grader."""

    model_config = ConfigDict(extra="forbid")

    command: str = Field(min_length=1)
    files: dict[str, str] = {}
    env: dict[str, str] = {}


class CommandGrader:
    """See the module."""

    mounts: tuple[Mount, ...] = ()

    def __init__(self, task: Task, config: RewardConfig) -> None:
        self._config = config
        self._grading = grading_data(CommandGrading, task)

    async def grade(self, task: Task, patch: str, sandbox: Sandbox) -> Grade:
        filtered = patches.filter_patch(patch, patches.touched(task.patch), set(self._grading.files))

        def grade(reason: str, report: dict[str, Any]) -> Grade:
            return finish(reason, filtered.suspicions, filtered, report, self._config)

        decided = await let_in(patch, filtered, sandbox)
        if decided is not None:
            return grade(decided, {})
        if self._grading.files:
            await sandbox.put({name: text.encode() for name, text in self._grading.files.items()})
        done = await sandbox.exec(self._grading.command, timeout_s=self._config.timeout_s, env=self._grading.env)
        report = {"returncode": done.returncode, "output": done.output[-SHOWN:]}
        if done.timed_out:
            return grade("timeout", report)
        return grade("passed" if done.returncode == 0 else f"exit_status: {done.returncode}", report)
