"""What belongs to the command and what overrides a setting, wherever it stands."""

import pytest

from lightning_ray.cli import BAD_INPUT, main, separate_overrides


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
    assert main(["train", "--resume", str(tmp_path / "nowhere"), "--run.steps", "3"]) == BAD_INPUT
    assert "nowhere" in capsys.readouterr().err


def test_an_override_without_a_value_is_named(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("")
    assert main(["train", str(tmp_path / "c.yaml"), "--run.steps"]) == BAD_INPUT
    assert "--run.steps has no value" in capsys.readouterr().err
