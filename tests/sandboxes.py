"""What tests with real sandboxes share: workspaces, and sandboxes that are surely stopped."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lightning_ray.config import RewardConfig
from lightning_ray.sandbox import base
from lightning_ray.sandbox.base import Limits, Mount, Sandbox, SandboxSpec
from lightning_ray.sandbox.bubblewrap import Bubblewrap
from lightning_ray.tasks.base import Grade, Task
from lightning_ray.tasks.grading import grader_for
from lightning_ray.tasks.workspaces import Workspaces

EVERY_WORKSPACE = pytest.mark.parametrize("running", ["bubblewrap", "overlay", "container"], indirect=True)
"""For tests of what is done to a workspace."""
FILES = {"shop.py": "def total(a, b):\n    return a - b\n", "README.md": "A shop.\n", "tools/run.sh": "echo run\n"}
RIGHT = {"shop.py": "def total(a, b):\n    return a + b\n"}


def make_task(files: dict[str, str] = FILES, **more) -> Task:
    """Both cases call `total`; `a - b` passes the second only."""
    cases = {
        "tests::adds": {"call": "total", "args": [3, 5], "expected": 8},
        "tests::zero": {"call": "total", "args": [3, 0], "expected": 3},
    }
    fields = {
        "instance_id": "shop-1", "problem_statement": "total is wrong", "files": files,
        "FAIL_TO_PASS": ["tests::adds"], "PASS_TO_PASS": ["tests::zero"],
        "grading": {"module": "shop.py", "cases": cases},
    }  # fmt: skip
    return Task(**{**fields, **more})


@asynccontextmanager
async def running(workspace: Path, *, limits: Limits | None = None, mounts: tuple[Mount, ...] = (),
                  env: dict[str, str] | None = None,
                  make: Callable[[SandboxSpec], Sandbox] = Bubblewrap) -> AsyncIterator[Sandbox]:
    async with base.running(make(SandboxSpec("test", workspace, limits or Limits(), mounts, env or {}))) as sandbox:
        yield sandbox


async def agent_patch(task: Task, root: Path, script: str) -> str:
    """The patch of an agent that runs one script."""
    async with running(Workspaces(root).prepare(task)) as sandbox:
        await sandbox.exec(script, timeout_s=20)
        return await sandbox.diff()


async def graded(task: Task, root: Path, patch: str, config: RewardConfig | None = None,
                 make: Callable[[SandboxSpec], Sandbox] = Bubblewrap) -> Grade:
    """The grade of a patch, in a sandbox of its own."""
    grader = grader_for(task, config or RewardConfig(timeout_s=60))
    async with running(Workspaces(root).prepare(task), mounts=grader.mounts, make=make) as sandbox:
        return await grader.grade(task, patch, sandbox)


async def graded_files(files: dict[str, str], root: Path, make: Callable[[SandboxSpec], Sandbox] = Bubblewrap,
                       **task) -> Grade:
    """The grade of an agent that leaves these files."""
    made = make_task(**task)
    async with running(Workspaces(root).prepare(made), make=make) as sandbox:
        await sandbox.put({name: text.encode() for name, text in files.items()})
        patch = await sandbox.diff()
    return await graded(made, root, patch, make=make)
