"""`lightning-ray capture` as scripts call it: a real engine on a tiny model, a real proxy, a sandbox or none, and
log-probs that the learner's model code recomputes. Standard output holds the report and nothing else."""

import json
import subprocess
import sys

import pytest

from lightning_ray.cli import DONE
from tests.integration.test_capture import HARNESS
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("place", [[], ["--no-sandbox"]], ids=["sandbox", "no-sandbox"])
def test_capture_prints_what_a_trainer_would_get(place, tmp_path):
    model = tiny_model(tmp_path, "qwen3")
    done = subprocess.run([
        sys.executable, "-m", "lightning_ray.cli", "capture", "--model", str(model), "--json", *place,
        "--generator.dtype", "float32", "--learner.dtype", "float32", "--policy.max_context", "1024",
        "--sampling.max_tokens", "12", "--generator.extra.kv_cache_memory_bytes", str(64 << 20),
        "--", "python3", "-c", HARNESS], capture_output=True, text=True, check=False)
    assert done.returncode == DONE, done.stderr
    report = json.loads(done.stdout)
    assert report["ending"]["exit_status"] == "exit code 0", report["ending"]
    assert report["ending"]["sandbox"] == ("none" if place else "bubblewrap")
    assert (report["calls"], report["dialects"]) == (4, {"chat": 3, "messages": 1})
    assert [branch["calls"] for branch in report["branches"]] == [[0, 1], [2], [3]]
    assert report["sampled"] == report["trainable"] + sum(report["masked"].values())
    assert report["masked"]["constrained"] > 0
    assert report["parity"]["tokens"] == report["trainable"] > 0
    assert report["parity"]["mean"] < 1e-3
