"""A source package made into tasks, the whole way: sandboxes, pytest, validation, files.

The package is written by the test. Downloading one from the registry is a test of its own, skipped where there is none.
"""

import json

import pytest

from jobs.prepare_swe_smith import main
from lightning_ray.config import ConfigError
from lightning_ray.tasks import files, from_sdist
from lightning_ray.tasks.from_sdist import bugs, unpack
from tests.unit.test_from_sdist import SOURCE, archive


def test_a_package_becomes_tasks(tmp_path, capsys):
    archive(tmp_path / "cache")
    done = main(["sdist", "--from-sdist", "shop==1.0", "--mutations", "4", "--cache", str(tmp_path / "cache"),
                 "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert done == 0, said.err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    tasks = files.load(tmp_path / "out" / "train.jsonl")
    assert report["read"] == 4 and report["dropped"]["survived"] >= 1, "nobody tests `untested`"
    assert len(tasks) == 4 - sum(report["dropped"].values()) >= 1
    for task in tasks:
        assert task.grader == "swe" and "tests/test_shop.py::test_adds[1]" in [*task.FAIL_TO_PASS, *task.PASS_TO_PASS]
        assert task.files["shop/__init__.py"] != SOURCE and "tests/test_shop.py" not in task.files
        assert "assert total(" in task.problem_statement


@pytest.mark.timeout(150)
def test_a_package_from_the_registry(tmp_path, monkeypatch):
    monkeypatch.setattr(from_sdist, "DOWNLOAD_TIMEOUT_S", 100)
    try:
        path = from_sdist.download("inflection==0.5.1", tmp_path)
    except ConfigError as error:
        pytest.skip(f"no package registry: {error}")
    assert len(bugs(unpack(path, "inflection==0.5.1"), 1000, 0)) > 100
