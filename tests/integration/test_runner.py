"""Rollouts from workspace to grade: real sandboxes, grader and worker processes; the model's words are scripted."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
import pytest_asyncio

from lightning_ray.config import Config, ConfigError
from lightning_ray.harness import pool as pools
from lightning_ray.harness.checks import check_harness
from lightning_ray.harness.pool import WorkerDied, WorkerPool
from lightning_ray.harness.rollouts import Rollouts
from lightning_ray.harness.spec import RolloutSpec
from lightning_ray.proxy.endpoint import Endpoint
from lightning_ray.sandbox import backend
from lightning_ray.sandbox.base import ExecResult, SandboxError
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.workspaces import Workspaces
from tests.integration.scripted_proxy import TOKENS, Answer, ScriptedProxy

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FIX = "run: sed -i 's/a - b/a + b/' sums.py"
TASK = Task(
    instance_id="sums", problem_statement="add must add", files={"sums.py": "def add(a, b):\n    return a - b\n"},
    FAIL_TO_PASS=["adds"], PASS_TO_PASS=["zero"], grading={"module": "sums.py", "cases": {
        "adds": {"call": "add", "args": [2, 3], "expected": 5},
        "zero": {"call": "add", "args": [2, 0], "expected": 2}}})


class Bench:
    """A runner's parts, with every sandbox that was made."""

    def __init__(self, root: Path, pool: WorkerPool) -> None:
        self.root = root
        self.pool = pool
        self.proxy = ScriptedProxy(lambda rollout, number: Answer("hm"))
        self.backend = backend.choose(Config().sandbox)
        self.sandboxes = []
        self.spoil = lambda sandbox, number: None
        """Called with each new sandbox and how many were made before it."""

    def make(self, spec):
        sandbox = self.backend.make(spec)
        self.spoil(sandbox, len(self.sandboxes))
        self.sandboxes.append(sandbox)
        return sandbox

    def rollouts(self, *steps: str, timeout_s: float = 30, retries: int = 2, **settings) -> Rollouts:
        config = Config(harness={"entry": "tests.integration.harnesses:run", "timeout_s": timeout_s,
                                 "settings": {"steps": list(steps), **settings}},
                        runners={"infra_retries": retries})
        return Rollouts(config, self.proxy, Workspaces(self.root), self.make, self.pool, {"limits": "test"})

    def commands(self, program: str, **harness) -> Rollouts:
        """Rollouts whose harness is a Python program run inside the sandbox."""
        config = Config(harness={"kind": "command", "command": ["python3", "/tmp/agent/main.py", "{task}", "{model}"],
                                 "files": {"/tmp/agent/main.py": program}, "timeout_s": 20, **harness})
        check_harness(config.harness)
        return Rollouts(config, self.proxy, Workspaces(self.root), self.make, None, {"limits": "test"})

    async def run(self, *steps: str, task: Task = TASK, **more):
        return await self.rollouts(*steps, **more).run(spec("r0", task))

    def nothing_left(self) -> bool:
        return all(rollout.closed for rollout in self.proxy.rollouts.values()) and not any(map(alive, self.sandboxes))


def spec(name: str, task: Task = TASK) -> RolloutSpec:
    return RolloutSpec(name, "g0", task, "train", seed=0, temperature=1.0)


def alive(sandbox) -> bool:
    try:
        return bool(sandbox.pid)
    except SandboxError:
        return False


def process_lives(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists() and bool(Path(f"/proc/{pid}/cmdline").read_bytes())


async def until(condition, timeout_s: float = 10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory):
    pool = WorkerPool("tests.integration.harnesses:run", 2, tmp_path_factory.mktemp("workers"))
    await pool.start()
    yield pool
    await pool.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def bench(tmp_path, pool):
    bench = Bench(tmp_path, pool)
    await bench.proxy.start()
    yield bench
    await bench.proxy.stop()
    assert bench.nothing_left()


async def test_a_right_edit_is_graded_and_passes(bench):
    record = await bench.run("model", FIX, "model")
    assert (record.end, record.reason, record.reward, record.passed) == ("graded", "passed", 1.0, True)
    assert "+    return a + b" in record.patch
    assert len(record.calls) == 2 and record.discarded_tokens == 0
    assert record.timings.keys() == {"init", "run", "grade"}
    assert record.notes["attempts"] == 1 and record.notes["limits"] == "test"
    assert json.dumps(record.notes)


async def test_law7_grading_happens_in_another_sandbox_after_the_agents_is_dead(bench):
    agent_was_alive = []
    bench.spoil = lambda sandbox, number: agent_was_alive.append(any(map(alive, bench.sandboxes)))
    record = await bench.run(FIX)
    assert record.passed and agent_was_alive == [False, False]


async def test_a_wrong_edit_is_graded_and_fails(bench):
    record = await bench.run("run: sed -i 's/a - b/a * b/' sums.py")
    assert (record.end, record.passed, record.reward) == ("graded", False, 0.0)
    assert record.reason.startswith("tests_failed")


async def test_an_empty_patch_is_graded_without_a_sandbox(bench):
    record = await bench.run("run: touch nothing; rm nothing")
    assert (record.end, record.reason, record.reward) == ("graded", "empty_patch", 0.0)
    assert len(bench.sandboxes) == 1


@pytest.mark.parametrize(("step", "reason"), [
    ("raise", "RuntimeError: the harness broke"), ("exit", "SystemExit: leaving"),
    ("give up", "LimitsExceeded: too many steps"),
    ("return nothing", "ValueError: a Python harness returns a dict with exit_status and ok, not NoneType"),
])
async def test_law8_a_harness_that_ends_badly_is_data(bench, step, reason):
    record = await bench.run("model", FIX, step)
    assert (record.end, record.reason, record.reward) == ("harness_failed", reason, 0.0)
    assert len(record.calls) == 1 and record.notes["attempts"] == 1
    assert len(bench.sandboxes) == 1  # nothing to grade


async def test_law8_a_rollout_over_its_time_is_data_and_frees_its_thread(bench):
    bench.proxy.script = lambda rollout, number: Answer("late", delay_s=60 * number)
    started = time.monotonic()
    record = await bench.run("model", "model", timeout_s=1)
    assert (record.end, record.reason) == ("harness_failed", "Timeout: after 1 s")
    assert len(record.calls) == 1
    assert time.monotonic() - started < 5
    await until(lambda: not any(worker.load for worker in bench.pool._workers.values()))


async def test_law8_a_command_that_runs_over_the_rollouts_time_ends_with_it(bench):
    started = time.monotonic()
    record = await bench.run("run: sleep 60", timeout_s=0.5)
    assert record.reason == "Timeout: after 0.5 s"
    assert time.monotonic() - started < 5
    await until(lambda: not any(worker.load for worker in bench.pool._workers.values()))


async def test_law8_an_agent_that_kills_its_own_processes_goes_on(bench):
    record = await bench.run("run: kill -9 $$", "run: kill -9 -1", "run: sleep 60", FIX, timeout=1)
    assert (record.end, record.passed) == ("graded", True)
    seen = json.loads(record.notes["harness_log"])
    assert seen[0]["returncode"] == 137
    assert seen[2]["exception_info"] == "timeout"


async def test_commands_get_their_directory_and_environment(bench):
    record = await bench.run("run in /tmp: pwd; echo $FROM", "run: pwd", FIX)
    seen = json.loads(record.notes["harness_log"])
    assert seen[0]["output"] == "/tmp\nharness\n" and seen[1]["output"] == "/testbed\n"


async def test_law8_a_dead_worker_process_is_a_retry_and_no_token_is_lost(bench):
    killed = []

    def script(rollout, number):
        if not killed:
            victim = next(worker for worker in bench.pool._workers.values() if worker.load)
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)
        return Answer("hm", delay_s=0.1 if number == 0 else 0)

    bench.proxy.script = script
    record = await bench.run("model", FIX)
    assert (record.end, record.passed, record.notes["attempts"]) == ("graded", True, 2)
    assert f"WorkerDied: worker process {killed[0]} ended (exit status -9)" in record.notes["failures"][0]
    first, second = bench.proxy.rollouts.values()
    assert first.opened.rollout_id == "r0" and second.opened.rollout_id == "r0.1"
    assert record.discarded_tokens == len(first.calls) * TOKENS and len(record.calls) == 1
    await until(lambda: len(bench.pool.pids) == 2)


async def test_law1_tokens_of_a_lost_attempt_are_in_the_record(bench):
    first = []

    def script(rollout, number):
        if number == 1 and not first:
            first.append(rollout)
            os.kill(next(worker for worker in bench.pool._workers.values() if worker.load).pid, signal.SIGKILL)
            return Answer("too late", delay_s=5)
        return Answer("hm")

    bench.proxy.script = script
    record = await bench.run("model", "model", FIX)
    assert record.passed and record.tokens_sampled == 2 * TOKENS and record.discarded_tokens == TOKENS
    await until(lambda: len(bench.pool.pids) == 2)


async def test_law8_a_harness_that_ends_its_process_takes_no_other_rollout_for_good(bench):
    rollouts = bench.rollouts("model", FIX, "model")
    dying = bench.rollouts("die", retries=1)
    bench.proxy.script = lambda rollout, number: Answer("hm", delay_s=0.3)
    records = await asyncio.gather(*[rollouts.run(spec(f"good{n}")) for n in range(4)], dying.run(spec("bad")))
    assert all(record.passed for record in records[:4])
    assert (records[4].end, records[4].notes["attempts"]) == ("infra_failed", 2)
    await until(lambda: len(bench.pool.pids) == 2)


async def test_law8_a_killed_sandbox_is_a_retry(bench):
    def script(rollout, number):
        if rollout.opened.rollout_id == "r0":
            os.kill(bench.sandboxes[0].pid, signal.SIGKILL)
        return Answer("hm")

    bench.proxy.script = script
    record = await bench.run("model", FIX)
    assert (record.end, record.passed, record.notes["attempts"]) == ("graded", True, 2)
    assert record.notes["failures"][0].startswith("sandbox: SandboxDied")
    assert record.discarded_tokens == TOKENS


async def test_law8_a_broken_model_call_is_a_retry(bench):
    def script(rollout, number):
        return Answer("broken", status=500) if rollout.opened.rollout_id == "r0" else Answer("hm")

    bench.proxy.script = script
    record = await bench.run("model", FIX)
    assert (record.end, record.passed, record.notes["attempts"]) == ("graded", True, 2)
    assert record.notes["failures"][0].startswith("proxy: the endpoint failed: HTTPError")


async def test_law8_an_endpoint_that_is_away_is_a_retry(bench):
    away = []

    async def open_nowhere(rollout):
        endpoint = await opens(rollout)
        return endpoint if away else away.append(1) or Endpoint("http://127.0.0.1:9/r/x")

    opens, bench.proxy.open = bench.proxy.open, open_nowhere
    record = await bench.run("model", FIX)
    assert (record.end, record.passed, record.notes["attempts"]) == ("graded", True, 2)
    assert record.notes["failures"][0].startswith("proxy: the endpoint failed: URLError")


async def test_law8_a_grading_sandbox_that_dies_repeats_the_grading_only(bench):
    def spoil(sandbox, number):
        if number == 1:
            start = sandbox.start

            async def start_and_die():
                await start()
                os.kill(sandbox.pid, signal.SIGKILL)

            sandbox.start = start_and_die

    bench.spoil = spoil
    record = await bench.run("model", FIX)
    assert (record.end, record.passed, record.notes["attempts"]) == ("graded", True, 1)
    assert len(bench.sandboxes) == 3 and len(bench.proxy.rollouts) == 1


async def test_law8_retries_are_bounded_and_the_reason_is_kept(bench):
    def spoil(sandbox, number):
        async def start():
            raise SandboxError("no room")
        sandbox.start = start

    bench.spoil = spoil
    record = await bench.run(FIX, retries=1)
    assert (record.end, record.reason) == ("infra_failed", "sandbox: SandboxError: no room")
    assert record.notes["attempts"] == 2 and len(bench.sandboxes) == 2


async def test_a_broken_task_is_data_and_is_not_tried_again(bench):
    record = await bench.run(FIX, task=Task(instance_id="empty", problem_statement="x"))
    assert record.end == "harness_failed" and record.notes["attempts"] == 1
    assert record.reason == "task: task empty has neither `files` nor `directory`: nothing to work on"


async def test_cancelling_a_rollout_cleans_up(bench):
    rollouts = bench.rollouts("model", "run: sleep 60")
    running = asyncio.create_task(rollouts.run(spec("r0")))
    await until(lambda: bench.sandboxes and bench.proxy.rollouts and bench.proxy.rollouts["r0"].calls)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.nothing_left()
    await until(lambda: not any(worker.load for worker in bench.pool._workers.values()))


async def test_stop_ends_every_rollout_at_whatever_stage(bench):
    bench.proxy.script = lambda rollout, number: Answer("hm", delay_s=0.05)
    rollouts = bench.rollouts("model", FIX, "model")
    running = [asyncio.create_task(rollouts.run(spec(f"r{n}"))) for n in range(12)]
    await until(lambda: len(bench.sandboxes) > 6)
    await rollouts.stop()
    assert all(task.done() for task in running)
    assert bench.nothing_left()


async def test_law6_a_worker_process_knows_nothing_of_the_users(bench, monkeypatch):
    record = await bench.run("environment", FIX)
    (names,) = [seen for seen in json.loads(record.notes["harness_log"]) if isinstance(seen, list)]
    assert set(names) <= set(pools.worker_environment("/nowhere")) | {"LC_CTYPE", "PWD"}
    assert not any("KEY" in name or "TOKEN" in name or "SECRET" in name for name in names)


AGENT = """
import json, os, sys, urllib.request
task, model = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": task}]}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("the model says", answer)
with open("sums.py", "w") as file:
    file.write("def add(a, b):\\n    return " + answer + "\\n")
"""


async def test_a_command_harness_reaches_its_endpoint_and_is_graded(bench):
    bench.proxy.script = lambda rollout, number: Answer("a + b")
    record = await bench.commands(AGENT).run(spec("r0"))
    assert (record.end, record.passed, record.notes["exit_status"]) == ("graded", True, "exit code 0")
    assert record.notes["harness_log"] == "the model says a + b\n" and len(record.calls) == 1
    (request,) = bench.proxy.rollouts["r0"].requests
    assert request["messages"] == [{"role": "user", "content": "add must add"}] and request["model"] == "policy"
    assert "agent" not in record.patch  # its own files are no part of the patch


async def test_law8_a_command_harness_that_failed_after_the_proxy_did_is_run_again(bench):
    bench.proxy.script = lambda rollout, number: (
        Answer("ours", status=500) if rollout.opened.rollout_id == "r0" else Answer("a + b"))
    record = await bench.commands(AGENT).run(spec("r0"))
    assert (record.end, record.passed, record.notes["attempts"]) == ("graded", True, 2)
    assert record.notes["failures"] == [
        "proxy: the proxy failed on 1 requests, then the harness ended: exit code 1"]


@pytest.mark.parametrize(("program", "harness", "reason"), [
    ("print('no'); raise SystemExit(3)", {}, "exit code 3"),
    ("import time; time.sleep(60)", {"timeout_s": 1}, "Timeout: after 1 s"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", {}, "exit code 137"),
    ("", {"result": {"path": "/tmp/agent/end.json", "ok": ["done"]}},
     "no result file: /tmp/agent/end.json was not written, or cannot be read"),
    ("open('/tmp/agent/end.json', 'w').write('{\"exit_status\": \"LimitsExceeded\"}')",
     {"result": {"path": "/tmp/agent/end.json", "ok": ["done"]}}, "LimitsExceeded"),
])
async def test_law8_a_command_harness_that_ends_badly_is_data(bench, program, harness, reason):
    record = await bench.commands(program, **harness).run(spec("r0"))
    assert (record.end, record.reason, record.notes["attempts"]) == ("harness_failed", reason, 1)


async def test_a_command_harness_says_in_its_result_file_how_it_ended(bench):
    program = "import json; open('sums.py', 'w').write('def add(a, b): return a + b'); " \
              "json.dump({'info': {'exit': 'done'}}, open('/tmp/agent/end.json', 'w'))"
    result = {"path": "/tmp/agent/end.json", "key": "info.exit", "ok": ["done"]}
    record = await bench.commands(program, result=result).run(spec("r0"))
    assert record.passed and record.notes["exit_status"] == "done"


async def no_sandbox(command, cwd, timeout, env):
    return ExecResult("", 0)


REQUEST = {"task": {}, "base_url": "http://127.0.0.1:9", "api_key": "none", "model": "policy"}


async def test_law8_a_thread_that_cannot_be_freed_costs_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "CANCEL_GRACE_S", 0.3)
    pool = WorkerPool("tests.integration.harnesses:run", 1, tmp_path)
    await pool.start()
    (before,) = pool.pids
    stuck = asyncio.create_task(pool.run("stuck", {**REQUEST, "settings": {"steps": ["hold on"]}}, no_sandbox))
    beside = asyncio.create_task(pool.run("beside", {**REQUEST, "settings": {"steps": ["run: wait"]}}, wait_a_second))
    await asyncio.sleep(0.2)
    stuck.cancel()
    assert (await beside).ok  # others in the process end first
    await until(lambda: pool.pids and pool.pids != [before])
    assert (await pool.run("next", {**REQUEST, "settings": {"steps": []}}, no_sandbox)).ok
    await pool.stop()


async def wait_a_second(command, cwd, timeout, env):
    await asyncio.sleep(1)
    return ExecResult("", 0)


async def test_stop_leaves_no_process_and_no_directory(tmp_path):
    pool = WorkerPool("tests.integration.harnesses:run", 2, tmp_path)
    await pool.start()
    pids = pool.pids
    assert len(pids) == 2 and all(map(process_lives, pids))
    stuck = asyncio.create_task(pool.run("stuck", {**REQUEST, "settings": {"steps": ["hold on"]}}, no_sandbox))
    await asyncio.sleep(0.1)
    await pool.stop()
    await pool.stop()
    assert not any(map(process_lives, pids)) and list(tmp_path.iterdir()) == []
    with pytest.raises(WorkerDied):
        await stuck
    with pytest.raises(WorkerDied):
        await pool.run("late", {**REQUEST, "settings": {"steps": []}}, no_sandbox)


async def test_a_harness_that_cannot_be_imported_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_harness.py").write_text("import no_such_library\ndef run(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool("broken_harness:run", 1, tmp_path)
    with pytest.raises(ConfigError, match=r"harness\.entry.*broken_harness:run.*No module named 'no_such_library'"):
        await pool.start()
    assert pool.pids == []
