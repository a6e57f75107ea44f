"""A source package made into tasks, the whole way: sandboxes, pytest, validation, files.

The package is written by the test. Downloading one from the registry is a test of its own, skipped where there is none.
"""

import asyncio
import base64
import json

import pytest

from jobs.prepare_swe_smith import main
from lightning_ray.config import ConfigError
from lightning_ray.tasks import files, from_sdist
from lightning_ray.tasks.from_sdist import bugs, unpack
from tests.openai_server import serving
from tests.sandboxes import agent_patch, graded
from tests.unit.test_from_sdist import MEMBERS, SOURCE, archive

OTHERS = {
    "wares==2.0": {"wares.py": SOURCE, "test_wares.py": "from wares import total, untested\n\n\ndef test_total():\n"
                   "    assert total([1, 2]) == 3\n\n\ndef test_both():\n    assert untested(2) == 4\n"},
    "lonely==1.0": {**MEMBERS, "tests/test_shop.py": "import not_installed\n\n\ndef test_it():\n    pass\n"},
}


def make(tmp_path, *more):
    archive(tmp_path / "cache")
    return main(["sdist", "--from-sdist", "shop==1.0", "--mutations", "4", "--cache", str(tmp_path / "cache"),
                 "--out", str(tmp_path / "out"), *more])


def test_of_several_packages_one_that_cannot_be_tested_here_is_named_and_left_out(tmp_path, capsys):
    words = []
    for name, members in OTHERS.items():
        archive(tmp_path / "cache", members, name)
        words += ["--from-sdist", name]
    assert make(tmp_path, *words, "--test", "1") == 0, capsys.readouterr().err
    assert "left out. --from-sdist: no test of lonely==1.0 passes" in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["packages"].keys() == {"shop==1.0", "wares==2.0"} and report["read"] == 8
    assert report["unusable"].keys() == {"lonely==1.0"} and "not_installed" in report["unusable"]["lonely==1.0"]
    parts = [{task.repo for task in files.load(tmp_path / "out" / f"{name}.jsonl")} for name in ("train", "test")]
    assert parts[0] | parts[1] == {"pypi/shop", "pypi/wares"} and not parts[0] & parts[1]


async def test_a_package_becomes_tasks_that_the_grader_tells_apart(tmp_path, capsys):
    done = await asyncio.to_thread(make, tmp_path)
    assert done == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    tasks = files.load(tmp_path / "out" / "train.jsonl")
    assert report["read"] == 4 and report["dropped"]["survived"] >= 1, "nobody tests `untested`"
    assert report["packages"]["shop==1.0"]["tests"] == {"stable": 3} and report["statements"] == "template"
    assert len(tasks) == 4 - sum(report["dropped"].values()) >= 1
    for task in tasks:
        assert task.grader == "swe" and "tests/test_shop.py::test_adds[1]" in [*task.FAIL_TO_PASS, *task.PASS_TO_PASS]
        assert task.files["shop/__init__.py"] != SOURCE and "tests/test_shop.py" not in task.files
        assert "assert total(" in task.problem_statement
    undone = "base64 -d > p <<< " + base64.b64encode(tasks[0].patch.encode()).decode() + "; git apply -R p; rm p"
    for script, passed in ((undone, True), ("echo '# nothing' >> shop/__init__.py", False)):
        patch = await agent_patch(tasks[0], tmp_path / "work", script)
        grade = await graded(tasks[0], tmp_path / "work", patch)
        assert (grade.passed, grade.reward) == (passed, float(passed)), grade
        assert passed or grade.reason.startswith("tests_failed: tests/test_shop.py::")


def reports(request):
    return {"content": "<think>easy</think>A report. " + request["messages"][0]["content"]}


def test_a_model_writes_statements_and_is_not_shown_the_change(tmp_path, capsys):
    with serving(reports) as model:
        done = make(tmp_path, "--statements-url", model.url, "--statements-model", "m")
    assert done == 0, capsys.readouterr().err
    tasks = files.load(tmp_path / "out" / "train.jsonl")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["statements"] == "m"
    for task in tasks:
        assert task.problem_statement.startswith("A report. ") and "assert total(" in task.problem_statement
        assert "result" not in task.problem_statement, "a line of the code under test"


@pytest.mark.parametrize("words", [("--statements-url", "http://127.0.0.1:1/v1"), ("--statements-model", "m")])
def test_an_endpoint_without_a_model_is_refused(tmp_path, capsys, words):
    assert make(tmp_path, *words) == 2
    assert "Give the endpoint" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.timeout(150)
def test_a_package_from_the_registry(tmp_path, monkeypatch):
    monkeypatch.setattr(from_sdist, "DOWNLOAD_TIMEOUT_S", 100)
    try:
        path = from_sdist.download("inflection==0.5.1", tmp_path)
    except ConfigError as error:
        pytest.skip(f"no package registry: {error}")
    assert len(bugs(unpack(path, "inflection==0.5.1"), 1000, 0)) > 100
