"""The main job in small: real warm-up, vLLM, DeepSpeed, Ray, proxy, mini-SWE-agent, bubblewrap and grading.

Each test is a process of its own, as a user starts it; the first trains, the others go on with what it left.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_ray import Config
from lightning_ray.config import PolicyConfig
from lightning_ray.policy.source import check_policy
from lightning_ray.trajectory.archive import read_rollouts

QUICKSTART = Path(__file__).parents[2] / "jobs" / "quickstart.yaml"
pytestmark = pytest.mark.timeout(600)


def command(*arguments):
    return [sys.executable, "-m", "lightning_ray.cli", "train", *map(str, arguments)]


def small(directory, **changes):
    """Overrides that make the quickstart small: two steps of two groups of four, a short warm-up."""
    values = {
        "run.dir": directory, "run.name": "small", "run.steps": 2, "run.checkpoint_every": 1, "tasks.train": 64,
        "tasks.heldout": 8, "schedule.groups_per_step": 2, "schedule.groups_in_flight": 2, "schedule.group_size": 4,
        "runners.rollouts": 8, "evaluation.every": 0,
        **{key.replace("__", "."): value for key, value in changes.items()}}
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    done = subprocess.run(command(QUICKSTART, *small(directory)), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "small", done


def test_a_run_leaves_the_whole_record(trained):
    run, done = trained
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["rollouts"] == 8 and line["rollouts_infra_failed"] == 0
        assert line["calls"] >= 2 * line["rollouts"], "look, edit, submit: at least two model calls each"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["heldout_before"]["total"] == summary["heldout_after"]["total"] == 8
    assert summary["steps"] == 2 and summary["config_hash"] == Config.load(run / "config.yaml").digest()
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").iterdir())
    check_policy(PolicyConfig(path=run / "checkpoints" / "step_000002" / "policy"))
    assert "held-out pass rate" in done.stdout and str(run) in done.stdout


def test_law1_holds_in_every_step_of_a_real_run(trained):
    run, _ = trained
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert metrics["tokens_sampled"] == metrics["tokens_trained"] + sum(metrics["tokens_dropped"].values()) > 0
        recorded = read_rollouts(run / "rollouts" / f"step_{metrics['step']:06d}.parquet")
        assert sum(trajectory.tokens_sampled for trajectory in recorded) == metrics["tokens_sampled"]


def test_law2_a_conversation_is_one_branch_in_a_real_run(trained):
    """mini-SWE-agent echoes its history: every later call must continue token for token."""
    run, _ = trained
    calls = [call for trajectory in read_rollouts(run / "rollouts" / "step_000001.parquet")
             for call in trajectory.calls]
    relations = {call.relation for call in calls if call.index > 0}
    assert "continued" in relations
    assert sum(call.relation == "continued" for call in calls) >= len(calls) // 2


def test_learner_and_generator_agree_after_an_update(trained):
    run, _ = trained
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if metrics["logprob_gap_mean"] is not None:
            assert metrics["logprob_gap_mean"] < 0.02


def test_a_run_can_be_resumed(trained):
    run, _ = trained
    done = subprocess.run(command("--resume", run, "--run.steps", 3), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_ctrl_c_keeps_the_checkpoint_and_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        command(QUICKSTART, *small(tmp_path, run__steps=500)), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background jobs ignore it
    metrics = tmp_path / "small" / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.5)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "--resume" in output and list((tmp_path / "small" / "checkpoints").glob("step_*/state.json"))
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive, [" ".join(each.cmdline()) for each in alive]


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
