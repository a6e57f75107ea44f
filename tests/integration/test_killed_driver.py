"""Law 8 for the driver: a run whose driver is killed by SIGKILL in the middle of a step, and then resumed.

A driver that started a Ray of its own takes every process with it. The resumed run has the steps that were done as they
were, trains the complete group that had waited for the step in progress, runs again what was in flight, and ends with
the weights that its record makes, bit for bit: no update is missing, none was done twice.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from lightning_ray.config import Config
from lightning_ray.replay import Replay
from lightning_ray.sandbox import limits
from lightning_ray.trajectory.archive import read_rollouts
from tests.integration.test_schedule import task

pytestmark = pytest.mark.timeout(600)
QUICK, SLOW, STEPS = 7, 8, 5
"""Seven groups are complete at once, two are trained in a step: in step 4 one waits for others, which are held."""
QUICK_FIRST = 7800
"""A seed that hands out the quick tasks first."""
AGENTS_S = 100
"""Ray's agents may try for a minute to tell a GCS that is dead, too, of their raylet's death; the rest ends at once."""
PARTS = ("raylet", "gcs_server", "ray::LearnerWorker", "ray::GeneratorWorker", "VLLM::EngineCore", "ray::Proxy",
         "keeper.py", "ray::Runner", "lightning_ray.harness.worker")


def short_directory() -> Path:
    """For all temporary files of a run; its path is short enough for sockets, and sandboxes may pass through."""
    path = Path(tempfile.mkdtemp(prefix="lr"))
    path.chmod(0o755)
    return path


def wait_until(done, seconds, why=lambda: ""):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def at_home_in(directory: Path) -> dict[int, str]:
    """Processes whose temporary files or whose home are here, and their command lines."""
    found = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if any(Path(environment.get(name, "/")).is_relative_to(directory) for name in ("TMPDIR", "HOME")):
                found[process.pid] = " ".join(process.cmdline()) or process.name()
        except psutil.Error:
            continue
    return found


def sandboxes_of(pids) -> list[int]:
    """The first process of each of their sandboxes."""
    of_sandboxes = limits.marked()
    return [pid for pid, owner in of_sandboxes.items()
            if int(owner.partition("-")[0]) in pids and psutil.Process(pid).ppid() not in of_sandboxes]


def cgroups_of(pids) -> list[Path]:
    return [found for _, parent in limits.places().values() for pid in pids
            for found in parent.glob(f"{limits.PREFIX}{pid}-*")]


def lines_of(run: Path) -> list[str]:
    file = run / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def publish_until(versions: Path, ended) -> None:
    """Files of ever later versions, for which held rollouts wait."""
    for version in count(1_000_000):
        if ended():
            return
        (versions / str(version)).touch()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def temporary():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def config(policy_config, tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    names = {"train": [f"quick{number}" for number in range(QUICK)] + [f"slow{number}" for number in range(SLOW)],
             "heldout": ["quick"]}
    for split, tasks in names.items():
        (root / f"{split}.jsonl").write_text("".join(json.dumps(task(each)) + "\n" for each in tasks))
    (root / "versions").mkdir()
    made = Config(
        run={"dir": root, "name": "killed", "steps": STEPS, "checkpoint_every": 100, "seed": QUICK_FIRST},
        policy=policy_config.policy, sampling=policy_config.sampling, generator=policy_config.generator,
        learner=policy_config.learner,
        tasks={"source": str(root / "train.jsonl"), "heldout_source": root / "heldout.jsonl"},
        harness={"entry": "tests.integration.patient_harness:run", "workers": 1, "timeout_s": 500,
                 "settings": {"versions": str(root / "versions"), "long": 60}},
        schedule={"group_size": 2, "groups_per_step": 2, "groups_in_flight": 8, "max_staleness": 100},
        evaluation={"every": 3})
    (root / "config.yaml").write_text(made.to_yaml())
    return made


def start(config, temporary, *arguments):
    with (config.run.dir / "output").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "lightning_ray.cli", "train", *map(str, arguments)], stdout=output,
            stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": str(temporary)})


@pytest.fixture(scope="module")
def killed(config, temporary):
    """The run's directory, a copy as the killed driver left it, and what ran then: processes and sandboxes."""
    run, versions, output = config.run.dir / "killed", config.run.dir / "versions", config.run.dir / "output"
    driver = start(config, temporary, config.run.dir / "config.yaml")

    def in_step_4():
        assert driver.poll() is None, output.read_text()
        return len(lines_of(run)) == 3 and len(list(versions.glob("began-slow*-1"))) == 7

    wait_until(in_step_4, 300, output.read_text)
    processes = at_home_in(temporary)
    sandboxes = sandboxes_of(processes)
    driver.kill()
    driver.wait()
    shutil.copytree(run, config.run.dir / "copy", ignore=shutil.ignore_patterns("journal"))
    return run, config.run.dir / "copy", processes, sandboxes


def test_law8_nothing_of_a_killed_driver_goes_on(killed, temporary):
    _, _, processes, sandboxes = killed
    assert not [part for part in PARTS if not any(part in line for line in processes.values())]
    assert len(sandboxes) == 14

    def left():
        return at_home_in(temporary) | {pid: "sandbox" for pid in sandboxes if psutil.pid_exists(pid)}

    wait_until(lambda: not left(), AGENTS_S, left)


@pytest.fixture(scope="module")
def resumed(killed, config, temporary):
    process = start(config, temporary, "--resume", killed[0])
    publish_until(config.run.dir / "versions", lambda: process.poll() is not None)
    assert process.returncode == 0, (config.run.dir / "output").read_text()
    return killed[0]


def groups_of(file) -> dict[str, str]:
    return {one.group_id: one.task_id for one in read_rollouts(file)}


def test_law8_a_killed_driver_loses_the_step_in_progress_at_most(killed, resumed):
    run, before, _, _ = killed
    lines = list(map(json.loads, lines_of(run)))
    assert lines_of(run)[:3] == lines_of(before) and [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for name in [f"step_{number:06d}.parquet" for number in (1, 2, 3)] + ["heldout_000003.parquet"]:
        assert (run / "rollouts" / name).read_bytes() == (before / "rollouts" / name).read_bytes()
    steps = [groups_of(run / "rollouts" / f"step_{number:06d}.parquet") for number in range(1, STEPS + 1)]
    (waited,) = groups_of(before / "carried_000003.parquet").items()
    assert waited in steps[3].items(), "the complete group that had waited was run again"
    ids, tasks = ([each for step in steps for each in pick(step)] for pick in (dict.keys, dict.values))
    assert len(set(ids)) == len(ids) == 2 * STEPS and len(set(tasks)) == len(tasks), "no group is trained twice"
    assert set(tasks) > {f"quick{number}" for number in range(QUICK)}


def test_law1_holds_in_every_step_of_a_resumed_run(resumed):
    for line in map(json.loads, lines_of(resumed)):
        assert line["tokens_sampled"] == line["tokens_trained"] + sum(line["tokens_dropped"].values()) > 0
        recorded = read_rollouts(resumed / "rollouts" / f"step_{line['step']:06d}.parquet")
        assert sum(one.tokens_sampled for one in recorded) == line["tokens_sampled"]


def test_law9_the_resumed_run_has_the_weights_that_its_record_makes(ray_session, resumed, config):
    replay = Replay(config, resumed)
    assert [line["policy_version"] for line in replay.steps()] == [
        json.loads(line)["policy_version"] for line in lines_of(resumed)]
    ours, theirs = (load_file(directory / "model.safetensors") for directory in (
        resumed / "checkpoints" / f"step_{STEPS:06d}" / "policy", replay.run.root / "policy"))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_a_resumed_run_removes_what_the_killed_one_left(resumed, killed, temporary):
    assert cgroups_of(killed[2]) == []
    assert list(temporary.glob("lightning*")) == []
