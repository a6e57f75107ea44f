"""The `command` grader: the exit status of a command over the pristine checkout with the agent's filtered patch.

`task.grading` is `{"command": "make check", "files": {path: text}, "env": {name: value}}`; `files` enter only now, over
whatever is there. Status 0 is a pass. What the command runs of the candidate's code can end it with status 0: a
command that proves more than its exit status is the task's to give.
"""

from pydantic import BaseModel, ConfigDict, Field

from lightning_ray.config import RewardConfig
from lightning_ray.sandbox.base import Sandbox
from lightning_ray.tasks.base import Grade, Task
from lightning_ray.tasks.patches import Filtered
from lightning_ray.tasks.verdicts import Grader, grading_data

SHOWN = 1000
"""Characters of the command's output that the report keeps."""


class CommandGrading(BaseModel):
    """`task.grading` of the `command` grader."""

    model_config = ConfigDict(extra="forbid")

    command: str = Field(min_length=1)
    files: dict[str, str] = {}
    env: dict[str, str] = {}


class CommandGrader(Grader):
    """See the module."""

    def __init__(self, task: Task, config: RewardConfig) -> None:
        super().__init__(config)
        self._grading = grading_data(CommandGrading, task)
        self.files = self._grading.files

    async def _judge(self, task: Task, patch: str, filtered: Filtered, sandbox: Sandbox) -> Grade:
        done = await sandbox.exec(self._grading.command, timeout_s=self._config.timeout_s, env=self._grading.env)
        report = {"returncode": done.returncode, "output": done.output[-SHOWN:]}
        reason = "timeout" if done.timed_out else f"exit_status: {done.returncode}" if done.returncode else "passed"
        return self._finish(reason, filtered, report)
