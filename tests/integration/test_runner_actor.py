"""The `Runner` actor: starts, runs rollouts, dies and stops without leaving anything behind."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import yaml

from lightning_ray.config import Config
from lightning_ray.fleet import Fleet
from lightning_ray.harness.runner import Runner
from lightning_ray.sandbox import limits
from lightning_ray.scratch import PREFIX
from tests.integration.scripted_proxy import TOKENS, Answer, ScriptedProxy
from tests.integration.test_runner import AGENT, FIX, spec
from tests.kubernetes_api import Cluster

pytestmark = pytest.mark.usefixtures("ray_session")
CONFIG = Config(harness={"entry": "tests.integration.harnesses:run", "workers": 1,
                         "settings": {"steps": ["model", FIX, "model"]}})


@ray.remote(num_cpus=0)
class ProxyActor(ScriptedProxy):
    def __init__(self, delay_s: float, text: str = "hm") -> None:
        super().__init__(lambda rollout, number: Answer(text, delay_s=delay_s))

    def opened(self) -> int:
        return len(self.rollouts)

    def calls(self, rollout_id: str) -> int:
        return len(self.rollouts[rollout_id].calls) if rollout_id in self.rollouts else 0

    async def abandon(self, names: list[str]) -> int:
        return TOKENS * sum([len(await self.finish(name)) for name in names if name in self.rollouts])


def runner_processes() -> set[int]:
    """Process ids of runner actors on this process's cluster. Other runs on the machine have their own."""
    return {pid for pid in descendants(os.getpid()) if command_line(Path(f"/proc/{pid}")).startswith("ray::Runner")}


def command_line(path: Path) -> str:
    try:
        return (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            for child in thread.read_text().split():
                found |= {int(child)} | descendants(int(child))
    return found


def directories(pid: int) -> set[Path]:
    """Those that a runner's process holds open (its lock lies in them). Other runs on the machine have their own."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(link)}
    return {Path(link).parent for link in links if Path(link).parent.name.startswith(PREFIX)}


def gone(pids: set[int], timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(command_line(Path(f"/proc/{pid}")) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_law8_a_runner_may_be_killed_and_nothing_stays_behind():
    others = runner_processes()
    proxy = ProxyActor.remote(0.0)
    slow = ProxyActor.remote(60.0)
    ray.get([proxy.start.remote(), slow.start.remote()])

    runner = Runner.options(num_cpus=0).remote(CONFIG, slow)
    facts = ray.get(runner.start.remote())
    assert facts["backend"] == "bubblewrap" and "limits" in facts
    (process,) = runner_processes() - others
    runs = [runner.run.remote(spec(f"r{number}")) for number in range(3)]
    while ray.get(slow.opened.remote()) < 3:
        time.sleep(0.05)
    below = descendants(process)
    killed = directories(process)
    assert len(killed) == 1
    assert len(below) >= 4  # a worker process and three sandboxes
    ray.kill(runner)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(runs)
    assert gone(below)

    runner = Runner.options(num_cpus=0).remote(CONFIG, proxy)
    records = ray.get([runner.run.remote(spec(f"r{number}")) for number in range(4)])  # it starts by itself
    assert [record.passed for record in records] == [True] * 4
    (process,) = runner_processes() - others
    below = descendants(process)
    held = directories(process) | set(Path(tempfile.gettempdir()).glob(f"{limits.PREFIX}{process}-*"))
    assert len(held) == 2 and not held & killed
    ray.get(runner.stop.remote())
    assert gone(below, timeout_s=1.0)
    assert not [path for path in held | killed if path.exists()]
    ray.kill(runner)


def test_laws_1_and_8_what_a_killed_runner_had_sampled_is_discarded_and_counted():
    config = CONFIG.model_copy(update={"harness": CONFIG.harness.model_copy(update={
        "settings": {"steps": ["model", "run: sleep 2", FIX, "model"]}})})
    fleet = Fleet.beside(config, lambda number, place: ProxyActor.options(**place).remote(0.0))
    fleet.ready()
    fleet.submit(spec("lost"))
    while not ray.get(fleet.proxies[0].calls.remote("lost")):
        time.sleep(0.05)
    ray.kill(fleet.runners[0], no_restart=False)
    records = []
    while not records:
        records = fleet.ended()
    assert [(record.rollout_id, record.passed, len(record.calls)) for record in records] == [("lost", True, 2)]
    assert records[0].notes["attempts"] == 2 and records[0].notes["failures"] == ["infra: its runner died"]
    assert records[0].discarded_tokens == TOKENS, "its first call was made twice"
    assert fleet.running == 0
    fleet.stop()


def test_law6_a_machine_without_the_sandbox_refuses_to_start_and_says_so():
    config = Config(sandbox={"backend": "kubernetes", "image": "x", "kubernetes": {"context": "nowhere"}})
    runner = Runner.options(num_cpus=0).remote(config, ProxyActor.remote(0.0))
    with pytest.raises(Exception, match=r"sandbox\.kubernetes\.context: 'nowhere'"):
        ray.get(runner.start.remote())
    record = ray.get(runner.run.remote(spec("r0")))
    assert record.end == "infra_failed" and "the runner could not start" in record.reason
    ray.kill(runner)


def test_rollouts_run_as_jobs_of_a_cluster_and_nothing_stays_there(tmp_path):
    with Cluster(tmp_path) as server:
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "tests", "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": {"server": server.configuration.host}}],
            "contexts": [{"name": "tests", "context": {"cluster": "c", "user": "u"}}]}))
        config = Config(
            harness={"kind": "command", "command": ["python3", "/tmp/agent/main.py", "{task}", "{model}"],
                     "files": {"/tmp/agent/main.py": AGENT}},
            sandbox={"backend": "kubernetes", "image": "sandbox:1"}, proxy={"host": "0.0.0.0"})
        proxy = ProxyActor.remote(0.0, "a + b")
        ray.get(proxy.start.remote())
        place = {"num_cpus": 0, "runtime_env": {"env_vars": {"KUBECONFIG": str(kubeconfig)}}}
        runner = Runner.options(**place).remote(config, proxy)
        facts = ray.get(runner.start.remote())
        assert (facts["backend"], facts["network"]) == ("kubernetes", "NetworkPolicy")
        records = ray.get([runner.run.remote(spec(f"r{number}")) for number in range(3)])
        assert [(record.end, record.passed, len(record.calls)) for record in records] == [("graded", True, 1)] * 3
        jobs = [path for method, path in server.requests if method == "POST" and path.endswith("/jobs")]
        assert len(jobs) == 7  # the first look, and an agent's and a grader's for each rollout
        ray.get(runner.stop.remote())
        ray.kill(runner)
        for resource in ("batch/v1/jobs", "v1/pods", "v1/secrets", "coordination.k8s.io/v1/leases"):
            assert server.names(resource) == []
        assert server.names("networking.k8s.io/v1/networkpolicies") == ["lightning-ray-sandbox"]


def test_a_runner_imports_no_engine():
    code = ("import sys, lightning_ray.harness.runner; "
            "sys.exit(any(name in sys.modules for name in ('vllm', 'torch', 'transformers', 'litellm')))")
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
