"""SWE-smith's data: what is filtered out and why, splits that share no repository, a hash that says what was used."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.prepare_swe_smith import main
from lightning_ray.config import ConfigError
from lightning_ray.tasks import files
from lightning_ray.tasks.swe_smith import Filters, digest, filtered, repository, split


def row(number, repo="swesmith/acme__shop.0123abcd", **more):
    return {"instance_id": f"i{number}", "repo": repo, "problem_statement": "It fails.", "patch": f"bug {number}",
            "FAIL_TO_PASS": ["t::a"], "PASS_TO_PASS": '["t::b"]', "image_name": "image", **more}


def kept(rows, **settings):
    return filtered(((f"line {number}", each) for number, each in enumerate(rows)), Filters(**settings))


@pytest.mark.parametrize(("changes", "settings", "reason"), [
    ({"problem_statement": " \n"}, {}, "no_statement"),
    ({"problem_statement": None}, {}, "no_statement"),
    ({"FAIL_TO_PASS": "[]"}, {}, "no_failing_test"),
    ({"PASS_TO_PASS": [f"t::{number}" for number in range(200)]}, {}, "too_many_tests"),
    ({}, {"excluded": frozenset({"Acme/Shop"})}, "excluded_repository"),
    ({}, {"snapshots": frozenset({"another"})}, "missing_snapshot"),
    ({"instance_id": "i0"}, {}, "duplicate_id"),
    ({"patch": "bug 0"}, {}, "duplicate_bug"),
])
def test_each_reason_drops_and_is_counted(changes, settings, reason):
    first = row(0, repo="other/thing") if reason != "duplicate_bug" else row(0)
    if "snapshots" in settings:
        settings = {"snapshots": settings["snapshots"] | {"i0"}}
    rows, report = kept([first, {**row(1), **changes}], **settings)
    assert [each["instance_id"] for each in rows] == ["i0"]
    assert report.dropped == {reason: 1} and report.read == 2 == report.kept + 1
    assert any(reason in line for line in report.lines())


def test_exactly_the_limit_of_tests_is_kept():
    rows, _ = kept([row(0, PASS_TO_PASS=[f"t::{number}" for number in range(199)])])
    assert len(rows) == 1


@pytest.mark.parametrize("bad", [{"repo": "a/b"}, row(0, FAIL_TO_PASS="{"), row(0, FAIL_TO_PASS='"x"'), ["x"]])
def test_a_malformed_instance_is_named(bad):
    with pytest.raises(ConfigError, match="line 1"):
        kept([row(5), bad])


def test_all_forms_of_a_repository_are_one():
    assert {repository(name) for name in ("swesmith/Acme__Shop.0123abcd", "acme/shop", "https://host/acme/shop",
                                          "swesmith/acme__shop.fffffff0", "acme__shop")} == {"acme__shop"}


@given(st.lists(st.integers(1, 30), min_size=3, max_size=12), st.integers(0, 20), st.integers(0, 20), st.integers(0, 5))
def test_splits_share_no_repository_and_lose_nothing(sizes, validation, test, seed):
    rows = [row(f"{repo}-{number}", repo=f"swesmith/o__r{repo}.{number % 2:07x}")
            for repo, size in enumerate(sizes) for number in range(size)]
    try:
        parts = split(rows, validation=validation, test=test, seed=seed)
    except ConfigError:
        assert validation + test > 0
        return
    owners = [{repository(each["repo"]) for each in part} for part in parts.named().values()]
    assert not owners[0] & owners[1] and not owners[0] & owners[2] and not owners[1] & owners[2]
    assert sum(map(len, parts.named().values())) + parts.unused == len(rows)
    assert len(parts.validation) <= validation and len(parts.test) <= test and parts.train
    assert split(rows[::-1], validation=validation, test=test, seed=seed) == parts


def test_digest_is_of_the_content_and_its_order():
    first, second = row(0), row(1)
    assert digest([first, second]) == digest([dict(reversed(first.items())), second]) != digest([second, first])


def test_the_job_writes_splits_report_and_hash(tmp_path, capsys):
    rows = [row(number, repo=f"swesmith/o__r{number % 5}.0123abc") for number in range(50)]
    rows[7]["problem_statement"] = ""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows[:25]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[25:]), tmp_path / "b.parquet")
    arguments = ["files", str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet"), "--validation", "6", "--test", "4"]
    assert main([*arguments, "--out", str(tmp_path / "one")]) == 0
    assert main([*arguments, "--out", str(tmp_path / "two")]) == 0
    report = json.loads((tmp_path / "one" / "report.json").read_text())
    assert report["read"] == 50 and report["dropped"] == {"no_statement": 1}
    assert report["splits"]["validation"]["instances"] == 6 and report["splits"]["test"]["instances"] == 4
    assert report == json.loads((tmp_path / "two" / "report.json").read_text())
    tasks = files.load(tmp_path / "one" / "train.jsonl")
    assert {task.grader for task in tasks} == {"swe"} and len(tasks) == report["splits"]["train"]["instances"]
    assert "no_statement" in capsys.readouterr().out


def test_the_job_says_what_is_wrong(tmp_path, capsys):
    assert main(["files", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
