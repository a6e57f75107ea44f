"""What `lightning-ray capture` runs and reports: a harness in a real sandbox or without, through the real proxy. The
engine is scripted here; with a real one the command runs in `make test-slow`.
"""

import json

import pytest
import yaml

from lightning_ray.harness.capture import run_harness, settings, summary
from lightning_ray.harness.report import lines
from tests.integration.test_runner import FIX, TASK
from tests.unit.proxy_parts import InProcess, codec_of, model_dir, proxy_of

HARNESS = """
import json, os, urllib.request

def ask(url, **body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps({"model": "policy", **body}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)

def chat(messages, **fields):
    answer = ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", messages=messages, **fields)
    return answer["choices"][0]["message"]

kept = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY",
        "ANTHROPIC_AUTH_TOKEN")
print(json.dumps({name: os.environ.get(name) for name in kept}))
messages = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "What is wrong?"}]
messages += [chat(messages, temperature=0.2), {"role": "user", "content": "And now?"}]
chat(messages, temperature=0.2)
chat([{"role": "user", "content": "Give it a title."}], response_format={"type": "json_object"})
ask(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", max_tokens=9, messages=[{"role": "user", "content": "Why?"}])
raise SystemExit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """As far as the checks of input look; the engine needs no weights here."""
    place = model_dir("hermes", tmp_path_factory.mktemp("models"))
    (place / "model.safetensors").write_bytes(b"")
    return place


async def captured(model, directory, *, command=("python3", "-c", HARNESS), **given):
    what = settings(model=model, command=command, parity=False, **given)
    server, _ = proxy_of(codec_of("hermes"), lambda request: "It subtracts.")
    await server.start()
    try:
        trajectory = await run_harness(what, directory, InProcess(server))
    finally:
        await server.stop()
    return what, trajectory, summary(what, trajectory, None)


@pytest.mark.parametrize("sandboxed", [True, False])
async def test_a_harness_is_run_once_and_the_report_says_what_a_trainer_would_get(model, tmp_path, sandboxed):
    _, trajectory, report = await captured(model, tmp_path, sandboxed=sandboxed)
    told = json.loads(trajectory.notes["harness_log"].splitlines()[0])
    url = told["ANTHROPIC_BASE_URL"]
    assert told["OPENAI_BASE_URL"] == told["OPENAI_API_BASE"] == f"{url}/v1"
    assert all(told[name] for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"))

    assert report.ending.exit_status == "exit code 0", report.ending
    assert report.ending.sandbox == ("bubblewrap" if sandboxed else "none")
    assert (report.ending.reward is not None) == sandboxed, "without a sandbox nothing is graded"
    assert (report.calls, report.dialects) == (4, {"chat": 3, "messages": 1})
    assert [branch.calls for branch in report.branches] == [[0, 1], [2], [3]]
    assert report.relations == {"new_conversation": 3, "continued": 1}
    assert report.overridden == {"temperature": [0.2]}
    assert report.sampled == report.trainable + report.masked["constrained"]
    assert any("constrained decoding" in warning and "1 call" in warning for warning in report.warnings)
    assert any("without isolation" in warning for warning in report.warnings) != sandboxed
    text = "\n".join(lines(report))
    assert "calls      4 (chat 3, messages 1)" in text and "branches   3" in text and "You fix bugs." in text
    assert json.loads(json.dumps(report.as_dict()))["masked"] == report.masked


async def test_what_the_trainer_would_leave_out_and_how_a_failed_harness_ended_is_reported(model, tmp_path):
    _, _, report = await captured(model, tmp_path, sandboxed=False, overrides=[
        "--capture.train", "main", "--harness.env.STATUS", "'3'"])
    assert report.ending.end == "harness_failed" and report.ending.exit_status == "exit code 3"
    assert report.trainable == report.branches[0].sampled
    assert set(report.masked) == {"constrained", "excluded"}
    assert any("exit code 3" in warning and "reward 0" in warning for warning in report.warnings)


async def test_a_task_of_one_s_own_is_worked_on_and_graded(model, tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text(TASK.model_dump_json() + "\n")
    _, trajectory, report = await captured(model, tmp_path, sandboxed=True, task=file, command=[
        "sh", "-c", FIX.removeprefix("run: ") + "; echo {task}"])
    assert TASK.problem_statement in trajectory.notes["harness_log"] and "a + b" in trajectory.patch
    assert (report.ending.end, report.ending.reward) == ("graded", 1.0)
    assert any("no call was made" in warning for warning in report.warnings)


async def test_the_harness_of_a_configuration_is_run_where_no_command_is_given(model, tmp_path):
    """A Python harness, in a worker process of its own."""
    file, steps = tmp_path / "job.yaml", ["model", FIX]
    file.write_text(yaml.safe_dump({"harness": {
        "kind": "python", "entry": "tests.integration.harnesses:run", "settings": {"steps": steps}}}))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(TASK.model_dump_json() + "\n")
    _, _, report = await captured(model, tmp_path, command=(), config=file, task=tasks)
    assert (report.ending.exit_status, report.ending.reward) == ("Submitted", 1.0)
    assert (report.calls, report.trainable) == (1, report.sampled)
