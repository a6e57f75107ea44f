"""SWE-bench judged twice: by our local path, and by `swebench eval`, unchanged, in containers on Podman."""

import io
import json
import tarfile

import pytest

from jobs.evaluate_swe_bench import main
from tests.podman import Missing, service
from tests.swe_bench_instances import checkout, instance, predictions

docker = pytest.importorskip("docker")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TIMEOUT_S = "10"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """DOCKER_HOST, and the image from which those of the instances are made."""
    try:
        with service(tmp_path_factory.mktemp("podman"), "iptables") as found:  # swebench's harness asks for a network
            yield found
    except Missing as missing:
        pytest.skip(f"no containers: {missing}")


@pytest.fixture(scope="module")
def data(daemon, tmp_path_factory):
    """Instances with an image each, which holds the repository, as SWE-bench has it, and predictions."""
    root = tmp_path_factory.mktemp("swe_bench")
    host, image = daemon
    client = docker.DockerClient(base_url=host)
    instances = []
    for name in predictions():
        repository = checkout(name, root / "repositories" / name)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(repository, "testbed")
        container = client.containers.create(image, "true")
        try:
            container.put_archive("/", packed.getvalue())
            made = container.commit(f"lightning-ray-swe-bench-{name}", "test")
        finally:
            container.remove(force=True)
        instances.append(instance(name, made.tags[0]))
    (root / "data.json").write_text(json.dumps(instances))
    (root / "predictions.jsonl").write_text("".join(json.dumps({
        "instance_id": f"shop__shop-{name}", "model_name_or_path": "o/m", "model_patch": patch}) + "\n"
        for name, (patch, _) in predictions().items()))
    yield root
    for each in instances:
        client.images.remove(each["image"], force=True)
    client.close()


def grade(data, out, *words):
    done = main(["grade", str(data / "data.json"), "-p", str(data / "predictions.jsonl"), "--out", str(out),
                 "--timeout", TIMEOUT_S, *words])
    assert done == 0
    return json.loads((out / "results.json").read_text())


def test_both_ways_give_every_prediction_the_same_verdict(data, daemon, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", daemon[0])
    assert main(["checkouts", str(data / "data.json"), "--out", str(tmp_path / "checkouts")]) == 0
    here = grade(data, tmp_path / "here", "--grade", "here", "--checkouts", str(tmp_path / "checkouts"))
    there = grade(data, tmp_path / "there", "--grade", "harness")
    assert there["verdicts"] == here["verdicts"] == {
        "resolved": 2, "unresolved": 3, "empty_patch": 1, "patch_rejected": 1, "timeout": 1, "error": 0}
    passed = [{name: [each["passed"] for each in members] for name, members in results["instances"].items()}
              for results in (here, there)]
    assert passed[0] == passed[1] == {f"shop__shop-{name}": [verdict == "resolved"]
                                      for name, (_, verdict) in predictions().items()}
    assert there["pass@1"] == here["pass@1"] and there["data"] == here["data"]
    inside = grade(data, tmp_path / "inside", "--sandbox.backend", "container", "--sandbox.image", daemon[1])
    assert inside["verdicts"] == there["verdicts"] and inside["pass@1"] == there["pass@1"], "our containers, its images"
    own = json.loads((tmp_path / "there" / "o__m.lightning-ray-0.json").read_text())
    assert own["resolved_instances"] == 2 and own["empty_patch_instances"] == 1, "swebench's own summary"


def test_a_daemon_that_can_run_nothing_is_named(data, daemon, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", daemon[0])
    first = json.loads((data / "data.json").read_text())[0]
    (tmp_path / "data.json").write_text(json.dumps([{**first, "image": "localhost/nowhere:none"}]))
    assert main(["grade", str(tmp_path / "data.json"), "-p", str(data / "predictions.jsonl"), "--out",
                 str(tmp_path / "out"), "--grade", "harness"]) == 2
    assert "could judge none of 1 patches" in capsys.readouterr().err


def test_an_image_that_is_not_there_is_an_error_and_no_failure(data, daemon, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", daemon[0])
    first, *others = json.loads((data / "data.json").read_text())
    broken = tmp_path / "data.json"
    broken.write_text(json.dumps([{**first, "image": "localhost/nowhere:none"}, others[0]]))
    done = main(["grade", str(broken), "-p", str(data / "predictions.jsonl"), "--out", str(tmp_path / "out"), "--grade",
                 "harness", "--timeout", TIMEOUT_S])
    assert done == 0, capsys.readouterr().err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["verdicts"]["error"] == 1 and results["ends"]["infra_failed"] == 1
    assert results["pass@1"]["total"] == 1 and results["swe_bench"]["instances"] == 2
