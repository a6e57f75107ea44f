"""The asynchronous schedule with real parts, and resumes: one fleet on the session's engine and learner.

A run whose harness goes on through `PATIENCE` updates, one that is carried over three, and others that are quick; the
same with `on_update: drain`; and a synchronous run that is resumed.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray

from lightning_ray import checkpoint
from lightning_ray.config import Config
from lightning_ray.fleet import Fleet
from lightning_ray.policy_group import PolicyGroup
from lightning_ray.run_directory import RunDirectory
from lightning_ray.trainer import Trainer
from lightning_ray.trajectory.archive import read_rollouts
from tests.integration.patient_harness import PATIENCE
from tests.tiny_models import MARKERS, SPECIAL

pytestmark = pytest.mark.timeout(600)
MAX_STALENESS = 5
QUICK = [f"quick{number}" for number in range(40)]
PATIENT_FIRST = {42: 127, 41: 4}
"""By the number of tasks: a seed that hands out the slow ones first."""


def task(name: str) -> dict:
    """Passes where `value()` is 1."""
    return {"instance_id": name, "problem_statement": name.rstrip("0123456789"),
            "files": {"value.py": "def value():\n    return 2\n"}, "FAIL_TO_PASS": ["one"],
            "grading": {"module": "value.py", "cases": {"one": {"call": "value", "expected": 1}}}}


class Kept:
    """A part that is ready, and outlives the trainers that use it; `end` is what their stopping it does."""

    def __init__(self, part, end=lambda: None):
        self.part, self.stop, self.shutdown = part, end, end
        self.ready = lambda: None

    def __getattr__(self, name):
        return getattr(self.part, name)


@pytest.fixture(scope="module")
def settings_for(ray_session, policy_config, tmp_path_factory):
    """Settings of a run on tasks of these names. All runs share a directory of versions."""
    root = tmp_path_factory.mktemp("schedule")
    (root / "versions").mkdir()

    def make(name, names, steps=200, checkpoint_every=1000, **schedule):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(task(each)) + "\n" for each in names))
        return policy_config.model_copy(update=dict(Config(
            run={"dir": root, "name": name, "steps": steps, "checkpoint_every": checkpoint_every,
                 "seed": PATIENT_FIRST.get(len(names), 0)},
            policy=policy_config.policy, sampling=policy_config.sampling, tasks={"source": str(root / f"{name}.jsonl")},
            harness={"entry": "tests.integration.patient_harness:run", "workers": 1, "timeout_s": 500,
                     "max_calls": 10_000, "settings": {"versions": str(root / "versions"), "long": 60}},
            schedule={"group_size": 2, "groups_per_step": 1, "groups_in_flight": 4, "max_staleness": MAX_STALENESS,
                      "stale_limit": 2, **schedule})) | {"generator": policy_config.generator,
                                                         "learner": policy_config.learner})

    return make


@pytest.fixture(scope="module")
def parts(settings_for, policy_group, tiny_model_dir):
    """Trainers use these, whatever their settings."""
    config = settings_for("fleet", ["quick"])
    fleet = Fleet.start(config, RunDirectory.create(config), str(tiny_model_dir), policy_group.generators)
    fleet.ready()
    versions = Path(config.harness.settings["versions"])
    (versions / str(policy_group.version)).touch()  # other tests may have updated it: rollouts count from here
    always = versions / "1000000"

    def let_all_end():
        always.touch()
        while fleet.running:
            fleet.ended()
        always.unlink()
        for proxy in fleet.proxies:  # the next run has rollouts of the same names
            ray.get(proxy.stop.remote())
            ray.get(proxy.start.remote())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fleet, "start", lambda *_: Kept(fleet, let_all_end))
        patch.setattr(PolicyGroup, "start", lambda *_, **__: Kept(policy_group))
        yield fleet
    fleet.stop()


def run_until(config, done):
    """Steps of a run until `done(trainer)`; gives the run, and each step with the version that it was trained at."""
    trainer, trained = Trainer(config), []
    versions = Path(config.harness.settings["versions"])
    before = None
    for step in trainer.steps():
        (versions / str(trainer.policy.version)).touch()
        trained.append((before, step))
        before = trainer.policy.version
        if done(trainer):
            break
    trainer.stop()
    return trainer.run, trained


@pytest.fixture(scope="module")
def continued(parts, settings_for):
    config = settings_for("continue", ["patient", "slow", *QUICK])
    return config, *run_until(config, lambda trainer: "patient" in trainer.stream.set_aside)


@pytest.fixture(scope="module")
def drained(continued, policy_group, settings_for):
    config = settings_for("drain", ["patient0", *QUICK], on_update="drain", stale_limit=1)
    usual, policy_group._config = policy_group._config, config
    try:
        return config, *run_until(config, lambda trainer: trainer.stream.set_aside)
    finally:
        policy_group._config = usual


def dropped(run) -> list:
    """The rollouts that were dropped whole, and each one's reason."""
    found = []
    for path in sorted(run.rollouts.glob("step_*")):
        why = dict(zip(*pq.read_table(path, columns=["rollout_id", "dropped"]).to_pydict().values(), strict=True))
        found += [(one, why[one.rollout_id]) for one in read_rollouts(path)
                  if why[one.rollout_id] in ("stale", "set_aside")]
    return found


def readable(text: str) -> str:
    """ASCII without control tokens: a random policy says halves of characters with control tokens between them, which
    an answer leaves out."""
    for mark in (*MARKERS, *SPECIAL):
        text = text.replace(mark, "")
    return "".join(filter(str.isascii, text)).strip()


def timeless(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


def versions_of(calls):
    return [call.versions.tolist() for call in calls]


@pytest.mark.parametrize("mode", ["continued", "drained"])
def test_laws_2_and_4_a_harness_runs_through_twenty_updates_and_notices_none(mode, request):
    config, run, _ = request.getfixturevalue(mode)
    lines = run.metrics()
    assert sum(line["rollouts_harness_failed"] + line["rollouts_infra_failed"] for line in lines) == 0
    longest = [one for one, _ in dropped(run) if one.task_id.startswith("patient")][:2]
    assert len(longest) == 2
    heard = [Counter(map(readable, json.loads(file.read_text()))) for file in Path(
        config.harness.settings["versions"]).glob(f"heard-{longest[0].task_id}-[01].json")]
    for one in longest:
        spans = versions_of(one.calls)
        every = [version for span in spans for version in span]
        assert every == sorted(every), "no token is older than the one before it"
        assert every[-1] - every[0] >= PATIENCE - 1 and len(set(every)) > 0.8 * PATIENCE, sorted(set(every))
        assert {call.finish_reason for call in one.calls} <= {"stop", "length"}
        # what the harness read, streamed or not, is what was recorded: no answer cut, none twice
        heard.remove(Counter(readable(call.text) for call in one.calls))
        mixed = sum(len(set(span)) > 1 for span in spans)
        assert mixed == 0 if mode == "drained" else mixed >= 3, mixed
    assert not heard


def test_a_slow_rollout_is_carried_over_three_updates_and_trained(continued):
    _, _, trained = continued
    version, step = next(pair for pair in trained if pair[1].trajectories[0].task_id == "slow")
    for trajectory in step.trajectories:
        firsts = [span[0] for span in versions_of(trajectory.calls)]
        assert firsts == sorted(firsts) and firsts[2] >= firsts[0] + 2, "each call was answered by a later policy"
        assert version >= firsts[-1]


@pytest.mark.parametrize("mode", ["continued", "drained"])
def test_nothing_older_than_the_bound_is_trained(mode, request):
    _, _, trained = request.getfixturevalue(mode)
    ages = [version - int(call.versions.min()) for version, step in trained[1:] for one in step.trajectories
            for call in one.calls]
    assert min(ages) >= 0 and max(ages) <= MAX_STALENESS
    assert max(ages) >= 1, "nothing was carried over"


def test_what_always_takes_too_long_is_run_again_and_then_set_aside_by_name(continued):
    _, run, _ = continued
    lines = run.metrics()
    assert [line["tasks_set_aside"] for line in lines] == [0] * (len(lines) - 1) + [1]
    for reason in ("stale", "set_aside"):
        members = [one for one, why in dropped(run) if why == reason]
        assert {one.task_id for one in members} >= {"patient"}
        tokens = sum(line["tokens_dropped"].get(reason, 0) for line in lines)
        assert tokens == sum(one.tokens_sampled for one in members) > 0


@pytest.mark.parametrize("mode", ["continued", "drained"])
def test_law1_holds_in_every_step_of_an_asynchronous_run(mode, request):
    _, run, trained = request.getfixturevalue(mode)
    lines = run.metrics()
    assert len(lines) == len(trained) and max(line["logprob_gap_mean"] or 0 for line in lines) < 0.02
    for line in lines:
        assert line["tokens_sampled"] == line["tokens_trained"] + sum(line["tokens_dropped"].values()) > 0
        found = read_rollouts(run.rollouts / f"step_{line['step']:06d}.parquet")
        assert sum(one.tokens_sampled for one in found) == line["tokens_sampled"]


def test_a_resumed_synchronous_run_equals_the_uninterrupted_one(parts, settings_for, policy_group, tmp_path):
    """Weights, samples, order of tasks and metrics, bit for bit, after a kill between two checkpoints: step 2 is in
    one, step 3 is learned again from its record, step 4 is done. Requests go to the engine one at a time: the size of a
    batch changes the last bits of its sums."""
    config = settings_for("sync", QUICK[:4], 4, 2, groups_per_step=2, groups_in_flight=2, max_staleness=0)
    parts.admit(1)
    whole = Trainer(config)
    for step in whole.steps():
        if step.number == 3:  # as a process that is killed leaves it
            shutil.copytree(whole.run.root, tmp_path / "copy")
    policy_group.export(tmp_path / "whole")
    resumed = Trainer(config, resume=tmp_path / "copy")
    assert [step.number for step in resumed.steps()] == [4]
    policy_group.export(tmp_path / "resumed")
    parts.admit(1000)
    for first, second in zip(whole.run.metrics(), resumed.run.metrics(), strict=True):
        assert timeless(first) == timeless(second)
    for number in (3, 4):
        ours, theirs = (read_rollouts(run.rollouts / f"step_{number:06d}.parquet") for run in (whole.run, resumed.run))
        for one, other in zip(ours, theirs, strict=True):
            assert (one.rollout_id, one.task_id, one.reward) == (other.rollout_id, other.task_id, other.reward)
            for mine, yours in zip(one.calls, other.calls, strict=True):
                for name in ("prompt_ids", "sampled_ids", "logprobs", "versions"):
                    assert getattr(mine, name).tobytes() == getattr(yours, name).tobytes(), name
    before, after = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed"))
    assert before == after
    states = [checkpoint.last(run)[1].model_dump(exclude={"wall_s"}) for run in (whole.run, resumed.run)]
    assert states[0] == states[1] and states[0]["step"] == 4


def test_draining_finishes_what_runs_and_lets_new_requests_wait(policy_group, request_for):
    generator = policy_group.generators[0]
    prompt = list(range(30, 70))
    running = generator.generate.remote(request_for(prompt, 400))
    while not ray.get(generator.health.remote())["in_flight"]:
        pass
    draining = generator.drain.remote()
    while not ray.get(generator.health.remote())["frozen"]:
        pass
    late = generator.generate.remote(request_for(prompt, 5))
    ray.get(draining)
    assert len(ray.get(running, timeout=60).token_ids) == 400
    assert ray.wait([late], timeout=0.3)[0] == []
    ray.get(generator.freeze.remote())
    ray.get(generator.thaw.remote())
    assert len(ray.get(late).token_ids) == 5
