"""What an evaluation says: rates, outcomes, predictions, and the comparison of two records."""

import json

import numpy as np
import pytest

from lightning_ray.cli import main
from lightning_ray.evaluation.scores import NothingJudged, scores
from lightning_ray.policy.directory import model_digest
from lightning_ray.tasks.swe_bench import prediction
from lightning_ray.trajectory.call import Call, Trajectory


def rollout(name, passed, end="graded"):
    call = Call(0, np.arange(5), np.arange(2), np.zeros(2), np.zeros(2), "stop")
    return Trajectory(name, "evaluation", name, [call], end, passed=passed, reason="said", patch="diff\n")


REPOSITORIES = {"a": "o/one", "b": "o/one", "c": "o/two"}


def test_one_sample_each():
    done = {"a": [rollout("a", True)], "b": [rollout("b", False, "harness_failed")],
            "c": [rollout("c", False, "infra_failed")]}
    found = scores(REPOSITORIES, done, seed=0)
    assert found["pass@1"]["passed"] == 1 and found["pass@1"]["total"] == 2, "what failed for our reasons is apart"
    assert found["ends"] == {"graded": 1, "harness_failed": 1, "infra_failed": 1}
    assert found["repositories"] == {"o__one": {"pass@1": found["pass@1"]}} and found["pass@1"]["ci95"][0] > 0.05
    assert found["instances"]["c"][0]["end"] == "infra_failed" and found["instances"]["a"][0]["tokens_out"] == 2


def test_several_samples_each():
    done = {"a": [rollout(f"a{n}", n < 1) for n in range(4)], "b": [rollout(f"b{n}", n < 2) for n in range(4)],
            "c": [rollout(f"c{n}", False, "infra_failed" if n else "graded") for n in range(4)]}
    found = scores(REPOSITORIES, done, seed=0)
    assert found["pass@1"]["mean"] == pytest.approx((0.25 + 0.5 + 0.0) / 3) and found["pass@1"]["instances"] == 3
    assert found["pass@2"]["mean"] == pytest.approx((0.5 + 5 / 6) / 2) and found["pass@2"]["instances"] == 2
    assert found["pass@4"]["mean"] == 1.0 and "pass@8" not in found
    assert found["repositories"]["o__two"]["pass@1"]["rate"] == 0.0, "one sample was judged"
    assert found["repositories"]["o__one"]["pass@2"]["instances"] == 2


def test_nothing_judged_is_no_zero():
    with pytest.raises(NothingJudged, match="said"):
        scores(REPOSITORIES, {"a": [rollout("a", False, "infra_failed")]}, seed=0)


def test_predictions_are_in_swe_benchs_format():
    assert prediction("m", "a", "diff\n") == {
        "instance_id": "a", "model_name_or_path": "m", "model_patch": "diff\n"}


def test_the_models_hash_is_of_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    first = model_digest(tmp_path)
    (tmp_path / "trainer.log").write_text("x")
    assert model_digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert model_digest(tmp_path) != first


def record(path, passed, data="d"):
    instances = {f"i{n}": [{"end": "graded", "passed": n < passed}] for n in range(20)}
    path.write_text(json.dumps({"data": {"sha256": data}, "instances": instances}))
    return str(path)


def test_two_records_are_compared(tmp_path, capsys):
    assert main(["compare", record(tmp_path / "a", 4), record(tmp_path / "b", 12)]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["only_second"] == "8" and float(said["mcnemar_p"]) == pytest.approx(2 / 2**8)
    assert float(said["difference"]) == pytest.approx(0.4)


def test_records_of_different_tasks_are_not(tmp_path, capsys):
    assert main(["compare", record(tmp_path / "a", 4), record(tmp_path / "b", 12, "other")]) == 2
    assert main(["compare", record(tmp_path / "a", 4), str(tmp_path / "none")]) == 2
    assert "different tasks" in capsys.readouterr().err


@pytest.mark.parametrize("instances", [["a"], {"a": ["b"]}, {"a": [{"end": "graded"}]}])
def test_what_is_no_record_is_named(tmp_path, capsys, instances):
    (tmp_path / "b").write_text(json.dumps({"data": {"sha256": "d"}, "instances": instances}))
    assert main(["compare", record(tmp_path / "a", 4), str(tmp_path / "b")]) == 2
    assert f"{tmp_path / 'b'} is no results.json" in capsys.readouterr().err
