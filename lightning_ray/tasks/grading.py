"""Rewards, reached where the agent never was: which grader judges a task.

A grader gets a fresh sandbox over the pristine workspace, lets the agent's filtered patch in (`patches.py`), and
decides outside: `cases` (function calls, compared outside the candidate's process), `swe` (FAIL_TO_PASS and
PASS_TO_PASS by pytest, or by an `eval_script` and swebench's log parsers), `command` (an exit status) and `function`
(the user's own).
"""

from lightning_ray.config import RewardConfig
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.cases import CasesGrader
from lightning_ray.tasks.command_grader import CommandGrader
from lightning_ray.tasks.eval_script import EvalScriptGrader
from lightning_ray.tasks.function_grader import FunctionGrader
from lightning_ray.tasks.swe import SweGrader
from lightning_ray.tasks.verdicts import Grader


def grader_for(task: Task, config: RewardConfig) -> Grader:
    """The grader that the task asks for. ValueError, naming the task, where its grading data does not fit."""
    if task.grader == "cases":
        return CasesGrader(task, config)
    if task.grader == "swe":
        return (EvalScriptGrader if "eval_script" in task.grading else SweGrader)(task, config)
    if task.grader == "command":
        return CommandGrader(task, config)
    return FunctionGrader(task, config)
