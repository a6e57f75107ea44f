"""Runner and proxy together, as Ray actors: mini-SWE-agent in both ways on one bug, until it is fixed and graded.

Only the policy's choice of words is scripted (a generator actor); harness, HTTP, templates, tokens, capture, sandboxes
and grading are real.
"""

import os

import numpy as np
import psutil
import pytest
import ray

from lightning_ray.config import Config, HarnessConfig, PolicyConfig, RunConfig
from lightning_ray.fleet import Fleet
from lightning_ray.generator.request import Generation
from lightning_ray.harness.runner import Runner
from lightning_ray.run_directory import RunDirectory
from lightning_ray.trajectory.branches import branches
from tests.integration.test_harness import SUBMIT, command_config, settings
from tests.integration.test_runner import spec
from tests.unit.proxy_parts import keepers_of, model_dir, tokenizer_of

COMMANDS = ["cat sums.py", "sed -i 's/a - b/a + b/' sums.py", SUBMIT]
MODEL_CLASS = "litellm_textbased"


@ray.remote(num_cpus=0)
class Scripted:
    """A generator that answers with the next of `COMMANDS`, by the number of answers in the prompt."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer_of("hermes")

    async def generate(self, request) -> Generation:
        turns = self.tokenizer.decode(request.prompt_ids).count("<|im_start|>assistant") - 1
        text = f"THOUGHT: next\n\n```mswea_bash_command\n{COMMANDS[turns]}\n```"
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        size = len(ids)
        return Generation(np.asarray(ids, np.int32), np.zeros(size, np.float32), np.zeros(size, np.int32), "stop")

    async def abort(self, request_id: str) -> None:
        pass


@pytest.fixture(scope="module")
def fleet_and_policy(ray_session, tmp_path_factory):
    model = model_dir("hermes", tmp_path_factory.mktemp("models"))
    policy = PolicyConfig(path=model, max_context=8192)
    config = Config(policy=policy, harness=HarnessConfig(kind="command", command=["true"]),
                    run=RunConfig(dir=tmp_path_factory.mktemp("runs")))
    fleet = Fleet.start(config, RunDirectory.create(config), str(model), [Scripted.remote()])
    fleet.ready()
    return fleet, policy


@pytest.fixture
def proxy_and_model(fleet_and_policy):
    fleet, policy = fleet_and_policy
    return fleet.proxies[0], policy


def run(proxy, policy: PolicyConfig, harness: HarnessConfig, **sandbox):
    options = {"runtime_env": {"env_vars": {"DOCKER_HOST": os.environ["DOCKER_HOST"]}}} if sandbox else {}
    runner = Runner.options(**options).remote(Config(policy=policy, harness=harness, sandbox=sandbox), proxy)
    record = ray.get(runner.run.remote(spec(harness.kind)))
    ray.get(runner.stop.remote())
    ray.kill(runner)
    return record


def test_runners_and_proxies_run_on_asyncios_own_loop(fleet_and_policy, rings_of):
    fleet, _ = fleet_and_policy
    assert [rings_of(part) for part in (*fleet.runners, *fleet.proxies)] == [0, 0]


def test_law2_both_ways_of_running_it_make_the_same_calls_token_for_token(proxy_and_model):
    python = run(*proxy_and_model, HarnessConfig(settings=settings(MODEL_CLASS), workers=1))
    command = run(*proxy_and_model, command_config(MODEL_CLASS))
    for record in (python, command):
        assert (record.end, record.passed, record.reason) == ("graded", True, "passed"), record
        assert record.notes["exit_status"] == "Submitted"
        assert len(record.calls) == len(COMMANDS)
        assert [call.relation for call in record.calls] == ["new_conversation", "continued", "continued"]
        assert len(branches(record.calls)) == 1
    assert python.patch == command.patch
    for ours, theirs in zip(python.calls, command.calls, strict=True):
        assert np.array_equal(ours.prompt_ids, theirs.prompt_ids)
        assert np.array_equal(ours.sampled_ids, theirs.sampled_ids)
        assert ours.masked is None and theirs.masked is None


def test_a_whole_rollout_in_containers_is_graded(proxy_and_model, containers):
    """mini-SWE-agent with a container as its environment; `test_containers.py` has a program in the container."""
    image = containers.report["image"].partition(" ")[0]
    harness = HarnessConfig(settings=settings(MODEL_CLASS), workers=1)
    record = run(*proxy_and_model, harness, backend="container", image=image)
    assert (record.end, record.passed, record.reason) == ("graded", True, "passed"), record
    assert len(record.calls) == len(COMMANDS) and record.notes["limits"]["memory"].startswith("cgroup v")


def test_a_fleet_that_was_stopped_leaves_no_process(fleet_and_policy, tmp_path_factory):
    """Also on a cluster that goes on: the last test here, because it stops what the others use."""
    fleet, _ = fleet_and_policy
    runs = tmp_path_factory.getbasetemp()
    assert len(keepers_of(runs)) == 1
    processes = [psutil.Process(pid) for pid in ray.get([proxy.pid.remote() for proxy in fleet.proxies])]
    fleet.stop()
    _, alive = psutil.wait_procs([*processes, *keepers_of(runs)], timeout=20)
    assert not alive
