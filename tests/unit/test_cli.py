"""What belongs to the command and what overrides a setting, wherever it stands."""

import argparse
import os
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.exceptions import RayTaskError

from lightning_ray.cli import BAD_INPUT, DONE, FAILED, INTERRUPTED, main, run_command, separate_overrides
from lightning_ray.config import ConfigError


@pytest.mark.parametrize(("words", "plain", "overrides"), [
    (["train", "a.yaml", "--run.steps", "3"], ["train", "a.yaml"], ["--run.steps", "3"]),
    (["train", "--run.steps", "3", "a.yaml"], ["train", "a.yaml"], ["--run.steps", "3"]),
    (["train", "--resume", "runs/a.b", "--run.steps=3"], ["train", "--resume", "runs/a.b"], ["--run.steps=3"]),
    (["train", "--learner.lr", "-3", "--resume", "x"], ["train", "--resume", "x"], ["--learner.lr", "-3"]),
    (["train", "a.yaml", "--run.steps"], ["train", "a.yaml"], ["--run.steps"]),
])
def test_overrides_are_taken_out_wherever_they_stand(words, plain, overrides):
    assert separate_overrides(words) == (plain, overrides)


def test_a_run_that_is_not_there_is_bad_input_with_its_name(capsys, tmp_path):
    for option in ("--resume", "--replay"):
        assert main(["train", option, str(tmp_path / "nowhere"), "--run.steps", "3"]) == BAD_INPUT
        assert "nowhere is no run directory" in capsys.readouterr().err


def test_an_override_without_a_value_is_named(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("")
    assert main(["train", str(tmp_path / "c.yaml"), "--run.steps"]) == BAD_INPUT
    assert "--run.steps has no value" in capsys.readouterr().err


@pytest.mark.parametrize(("raised", "status", "said"), [
    (None, DONE, ""), (ConfigError("x: no. Give y"), BAD_INPUT, "job: x: no. Give y\n"),
    (RayTaskError("start", "a traceback", ConfigError("x: no. Give y")).as_instanceof_cause(), BAD_INPUT,
     "job: x: no. Give y\n"),
    (PermissionError(13, "Permission denied", "/secret"), BAD_INPUT,
     "job: /secret: this user has not the rights for it. Give another path\n"),
    (LookupError("gone"), FAILED, "job: failed: gone\n"), (KeyboardInterrupt(), INTERRUPTED, "job: interrupted\n"),
])
def test_how_a_job_ends_is_its_exit_status_and_one_line(raised, status, said, capsys):
    def run(options, overrides):
        assert overrides == ["--run.steps", "3"]
        if raised is not None:
            raise raised

    parser = argparse.ArgumentParser(prog="job")
    parser.set_defaults(run=run)
    assert run_command(parser, ["--run.steps", "3"], failures=(LookupError,)) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_stop_ends_as_after_ctrl_c(stop, capsys):
    parser, before = argparse.ArgumentParser(prog="job"), signal.getsignal(stop)
    parser.set_defaults(run=lambda options, overrides: os.kill(os.getpid(), stop))
    try:
        signal.signal(stop, signal.SIG_DFL)
        assert run_command(parser, []) == INTERRUPTED
        signal.signal(stop, signal.SIG_IGN)
        assert run_command(parser, []) == DONE, "nohup"
    finally:
        signal.signal(stop, before)


def test_a_file_that_holds_no_rollouts_is_named(capsys, tmp_path):
    (tmp_path / "broken.parquet").write_text("PAR1")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    for name, why in (("broken", "cannot be read"), ("other", "no column 'rollout_id'")):
        assert main(["view", str(tmp_path / f"{name}.parquet")]) == BAD_INPUT
        said = capsys.readouterr().err
        assert f"{name}.parquet" in said and why in said


@pytest.mark.parametrize("words", [["--run.steps", "3"], ["--stepz=3"], ["more"]])
def test_a_command_without_settings_refuses_what_it_does_not_know(words, capsys):
    assert main(["view", "runs/x", *words]) == BAD_INPUT
    assert f"{words[0]!r} is not understood" in capsys.readouterr().err
