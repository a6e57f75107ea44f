"""SWE-bench's files: what is read, what is refused, and what its harness's logs say."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from lightning_ray.config import Config, ConfigError
from lightning_ray.evaluation.remote_model import RemoteModel, configured
from lightning_ray.tasks.swe_bench import load, load_predictions, prediction, task_of
from lightning_ray.tasks.swe_bench_grading import Outcome, counted, outcome_of, read_log, verdict_of
from tests.swe_bench_instances import instance


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_every_kind_of_file_is_read_and_test_lists_may_be_text(tmp_path, suffix):
    rows = [{**instance(name), "FAIL_TO_PASS": json.dumps(instance(name)["FAIL_TO_PASS"])} for name in ("add", "gap")]
    path = write(tmp_path / f"data{suffix}", rows)
    found = load(path)
    assert [each["instance_id"] for each in found] == ["shop__shop-add", "shop__shop-gap"]
    assert found[0]["FAIL_TO_PASS"] == instance("add")["FAIL_TO_PASS"]
    assert load(path, ["shop__shop-gap"]) == found[1:]


@pytest.mark.parametrize(("change", "words"), [
    ({"eval_script": None}, "field eval_script: None is no text. The columns image"),
    ({"FAIL_TO_PASS": 3}, "field FAIL_TO_PASS: 3 is no list"), ({"FAIL_TO_PASS": "x"}, "field FAIL_TO_PASS"),
    ({"instance_id": "shop__shop-gap"}, "came earlier"),
])
def test_faults_are_named_with_their_place(tmp_path, change, words):
    path = write(tmp_path / "data.jsonl", [instance("gap"), {**instance("add"), **change}])
    with pytest.raises(ConfigError, match=words) as raised:
        load(path)
    assert "line 2" in str(raised.value)


def test_an_id_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no instance 'nowhere'"):
        load(write(tmp_path / "data.jsonl", [instance("gap")]), ["nowhere"])


def test_the_task_shows_the_agent_no_test(tmp_path):
    task = task_of(instance("add"), tmp_path)
    assert task.directory == str(tmp_path) and task.grading["whole_patch"] is True and task.patch == ""
    assert "unittest" not in task.problem_statement


def test_predictions_are_read_in_each_of_the_formats(tmp_path):
    first = prediction("m", "a", "diff\udcff")
    assert first["model_patch"] == "diff?"
    for suffix, rows in ((".jsonl", [first]), (".json", [first])):
        assert load_predictions(write(tmp_path / f"p{suffix}", rows)) == {"a": first}
    (tmp_path / "by_id.json").write_text(json.dumps({"a": {**first, "model_patch": None}}))
    assert load_predictions(tmp_path / "by_id.json")["a"]["model_patch"] == ""
    with pytest.raises(ConfigError, match="line 2: a second prediction for 'a'"):
        load_predictions(write(tmp_path / "twice.jsonl", [first, first]))


@pytest.mark.parametrize(("reason", "verdict"), [
    ("passed", "resolved"), ("tests_failed: a", "unresolved"), ("no_test_results", "unresolved"),
    ("empty_patch", "empty_patch"), ("patch_rejected: x", "patch_rejected"), ("timeout", "timeout"),
    ("environment_failed: out_of_memory", "error"),
])
def test_reasons_in_swe_benchs_words(reason, verdict):
    assert verdict_of(reason) == verdict


@pytest.mark.parametrize(("files", "verdict"), [
    ({"report.json": json.dumps({"a": {"resolved": True}})}, "resolved"),
    ({"report.json": json.dumps({"a": {"resolved": False}})}, "unresolved"),
    ({"report.json": json.dumps({"a": {"resolved": False, "infra_failure": True, "infra_failure_reason": "x"}})},
     "error"),
    ({"run_instance.log": ">>>>> Patch Apply Failed:\nx"}, "patch_rejected"),
    ({"run_instance.log": "x", "test_output.txt": "\n\nTimeout error: 3 seconds exceeded."}, "timeout"),
    ({"run_instance.log": "no such image"}, "error"), ({}, "error"),
])
def test_what_the_harness_wrote_is_understood(tmp_path, files, verdict):
    place = tmp_path / "o__m" / "a"
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / name).write_text(text)
    assert read_log(prediction("o/m", "a", "diff\n"), tmp_path).verdict == verdict
    assert read_log(prediction("o/m", "a", ""), tmp_path).verdict == "empty_patch"


@pytest.mark.parametrize(("end", "reason", "verdict"), [
    ("graded", "passed", "resolved"), ("graded", "timeout", "timeout"), ("infra_failed", "sandbox: gone", "error"),
    ("harness_failed", "Timeout: after 9 s", "unresolved"),
])
def test_rollouts_in_swe_benchs_words(end, reason, verdict):
    assert outcome_of({"end": end, "reason": reason, "seconds": 1.0}).verdict == verdict


def test_what_has_no_prediction_counts_against_swe_benchs_rate():
    found = counted([{"a": Outcome("resolved", "passed"), "b": Outcome("timeout", "timeout")}], 4)
    assert found["swe_bench"] == {"resolved": 1, "instances": 4, "rate": 0.25}
    assert found["verdicts"]["timeout"] == 1 and found["verdicts"]["unresolved"] == 0


def test_a_remote_model_is_asked_for_the_configured_sampling():
    remote = RemoteModel("http://h:1/v1/", "m", "secret")
    assert remote.base_url == "http://h:1" and "secret" not in repr(remote)
    config = configured(Config.build({"evaluation": {"temperature": 0.3}, "harness": {"settings": {
        "model": {"model_class": "litellm", "model_kwargs": {"max_tokens": 7}}}}}), remote)
    assert config.policy.name == "m"
    assert config.harness.settings["model"] == {
        "model_class": "litellm", "model_kwargs": {"temperature": 0.3, "max_tokens": 7}}


def test_a_remote_model_needs_a_url_and_a_python_harness():
    with pytest.raises(ConfigError, match="http://HOST:PORT/v1"):
        RemoteModel("h:1", "m")
    with pytest.raises(ConfigError, match=r"harness\.kind"):
        configured(Config.build({"harness": {"kind": "command", "command": ["a"]}}), RemoteModel("http://h/v1", "m"))
