"""What a task is, and what a source of tasks gives.

A `Task` follows SWE-smith's instance schema (`instance_id, repo, problem_statement, patch, FAIL_TO_PASS,
PASS_TO_PASS, image_name`; `patch` is the *bug*, the solution is its reverse) and adds where the workspace comes
from and how it is graded. What the agent may see is `problem_statement` and the workspace, nothing else.
"""

from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field


class Task(BaseModel):
    """One item of a data set."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    instance_id: str = Field(min_length=1)
    repo: str = ""
    problem_statement: str = Field(min_length=1)
    patch: str = ""
    """The bug, as a patch: the solution is its reverse."""
    FAIL_TO_PASS: list[str] = []
    PASS_TO_PASS: list[str] = []
    image_name: str = ""
    """Container image, for the container and kubernetes sandboxes; a checkout in it lies at `base.WORKSPACE`."""
    files: dict[str, str] = {}
    """The workspace's files by relative path, for tasks that carry their own checkout (small ones)."""
    directory: str = ""
    """A prepared checkout on disk, for tasks that do not carry theirs. Without `files` and `directory`, sandboxes
    with images take the checkout in the task's image and put the bug (`patch`) into it."""
    grader: Literal["cases", "swe", "command", "function"] = "cases"
    """`cases`: function calls whose results are compared outside; `swe`: FAIL_TO_PASS and PASS_TO_PASS by a test
    runner; `command`: exit status; `function`: a Python function of the user's."""
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """How often it is handed out in training, relative to the others; 0: never."""
    grading: dict[str, Any] = {}
    """What the grader needs and the agent must never see: cases, test files, commands."""


class Grade(BaseModel):
    """The verdict on one patch, reached where the agent never was."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    passed: bool
    reward: float
    reason: str
    """`passed`, or why not: `empty_patch`, `patch_rejected`, `tests_failed: ...`, `timeout`, ..."""
    suspicions: list[str] = []
    report: dict[str, Any] = {}


class TaskSplits(BaseModel):
    """Tasks to train on and tasks held out. They share no instance."""

    train: list[Task]
    heldout: list[Task]


class Workspaces(Protocol):
    """Prepared checkouts by task, made once and shared read-only by all rollouts of the task."""

    def prepare(self, task: Task) -> Path:
        """A directory with a git checkout of exactly one commit: no history, no remotes, neutral dates."""
