"""Task files: what is read, and what a malformed line says."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from lightning_ray.config import ConfigError, TasksConfig
from lightning_ray.tasks.files import load
from lightning_ray.tasks.one_line_bugs import generate
from lightning_ray.tasks.source import load_tasks

GOOD = {"instance_id": "a.1", "problem_statement": "It fails.", "FAIL_TO_PASS": ["t::one"], "PASS_TO_PASS": []}


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_generated_tasks_survive_a_file(tmp_path):
    tasks = generate(TasksConfig(train=5, heldout=0)).train
    assert load(write(tmp_path / "tasks.jsonl", *(task.model_dump_json() for task in tasks))) == tasks


def test_published_forms_are_read(tmp_path):
    row = GOOD | {"FAIL_TO_PASS": '["t::one", "t::two"]', "repo": None, "created_at": "2024"}
    (task,) = load(write(tmp_path / "tasks.jsonl", json.dumps(row), ""))
    assert task.FAIL_TO_PASS == ["t::one", "t::two"] and task.repo == "" and task.created_at == "2024"


def test_parquet(tmp_path):
    rows = [GOOD, GOOD | {"instance_id": "a.2", "FAIL_TO_PASS": ["t::two"]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    assert [task.instance_id for task in load(tmp_path / "tasks.parquet")] == ["a.1", "a.2"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"instance_id": "a.2", ', ["line 2", "JSON"]),
        ("[1, 2]", ["line 2", "[1, 2]", "object"]),
        (json.dumps({"instance_id": "a.2"}), ["line 2", "problem_statement", "no value"]),
        (json.dumps(GOOD | {"instance_id": "a.2", "problem_statement": ""}), ["line 2", "problem_statement", "''"]),
        (json.dumps(GOOD | {"instance_id": "a.2", "PASS_TO_PASS": 7}), ["line 2", "PASS_TO_PASS", "7"]),
        (json.dumps(GOOD | {"instance_id": "a.2", "FAIL_TO_PASS": "t::one"}), ["line 2", "FAIL_TO_PASS", "'t::one'"]),
        (json.dumps(GOOD), ["line 2", "instance_id", "'a.1'", "line 1"]),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, named):
    path = write(tmp_path / "tasks.jsonl", json.dumps(GOOD), line)
    with pytest.raises(ConfigError) as error:
        load(path)
    for part in [str(path), *named]:
        assert part in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 2"):
        load(path)


def test_a_malformed_row_of_parquet_is_named(tmp_path):
    rows = [GOOD, GOOD | {"instance_id": ""}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    with pytest.raises(ConfigError, match=r"tasks\.parquet, row 2: field instance_id"):
        load(tmp_path / "tasks.parquet")


def test_missing_empty_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="there is no task file"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="holds no task"):
        load(write(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        load(write(tmp_path / "broken.parquet", "no"))


def test_held_out_tasks_that_would_not_be_used_are_bad_input(tmp_path):
    source = write(tmp_path / "tasks.jsonl", json.dumps(GOOD))
    for settings, named in (({"source": "one_line_bugs", "heldout_source": source}, "one_line_bugs"),
                            ({"source": str(source), "heldout_source": tmp_path / "none.jsonl"}, "none.jsonl")):
        with pytest.raises(ConfigError, match=rf"tasks\.heldout_source: .*{named}"):
            load_tasks(TasksConfig(**settings))
