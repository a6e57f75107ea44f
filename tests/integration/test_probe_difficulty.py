"""jobs/probe_difficulty.py on a handful of tasks: real runners, harness processes, sandboxes and graders; the model's
words are those of a small server."""

import json
from collections import Counter

import pyarrow.parquet
import pytest
import yaml

from jobs.probe_difficulty import main
from lightning_ray.tasks import files
from lightning_ray.tasks.stream import TaskStream
from tests.openai_server import serving
from tests.sandboxes import make_task


@pytest.fixture
def model():
    """Solves `easy` always, `odd` every second time, and `hard` never."""
    asked: Counter[str] = Counter()

    def say(request):
        name = request["messages"][0]["content"]
        asked[name] += 1
        right = name == "easy" or (name == "odd" and asked[name] % 2 == 0)
        return {"content": "a + b" if right else "a * b"}

    with serving(say) as served:
        yield served


@pytest.fixture
def words(tmp_path, model):
    tasks = [make_task(instance_id=name, problem_statement=name) for name in ("easy", "odd", "hard", "harder")]
    tasks[3] = tasks[3].model_copy(update={"problem_statement": "hard"})
    (tmp_path / "tasks.jsonl").write_text("".join(task.model_dump_json() + "\n" for task in tasks))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({
        "tasks": {"source": str(tmp_path / "tasks.jsonl"), "heldout_source": None}, "schedule": {"group_size": 4},
        "harness": {"entry": "tests.integration.harnesses:answer", "workers": 1}}))
    return ["--config", str(config), "--url", model.url, "--model", "far", "--keep-failing", "0.5",
            "--out", str(tmp_path / "out")]


def test_probing_keeps_what_can_be_learned_from_and_goes_on_where_it_stopped(
        words, model, tmp_path, ray_session, capsys):
    out = tmp_path / "out"
    assert main([*words, "-k", "2"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "8  rollouts of 4 tasks" in said and "1  always_passing: all pass" in said and "1  mixed" in said
    report = json.loads((out / "report.json").read_text())
    assert report["verdicts"] == {"mixed": 1, "always_failing_kept": 1, "always_failing": 1, "always_passing": 1,
                                  "not_judged": 0}
    assert report["ended"] == {"tests_failed": 5, "passed": 3}
    rates = [json.loads(line) for line in (out / "rates.jsonl").read_text().splitlines()]
    assert [rate["pass_rate"] for rate in rates] == [1.0, 0.5, 0.0, 0.0]
    assert pyarrow.parquet.read_table(out / "rates.parquet").to_pylist() == rates
    kept = files.load(out / "tasks.jsonl")
    assert kept[0].instance_id == "odd" and kept[0].weight > kept[1].weight > 0
    assert {TaskStream(kept, seed=0).next().instance_id for _ in range(4)} <= {"odd", "hard", "harder"}

    lines = sorted((out / "outcomes.jsonl").read_text().splitlines(keepends=True), key=lambda line: '"easy"' in line)
    (out / "outcomes.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote
    before = len(model.asked)
    assert main([*words, "-k", "2"]) == 0
    assert len(model.asked) == before + 1 and json.loads((out / "report.json").read_text()) == report
    assert main([*words, "-k", "2"]) == 0
    assert len(model.asked) == before + 1  # nothing is left to do, and nothing is started


@pytest.mark.parametrize(("more", "said"), [
    (["-k", "1"], "-k: 1"), (["--keep-failing", "2"], "--keep-failing: 2.0"),
    (["--tasks.source", "nowhere"], "nowhere"),
])
def test_bad_input_is_named_before_anything_starts(words, tmp_path, capsys, more, said):
    assert main([*words, *more]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_other_settings_are_not_counted_together(words, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "probe.json").write_text(json.dumps({"policy": {"name": "another"}}))
    assert main(words) == 2
    assert "was measured with another policy" in capsys.readouterr().err
