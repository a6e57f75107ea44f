"""The `function` grader: a Python function of the user's, called outside the sandbox.

`task.grading` is `{"function": "module:function", ...}`; what else it holds is the function's own business. It is
called as `function(task, patch, run)` and gives a reward (a number; 1 or more counts as passed) or a whole `Grade`.
`patch` is the agent's filtered patch, already applied in a fresh sandbox; `run(command, stdin=b"", timeout_s=None)`
runs a command there and returns an `ExecResult`. An `async def` awaits `run`; a plain function is called in a thread
and calls it.
An error in the function is the grader's: the grading is repeated, and no reward of 0 comes of it.
"""

import asyncio
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from lightning_ray.config import RewardConfig
from lightning_ray.sandbox.base import ExecResult, Sandbox
from lightning_ray.tasks.base import Grade, Task
from lightning_ray.tasks.patches import Filtered
from lightning_ray.tasks.verdicts import Grader, finish


class FunctionGrader(Grader):
    """See the module."""

    def __init__(self, task: Task, config: RewardConfig) -> None:
        super().__init__(config)
        self._function = load(task)

    async def _judge(self, task: Task, patch: str, filtered: Filtered, sandbox: Sandbox) -> Grade:
        async def run(command: str, stdin: bytes = b"", timeout_s: float | None = None) -> ExecResult:
            return await sandbox.exec(command, timeout_s=timeout_s or self._config.timeout_s, stdin=stdin)

        if inspect.iscoroutinefunction(self._function):
            answer = await self._function(task, filtered.patch, run)
        else:
            loop = asyncio.get_running_loop()

            def wait(*arguments: Any, **more: Any) -> ExecResult:
                return asyncio.run_coroutine_threadsafe(run(*arguments, **more), loop).result()

            answer = await asyncio.to_thread(self._function, task, filtered.patch, wait)
        return graded(answer, filtered, self._config)


def load(task: Task) -> Callable[..., Any]:
    """The function that the task names. ValueError, naming the task, where there is none."""
    name = task.grading.get("function")
    module, _, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not module or not attribute:
        raise ValueError(f"task {task.instance_id}: grading.function must be `module:function`, not {name!r}")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task {task.instance_id}: grading.function {name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"task {task.instance_id}: grading.function {name!r} is no function")
    return function


def graded(answer: Any, filtered: Filtered, config: RewardConfig) -> Grade:
    """A function's answer as a grade. TypeError where it is neither a number nor a `Grade`."""
    if isinstance(answer, bool) or not isinstance(answer, (int, float, Grade)):
        raise TypeError(f"a grading function must return a number or a Grade, not {answer!r}")
    if not isinstance(answer, Grade):
        passed, reward = answer >= 1.0, float(answer)
        answer = Grade(passed=passed, reward=reward, reason="passed" if passed else f"reward: {reward:g}")
    grade = finish("passed" if answer.passed else answer.reason, filtered, answer.report, config, answer.suspicions)
    if grade.suspicions and config.on_suspicion == "zero":
        return grade
    return grade.model_copy(update={"reward": answer.reward, "reason": answer.reason})
