"""SWE-bench graded here: real sandboxes, swebench's own parser and reports, every kind of prediction; and rollouts of a
model behind a URL, by mini-SWE-agent with its own swebench configuration.
"""

import json

import pytest
import yaml

from jobs.evaluate_swe_bench import main
from tests.openai_server import serving
from tests.swe_bench_instances import checkout, instance, predictions

REASONS = {"resolved": "passed", "unresolved": "tests_failed"}
"""Of a verdict; a patch that cannot even be imported has `no_test_results`, and is unresolved as well."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("swe_bench")
    given = predictions()
    (root / "data.json").write_text(json.dumps([instance(name) for name in given]))
    for number, patches in enumerate((given, {name: (instance(name)["patch"], "") for name in ("add", "gap")})):
        (root / f"predictions-{number}.jsonl").write_text("".join(json.dumps({
            "instance_id": f"shop__shop-{name}", "model_name_or_path": "o/m", "model_patch": patch}) + "\n"
            for name, (patch, _) in patches.items()))
    for name in given:
        checkout(name, root / "checkouts" / f"shop__shop-{name}")
    return root


def test_predictions_of_every_kind_get_the_verdict_that_is_due(data, tmp_path, capsys):
    done = main(["grade", str(data / "data.json"), "-p", str(data / "predictions-0.jsonl"), "-p",
                 str(data / "predictions-1.jsonl"), "--checkouts", str(data / "checkouts"), "--out",
                 str(tmp_path / "out"), "--timeout", "4"])
    said = capsys.readouterr()
    assert done == 0, said.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    reasons = {name: members[0]["reason"].partition(":")[0] for name, members in results["instances"].items()}
    assert reasons == {f"shop__shop-{name}": REASONS.get(verdict, verdict)
                       for name, (_, verdict) in predictions().items()} | {"shop__shop-mean": "no_test_results"}
    assert results["verdicts"] == {"resolved": 4, "unresolved": 3, "empty_patch": 1, "patch_rejected": 1, "timeout": 1,
                                   "error": 0}
    assert results["swe_bench"] == {"resolved": 2, "instances": 8, "rate": 0.25}
    assert results["pass@2"]["instances"] == 2 and results["pass@2"]["mean"] == 1.0
    assert set(results["repositories"]) == {"shop__odd", "shop__even"} and len(results["predictions"]) == 2
    assert results["model"] == {"name": "o/m"} and results["data"]["instances"] == 8 and results["versions"]["swebench"]
    assert "pass@1" in said.out and "1 timeout" in said.out


@pytest.mark.parametrize(("words", "said"), [
    (["-p", "nowhere.jsonl"], "no file nowhere.jsonl"), (["-i", "nowhere"], "no instance 'nowhere'"),
    (["--checkouts", "nowhere"], "lacks 8 of 8"), (["--sandbox.backend", "nothing"], "sandbox.backend"),
])
def test_bad_input_is_named_before_anything_is_judged(data, tmp_path, capsys, words, said):
    given = ["-p", str(data / "predictions-0.jsonl")] if "-p" not in words else []
    assert main(["grade", str(data / "data.json"), *given, "--out", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out" / "results.json").exists()


def mends_add(request):
    """One tool call, which mends `add` and spoils everything else."""
    change = "s/a - b/a + b/" if "add() is wrong" in json.dumps(request["messages"]) else "s/return/return 1 +/"
    command = f"sed -i '{change}' shop.py; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"content": "So.", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_a_model_behind_a_url_is_measured(data, tmp_path, capsys, ray_session, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({
        "run": {"dir": str(tmp_path), "name": "url"}, "evaluation": {"samples": 2, "temperature": 0.5},
        "harness": {"workers": 1, "settings": {"config": "swebench.yaml", "agent": {"step_limit": 3, "cost_limit": 0},
                                               "model": {"model_class": "litellm"}}}}))
    monkeypatch.setenv("MODEL_KEY", "sesame")
    with serving(mends_add) as model:
        done = main(["run", str(data / "data.json"), "--config", str(config), "--checkouts", str(data / "checkouts"),
                     "-i", "shop__shop-add", "-i", "shop__shop-gap", "--url", model.url, "--model", "far",
                     "--key-env", "MODEL_KEY"])
    said = capsys.readouterr()
    assert done == 0, said.err
    results = json.loads((tmp_path / "url" / "results.json").read_text())
    passed = {name: [each["passed"] for each in members] for name, members in results["instances"].items()}
    assert passed == {"shop__shop-add": [True, True], "shop__shop-gap": [False, False]}, results["instances"]
    assert results["pass@1"]["mean"] == results["pass@2"]["mean"] == 0.5
    assert results["model"] == {"name": "far", "url": model.url}
    assert results["swe_bench"] == {"resolved": 1, "instances": 2, "rate": 0.5}
    assert results["verdicts"]["unresolved"] == 2 and results["grading"]["by"] == "here"
    assert results["reasons"] == {"passed": 2, "tests_failed": 2} and results["data"]["source"] == "data.json"
    assert [(each["model"], each["temperature"], each["key"]) for each in model.asked] == [("far", 0.5, "sesame")] * 4
    second = [json.loads(line) for line in (tmp_path / "url" / "predictions-1.jsonl").read_text().splitlines()]
    assert "+    return a + b" in second[0]["model_patch"] and second[0]["model_name_or_path"] == "far"
