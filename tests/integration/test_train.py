"""The main job in small: real warm-up, vLLM, DeepSpeed, Ray, proxy, mini-SWE-agent, bubblewrap and grading.

Each run is a process of its own, as a user starts it: one that is interrupted, and one that resumes it to its end.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from lightning_ray import Config
from lightning_ray.config import PolicyConfig
from lightning_ray.policy.demonstrations import DEFAULT_ACTION_REGEX
from lightning_ray.policy.source import check_policy
from lightning_ray.trajectory.archive import read_rollouts

QUICKSTART = Path(__file__).parents[2] / "jobs" / "quickstart.yaml"
pytestmark = pytest.mark.timeout(600)


def command(*arguments):
    return [sys.executable, "-m", "lightning_ray.cli", "train", *map(str, arguments)]


def small(directory, **changes):
    """Overrides that make the quickstart small: a quarter of the warm-up, steps of two groups of four."""
    values = {
        "policy.warm_start.steps": 60, "run.dir": directory, "run.name": "small", "run.steps": 500,
        "run.checkpoint_every": 1, "tasks.train": 64, "tasks.heldout": 8, "schedule.groups_per_step": 2,
        "schedule.groups_in_flight": 2, "schedule.group_size": 4, "runners.rollouts": 8, "evaluation.every": 0,
        **{key.replace("__", "."): value for key, value in changes.items()}}
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run without end on which Ctrl-C was pressed after a step: its directory, how the process ended, its output,
    and what it left running."""
    directory = tmp_path_factory.mktemp("runs")
    process = subprocess.Popen(
        command(QUICKSTART, *small(directory)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background jobs ignore it
    metrics, deadline = directory / "small" / "metrics.jsonl", time.monotonic() + 400
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.2)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    _, alive = psutil.wait_procs(started, timeout=20)
    return directory / "small", process.returncode, output, alive


@pytest.fixture(scope="module")
def trained(interrupted):
    """The same run, resumed for two more steps and finished: its directory, its last step, its output."""
    run = interrupted[0]
    steps = len(steps_of(run)) + 2
    done = subprocess.run(command("--resume", run, "--run.steps", steps), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return run, steps, done.stdout


def steps_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_ctrl_c_keeps_the_checkpoint_and_leaves_no_process(interrupted):
    run, status, output, alive = interrupted
    assert status == 130, output
    assert f"--resume {run}" in output and list((run / "checkpoints").glob("step_*/state.json"))
    assert not alive, [" ".join(each.cmdline()) for each in alive]


def test_a_run_goes_on_where_it_was_interrupted_and_leaves_the_whole_record(trained):
    run, steps, output = trained
    metrics = steps_of(run)
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    for line in metrics:
        assert line["rollouts"] == 8 and line["rollouts_infra_failed"] == 0
        assert line["calls"] >= 2 * line["rollouts"], "look, edit, submit: at least two model calls each"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["heldout_before"]["total"] == summary["heldout_after"]["total"] == 8
    resumed = Config.load(run / "config.yaml", ["--run.steps", str(steps)])
    assert summary["steps"] == steps and summary["config_hash"] == resumed.digest()
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").iterdir())
    check_policy(PolicyConfig(path=run / "checkpoints" / f"step_{steps:06d}" / "policy"))
    assert "held-out pass rate" in output and str(run) in output


def test_law1_holds_in_every_step_of_a_real_run(trained):
    run = trained[0]
    for metrics in steps_of(run):
        assert metrics["tokens_sampled"] == metrics["tokens_trained"] + sum(metrics["tokens_dropped"].values()) > 0
        recorded = read_rollouts(run / "rollouts" / f"step_{metrics['step']:06d}.parquet")
        assert sum(trajectory.tokens_sampled for trajectory in recorded) == metrics["tokens_sampled"]


def test_law2_a_conversation_is_one_branch_in_a_real_run(trained):
    """mini-SWE-agent echoes its history: the call after an answer that it understood continues token for token. One
    that it did not understand is dropped from the history."""
    run, steps, _ = trained
    pairs = [(len(re.findall(DEFAULT_ACTION_REGEX, call.text, re.DOTALL)) == 1, later.relation == "continued")
             for step in range(1, steps + 1)
             for trajectory in read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet")
             for call, later in pairwise(trajectory.calls)]
    assert all(understood == continued for understood, continued in pairs)
    assert sum(continued for _, continued in pairs) > steps


def test_learner_and_generator_agree_after_an_update(trained):
    for metrics in steps_of(trained[0]):
        if metrics["logprob_gap_mean"] is not None:
            assert metrics["logprob_gap_mean"] < 0.02


def test_a_run_that_started_ray_still_ends_its_parts_on_sigterm():
    """Ray has a handler of its own, which leaves at once."""
    code = ("import signal\nfrom lightning_ray.config import Config\nfrom lightning_ray.ray_session import RaySession\n"
            "signal.signal(signal.SIGTERM, signal.default_int_handler)\nsession = RaySession.start(Config())\n"
            "try:\n    signal.raise_signal(signal.SIGTERM)\nexcept KeyboardInterrupt:\n    print('told')\n"
            "session.stop()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "told\n", done.stdout + done.stderr


@pytest.mark.parametrize(("arguments", "words"), [
    (["nowhere.yaml"], ["nowhere.yaml"]),
    ([QUICKSTART, "--learner.lrr", "1"], ["learner.lrr", "Did you mean"]),
    ([QUICKSTART, "--harness.entry", "nowhere:run"], ["harness.entry", "nowhere"]),
    ([QUICKSTART, "--policy.path", "/nowhere", "--policy.warm_start", "null"], ["policy.path", "/nowhere"]),
    ([QUICKSTART, "--tasks.source", "/nowhere.jsonl"], ["tasks.source", "/nowhere.jsonl"]),
    ([QUICKSTART, "--run.dir", "/proc/nowhere"], ["run.dir", "/proc"]),
    (["--resume", "/nowhere"], ["/nowhere"]),
])
def test_bad_input_exits_2_with_one_message_before_anything_starts(arguments, words, tmp_path):
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(QUICKSTART.parents[1])})
    assert done.returncode == 2, done.stdout + done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()
