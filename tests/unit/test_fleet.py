"""Fleet: rollouts beyond the limit wait their turn, and all of them run."""

import pytest

from lightning_ray import fleet as module
from lightning_ray.fleet import Fleet
from lightning_ray.harness.spec import RolloutSpec
from lightning_ray.tasks.base import Task
from tests.unit.trajectories import make_trajectory


class Method:
    def __init__(self):
        self.started = []

    def remote(self, spec):
        self.started.append(spec.rollout_id)
        return spec.rollout_id


class RunnerHandle:
    def __init__(self):
        self.run = Method()


@pytest.fixture
def fleet(monkeypatch):
    """A fleet whose runner ends each rollout when it is waited for; the queue is what is tested."""
    monkeypatch.setattr(module.ray, "wait", lambda refs, num_returns, timeout: (refs[:num_returns], refs[num_returns:]))
    monkeypatch.setattr(module.ray, "get", lambda ref: make_trajectory([], rollout_id=ref))
    return Fleet([RunnerHandle()], [], None, 0)


def spec(number):
    return RolloutSpec(rollout_id=f"r{number}", group_id="g", task=Task(instance_id="t", problem_statement="x"),
                       mode="train", seed=0, temperature=1.0)


def test_without_a_limit_all_run_at_once(fleet):
    for number in range(5):
        fleet.submit(spec(number))
    assert fleet.running == 5


def test_beyond_the_limit_rollouts_wait_their_turn_and_all_run(fleet):
    fleet.admit(2)
    for number in range(5):
        fleet.submit(spec(number))
    assert fleet.running == 2
    ended, most = [], 0
    while fleet.running:
        ended += [trajectory.rollout_id for trajectory in fleet.ended()]
        most = max(most, fleet.running)
    assert ended == fleet.runners[0].run.started == [f"r{number}" for number in range(5)] and most == 2


def test_a_higher_limit_takes_effect_at_once(fleet):
    fleet.admit(1)
    for number in range(4):
        fleet.submit(spec(number))
    fleet.admit(3)
    assert fleet.running == 3
    fleet.admit(1)
    assert fleet.running == 3, "nothing that runs is stopped"
