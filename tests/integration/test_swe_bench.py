"""SWE-bench graded here: real sandboxes, swebench's own parser and reports, every kind of prediction."""

import json

import pytest

from jobs.evaluate_swe_bench import main
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
