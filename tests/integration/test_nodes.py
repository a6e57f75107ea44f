"""A training job on a Ray cluster of several nodes, by `ray job submit`: the policy group on one node, a runner and its
proxy on each of two others, as custom resources say. In the middle of step 2 one of these is killed, and a new one
comes; in the middle of step 3 the driver is killed, on a cluster that goes on; then another job resumes the run.

All nodes are processes of this machine, with Ray's tokens on.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_ray.config import Config
from lightning_ray.trajectory.archive import read_rollouts
from tests.integration.test_killed_driver import (
    at_home_in,
    cgroups_of,
    lines_of,
    publish_until,
    sandboxes_of,
    short_directory,
    wait_until,
)
from tests.integration.test_schedule import task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
QUICK_FIRST = 2
"""A seed that hands out the two quick tasks first: step 1 trains them, then all that is in flight is held."""
PARTS = ("ray::LearnerWorker", "ray::GeneratorWorker", "ray::Proxy", "ray::Runner")
BELOW = ("VLLM::EngineCore", "lightning_ray.harness.worker")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Nodes:
    """`ray start`, once for each node."""

    def __init__(self, directory: Path):
        self.directory, self.port, self.dashboard = directory, free_port(), free_port()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": str(directory),
            "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment.pop("PYTHONPATH", None)  # a job brings its code
        self.started: dict[str, subprocess.Popen] = {}

    def start(self, name: str, cpus: int, **resources: float) -> None:
        where = ["--head", "--port", self.port, "--dashboard-port", self.dashboard, "--dashboard-host", "127.0.0.1",
                 "--ray-client-server-port", free_port()] if name == "head" else ["--address", f"127.0.0.1:{self.port}"]
        (self.directory / name).mkdir(mode=0o755)
        log = self.directory / f"{name}.log"
        with log.open("w") as file:
            self.started[name] = subprocess.Popen(
                [*self.ray("start"), "--block", *where, "--num-cpus", str(cpus), "--resources", json.dumps(resources),
                 "--object-store-memory", str(100 << 20), "--min-worker-port", "0", "--max-worker-port", "0",
                 "--dashboard-agent-listen-port", free_port()],
                env={**self.environment, "TMPDIR": str(self.directory / name)}, stdout=file, stderr=file, cwd="/")
        wait_until(lambda: "Ray runtime started" in log.read_text(), 120, log.read_text)

    @staticmethod
    def ray(*words: str) -> list[str]:
        return [sys.executable, "-m", "ray.scripts.scripts", *words]

    def submit(self, *arguments) -> subprocess.Popen:
        return subprocess.Popen(
            [*self.ray("job", "submit"), "--address", f"http://127.0.0.1:{self.dashboard}", "--working-dir", str(ROOT),
             "--", sys.executable, "jobs/train.py", *map(str, arguments)],
            env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def kill(self, name: str) -> None:
        """Ray's processes there, by SIGKILL, as a machine that is lost; their workers notice."""
        own = psutil.Process(self.started.pop(name).pid)
        for process in [own, *own.children()]:
            process.kill()
        own.wait()

    def processes(self, *words: str, node: str | None = None) -> dict[int, str]:
        """With one of these words in their command line; the node that each is on."""
        return {pid: on.name for on in self.directory.iterdir() if on.is_dir() and node in (None, on.name)
                for pid, line in at_home_in(on).items() if any(word in line for word in words)}

    def stop(self) -> None:
        for name in list(self.started):
            self.kill(name)
        for pid in at_home_in(self.directory):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def nodes():
    made = Nodes(short_directory())
    try:
        made.start("head", 1)
        made.start("policy", 2, policy=2)
        made.start("first", 1, runner=1)
        made.start("second", 1, runner=1)
        yield made
    finally:
        made.stop()
        shutil.rmtree(made.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def config(policy_config, tmp_path_factory):
    root = tmp_path_factory.mktemp("nodes")
    names = [f"quick{number}" for number in range(2)] + [f"slow{number}" for number in range(6)]
    (root / "tasks.jsonl").write_text("".join(json.dumps(task(each)) + "\n" for each in names))
    (root / "versions").mkdir()
    made = Config(
        run={"dir": root, "name": "nodes", "steps": 3, "checkpoint_every": 100, "seed": QUICK_FIRST},
        policy=policy_config.policy, sampling=policy_config.sampling, generator=policy_config.generator,
        learner={**policy_config.learner.model_dump(), "resources": {"policy": 1}},
        tasks={"source": str(root / "tasks.jsonl")},
        harness={"entry": "tests.integration.patient_harness:run", "workers": 1, "timeout_s": 500,
                 "settings": {"versions": str(root / "versions"), "long": 60}},
        runners={"count": 2, "resources": {"runner": 1}},
        schedule={"group_size": 2, "groups_per_step": 2, "groups_in_flight": 3, "max_staleness": 100})
    (root / "config.yaml").write_text(made.to_yaml())
    return made


class Job:
    """A submitted run."""

    def __init__(self, nodes: Nodes, config: Config, *arguments):
        self.process = nodes.submit(*arguments)
        self.run, self.versions = config.run.dir / "nodes", config.run.dir / "versions"

    def wait_until(self, done, seconds, why=lambda: ""):
        def look():
            assert self.process.poll() is None, self.process.stdout.read()
            return done()
        wait_until(look, seconds, why)

    @property
    def began(self) -> int:
        """Rollouts of held tasks, those that were begun again included."""
        return len(list(self.versions.glob("began-slow*")))


@pytest.fixture(scope="module")
def lost(nodes, config):
    """A job that lost a node of a runner in step 2 and its driver in step 3. What there was before the second."""
    job = Job(nodes, config, config.run.dir / "config.yaml")
    job.wait_until(lambda: len(lines_of(job.run)) == 1 and job.began == 6, 400)
    placed = {part: sorted(nodes.processes(part).values()) for part in PARTS}
    held = len(sandboxes_of(nodes.processes("ray::Runner", node="first")))
    there = [psutil.Process(pid) for pid in nodes.processes("", node="first")]
    nodes.kill("first")
    assert not [each for each in psutil.wait_procs(there, timeout=30)[1] if each.is_running()]
    job.wait_until(lambda: job.began == 6 + held, 120, lambda: "the rollouts of the lost node were not begun again")
    nodes.start("third", 1, runner=1)
    job.wait_until(lambda: nodes.processes("lightning_ray.harness.worker", node="third"), 200)
    time.sleep(3)  # its runner is ready, and the trainer gets to know of it
    (job.versions / "1000000").touch()  # what was begun by now goes on
    job.wait_until(lambda: len(lines_of(job.run)) == 2 and job.began == 10 + held, 200)
    runners = nodes.processes("ray::Runner")
    again = {node: len(sandboxes_of([pid])) for pid, node in runners.items()}
    yield job, placed, held, runners, again


def test_custom_resources_place_the_parts_and_a_proxy_is_beside_each_runner(lost):
    _, placed, _, _, _ = lost
    assert placed == {"ray::LearnerWorker": ["policy"], "ray::GeneratorWorker": ["policy"],
                      "ray::Proxy": ["first", "second"], "ray::Runner": ["first", "second"]}


def test_law8_rollouts_of_a_lost_node_run_again_and_another_node_takes_its_place(lost):
    job, _, held, _, again = lost
    assert held >= 2 and set(again) == {"second", "third"} and min(again.values()) >= 1, (held, again)
    (line,) = [line for line in map(json.loads, lines_of(job.run)) if line["step"] == 2]
    recorded = read_rollouts(job.run / "rollouts" / "step_000002.parquet")
    assert line["rollouts_retried"] == sum(one.notes["attempts"] == 2 for one in recorded) >= 1
    for one in recorded:
        assert one.end == "graded" and one.notes["failures"] in ([], ["infra: its runner died"])
        assert len(one.calls) == 3, "no call of the attempt that was lost is in the record"


def test_law8_nothing_of_a_killed_driver_goes_on_in_a_cluster_that_does(lost, nodes):
    job, _, _, runners, _ = lost
    below = sandboxes_of(runners)
    (driver,) = [pid for pid in nodes.processes("jobs/train.py") if psutil.Process(pid).name().startswith("python")]
    os.kill(driver, signal.SIGKILL)
    output, _ = job.process.communicate(timeout=60)
    assert job.process.returncode == 1, output

    def left():
        return nodes.processes(*PARTS, *BELOW) | {pid: "sandbox" for pid in below if psutil.pid_exists(pid)}

    wait_until(lambda: not left(), 30, left)


def test_law8_the_run_is_resumed_there_and_no_rollout_is_lost_or_counted_twice(lost, nodes, config):
    job, _, _, runners, _ = lost
    before = lines_of(job.run)
    resumed = Job(nodes, config, "--resume", job.run)
    publish_until(job.versions, lambda: resumed.process.poll() is not None)
    assert resumed.process.returncode == 0, resumed.process.stdout.read()
    lines = list(map(json.loads, lines_of(job.run)))
    assert lines_of(job.run)[:2] == before and [line["step"] for line in lines] == [1, 2, 3]
    rollouts = []
    for line in lines:
        assert line["tokens_sampled"] == line["tokens_trained"] + sum(line["tokens_dropped"].values()) > 0
        recorded = read_rollouts(job.run / "rollouts" / f"step_{line['step']:06d}.parquet")
        assert sum(one.tokens_sampled + one.discarded_tokens for one in recorded) == line["tokens_sampled"]
        assert line["rollouts"] == len(recorded) == 4 and line["rollouts_infra_failed"] == 0
        rollouts += recorded
    assert len({one.rollout_id for one in rollouts}) == len(rollouts) == 12
    assert len({one.task_id for one in rollouts}) == 6, "no task is trained twice, none left out"
    assert cgroups_of(runners) == []
