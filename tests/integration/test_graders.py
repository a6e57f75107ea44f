"""The `command`, `function` and eval-script graders in real sandboxes."""

import pytest

from lightning_ray.config import RewardConfig
from lightning_ray.tasks.base import Grade, Task
from tests.sandboxes import FILES, agent_patch, graded

FIX = "sed -i 's/a - b/a + b/' shop.py"
SPOIL = "echo '# nothing' >> shop.py"
CHECK = "from shop import total\nassert total(3, 5) == 8\n"


def task(**more) -> Task:
    return Task(instance_id="shop-1", problem_statement="total is wrong", files=FILES, **more)


async def grade(made: Task, root, script: str, **reward) -> Grade:
    return await graded(made, root, await agent_patch(made, root, script), RewardConfig(timeout_s=20, **reward))


@pytest.mark.parametrize(
    ("script", "passed", "reason"),
    [(FIX, True, "passed"), (SPOIL, False, "exit_status: 1"), ("true", False, "empty_patch")],
)
async def test_command(tmp_path, script, passed, reason):
    made = task(grader="command", grading={"command": "python3 check.py", "files": {"check.py": CHECK}})
    found = await grade(made, tmp_path, script)
    assert (found.passed, found.reward, found.reason) == (passed, float(passed), reason)


async def test_a_command_that_takes_too_long_is_a_timeout(tmp_path):
    made = task(grader="command", grading={"command": "sleep 60"})
    patch = await agent_patch(made, tmp_path, FIX)
    assert (await graded(made, tmp_path, patch, RewardConfig(timeout_s=0.5))).reason == "timeout"


async def slowly(task, patch, run):
    done = await run("python3 -c 'from shop import total; print(total(3, 5))'")
    return 1.0 if done.output == "8\n" else 0.25


def plainly(task, patch, run):
    return Grade(passed="+    return a + b" in patch, reward=0.5, reason=run("cat", stdin=b"hm").output)


async def test_function(tmp_path):
    made = task(grader="function", grading={"function": "tests.integration.test_graders:slowly"})
    assert (await grade(made, tmp_path, FIX)).reward == 1.0
    assert (await grade(made, tmp_path, SPOIL)).reward == 0.25
    made = task(grader="function", grading={"function": "tests.integration.test_graders:plainly"})
    found = await grade(made, tmp_path, FIX)
    assert (found.passed, found.reward, found.reason) == (True, 0.5, "hm")


EVAL = """#!/bin/bash
set -uxo pipefail
cd /testbed
cat > test_shop.py <<'END'
from shop import total
def test_adds():
    assert total(3, 5) == 8
END
: '>>>>> Start Test Output'
python3 -c 'import test_shop; test_shop.test_adds()' && echo 'PASSED test_shop.py::test_adds' || echo 'FAILED test_shop.py::test_adds - x'
: '>>>>> End Test Output'
"""  # noqa: E501


@pytest.mark.parametrize(("script", "reason"), [(FIX, "passed"), (SPOIL, "tests_failed: test_shop.py::test_adds")])
async def test_eval_script_with_swebenchs_parser(tmp_path, script, reason):
    made = task(grader="swe", FAIL_TO_PASS=["test_shop.py::test_adds"],
                grading={"eval_script": EVAL, "log_parser": "parse_log_pytest"})  # fmt: skip
    assert (await grade(made, tmp_path, script)).reason == reason
