"""jobs/swe_qwen3_5_9b.yaml with a tiny Qwen3.5: real vLLM, DeepSpeed, sandboxes, grading by pytest, and mini-SWE-agent
with its own swebench configuration. What is overridden is the size of things and what a CPU cannot do.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ray.trajectory.archive import read_rollouts
from tests.recipes.policy import STATEMENT, make_policy
from tests.swe_bench_instances import checkout, instance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RECIPE = Path(__file__).parents[2] / "jobs" / "swe_qwen3_5_9b.yaml"
SHOP = "def total(a, b):\n    return a - b\n"
BUG = """\
diff --git a/shop.py b/shop.py
--- a/shop.py
+++ b/shop.py
@@ -1,2 +1,2 @@
 def total(a, b):
-    return a + b
+    return a - b
"""
TESTS = "from shop import total\n\n\ndef test_total():\n    assert total(3, 5) == 8\n\n\ndef test_zero():\n" \
        "    assert total(0, 0) == 0\n"


SIZES = {
    "run.name": "recipe", "policy.max_context": 4096, "harness.workers": 1, "runners.count": 1, "runners.cpus": 0.5,
    "sampling.max_tokens": 160, "generator.replicas": 1, "generator.enforce_eager": True, "sandbox.memory_mb": 1024,
    "sandbox.disk_mb": 512,
}
"""What a laptop has less of."""


def words(**settings):
    values = {**SIZES, **{key.replace("__", "."): value for key, value in settings.items()}}
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def run(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps of two groups of four."""
    root = tmp_path_factory.mktemp("recipe")
    model = make_policy(root / "model")
    for split in ("train", "heldout"):
        (root / f"{split}.jsonl").write_text("".join(json.dumps({
            "instance_id": f"{split}-{number}", "repo": "shop/shop", "patch": BUG, "problem_statement": STATEMENT,
            "FAIL_TO_PASS": ["test_shop.py::test_total"], "PASS_TO_PASS": ["test_shop.py::test_zero"], "image_name": "",
            "files": {"shop.py": SHOP, "README.md": f"{number}\n"}, "grader": "swe",
            "grading": {"files": {"test_shop.py": TESTS}}}) + "\n" for number in range(2)))
    run("-m", "lightning_ray.cli", "train", RECIPE, *words(
        run__dir=root, run__steps=2, policy__path=model, tasks__source=root / "train.jsonl",
        tasks__heldout_source=root / "heldout.jsonl", learner__ranks=1, learner__micro_batch_tokens=8192,
        learner__lr=1e-4, schedule__group_size=4, schedule__groups_per_step=2, schedule__groups_in_flight=3))
    return root / "recipe"


@pytest.fixture(scope="module")
def rollouts(trained):
    return [each for step in (1, 2) for each in read_rollouts(trained / "rollouts" / f"step_{step:06d}.parquet")]


def test_steps_learn_from_rollouts_that_were_graded(trained, rollouts):
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    assert {each.end for each in rollouts} <= {"graded", "harness_failed"}
    passed = [each.passed for each in rollouts if each.end == "graded"]
    assert any(passed) and not all(passed), "both choices of the policy are there"
    assert {each.reason.partition(":")[0] for each in rollouts if each.end == "graded"} == {"passed", "tests_failed"}
    for line in metrics:
        assert line["tokens_sampled"] == line["tokens_trained"] + sum(line["tokens_dropped"].values()) > 0
        assert line["rollouts_infra_failed"] == 0 and line["weights_verified"] == 1.0
    assert any(line["tokens_trained"] > 0 for line in metrics)


def test_learner_and_generator_agree_on_a_hybrid_model(trained):
    gaps = [json.loads(line)["logprob_gap_mean"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert any(gap is not None for gap in gaps) and all(gap is None or gap < 0.1 for gap in gaps)


def test_the_harness_is_mini_swe_agent_with_its_swebench_configuration(trained, rollouts):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained.parent / "model")
    prompt = tokenizer.decode(rollouts[0].calls[0].prompt_ids)
    assert "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt" in prompt and STATEMENT in prompt
    assert "<function=NAME>" in prompt and '"name": "bash"' in prompt and prompt.endswith("<think>\n")


def test_tool_calls_and_reasoning_go_on_token_for_token(rollouts):
    """The template keeps the reasoning of answers to tools, so a conversation stays one branch."""
    second = [each.calls[1] for each in rollouts if len(each.calls) > 1]
    assert second and sum(call.relation == "continued" for call in second) >= len(second) // 2
    assert all(call.finish_reason == "stop" for call in second if call.relation == "continued")
    submitted = [each for each in rollouts if each.end == "graded"]
    assert any("<parameter=command>" in each.calls[-1].text and "</think>" in each.calls[-1].text for each in submitted)


def test_a_checkpoint_of_the_run_is_measured_on_swe_bench(trained, tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([instance("add")]))
    checkout("add", tmp_path / "checkouts" / "shop__shop-add")
    run(RECIPE.parent / "evaluate_swe_bench.py", "run", tmp_path / "data.json", "--config", RECIPE, "--checkouts",
        tmp_path / "checkouts", *words(run__dir=tmp_path, evaluation__samples=4,
                                       policy__path=trained / "checkpoints" / "step_000002" / "policy"))
    results = json.loads((tmp_path / "recipe" / "results.json").read_text())
    assert results["ends"]["infra_failed"] == 0 and set(results["reasons"]) <= {"passed", "tests_failed"}
    assert results["pass@4"]["instances"] == 1 and len(results["model"]["sha256"]) == 64
    assert results["bill"]["tokens_out"] > 0 and results["data"]["source"] == "data.json"
