"""What a cluster is started from: `cluster.yaml` against Ray's own schema, the manifests against Kubernetes' models."""

import json
import re
from pathlib import Path

import pytest
import yaml
from kubernetes import client
from ray.autoscaler._private.util import prepare_config, validate_config

from lightning_ray.config import KubernetesConfig
from lightning_ray.sandbox.kubernetes.manifest import no_network

ROOT = Path(__file__).parents[2]
MANIFESTS = [document for name in ("rbac", "network", "rayjob", "sandboxes")
             for document in yaml.safe_load_all((ROOT / "jobs" / "kubernetes" / f"{name}.yaml").read_text())]
SECRET = re.compile(r"(password|secret|access_?key|api_?key|private_?key)\w*\s*[:=]|AKIA|-----BEGIN", re.IGNORECASE)


@pytest.fixture(scope="module")
def cluster():
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def modelled(data, kind):
    """`data` after a way through Kubernetes' own model: what the model does not know is lost."""
    api = client.ApiClient()
    return api.sanitize_for_serialization(api.deserialize(json.dumps(data), kind, "application/json"))


def test_ray_accepts_the_cluster(cluster):
    validate_config(prepare_config(cluster))


def test_ray_refuses_a_field_that_is_misspelt(cluster):
    with pytest.raises(Exception, match="max_wrkers"):
        validate_config(prepare_config({**cluster, "max_wrkers": 1}))


def test_runners_are_kept_off_the_gpu_nodes_and_only_they_are_spot(cluster):
    types = cluster["available_node_types"]
    assert [name for name, each in types.items() if "runner" in each["resources"]] == ["runner"]
    assert [name for name, each in types.items() if "GPU" in each["resources"]] == ["policy"]
    assert [name for name, each in types.items() if "InstanceMarketOptions" in each["node_config"]] == ["runner"]
    assert all("max_workers" in each for each in types.values()) and cluster["max_workers"] <= 16


@pytest.mark.parametrize("path", ["cluster.yaml", "jobs/kubernetes/rayjob.yaml", "jobs/kubernetes/rbac.yaml"])
def test_nothing_secret_is_in_it(path):
    assert not SECRET.search((ROOT / path).read_text())


def test_dashboards_are_on_the_loopback(cluster):
    assert "--dashboard-host=127.0.0.1" in " ".join(cluster["head_start_ray_commands"])


def test_ray_asks_every_caller_for_a_token(cluster):
    """Whoever reaches a port of a Ray without it can run code there."""
    starts = [line for each in ("head_start_ray_commands", "worker_start_ray_commands") for line in cluster[each]
              if "ray start" in line]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in line for line in starts)
    assert cluster["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    job = next(each for each in MANIFESTS if each["kind"] == "RayJob")["spec"]
    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("manifest", [each for each in MANIFESTS if each["kind"] != "RayJob"],
                         ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_manifests_are_what_kubernetes_knows(manifest):
    assert modelled(manifest, f"V1{manifest['kind']}") == manifest


def test_the_rayjob_consists_of_pods_that_kubernetes_knows():
    job = next(each for each in MANIFESTS if each["kind"] == "RayJob")["spec"]
    groups = job["rayClusterSpec"]["workerGroupSpecs"]
    for group in [job["rayClusterSpec"]["headGroupSpec"], *groups]:
        assert modelled(group["template"], "V1PodTemplateSpec") == group["template"]
    assert [group["groupName"] for group in groups] == ["policy", "runner"]
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in groups)
    assert json.loads(json.loads(groups[1]["rayStartParams"]["resources"])) == {"runner": 4}
    assert (ROOT / job["entrypoint"].split()[1]).is_file() and (ROOT / job["entrypoint"].split()[2]).is_file()


def test_pods_that_hold_agents_have_no_identity():
    job = next(each for each in MANIFESTS if each["kind"] == "RayJob")["spec"]
    accounts = {each["metadata"]["name"]: each for each in MANIFESTS if each["kind"] == "ServiceAccount"}
    bound = {subject["name"] for each in MANIFESTS if each["kind"] == "RoleBinding" for subject in each["subjects"]}
    for group in job["rayClusterSpec"]["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False and spec["serviceAccountName"] not in bound
        assert spec["serviceAccountName"] in accounts


def test_sandboxes_have_a_namespace_of_their_own_with_one_role_and_no_network():
    ours = [each for each in MANIFESTS if each["metadata"].get("namespace") == "lightning-ray-sandboxes"]
    assert sorted(each["kind"] for each in ours) == ["NetworkPolicy", "Role", "RoleBinding", "ServiceAccount"]
    (policy,) = [each for each in ours if each["kind"] == "NetworkPolicy"]
    assert policy == no_network("lightning-ray-sandboxes")
    settings = KubernetesConfig()
    assert settings.namespace == "lightning-ray-sandboxes" and settings.proxy_namespace == "lightning-ray"
    job = next(each for each in MANIFESTS if each["kind"] == "RayJob")["spec"]
    runner = job["rayClusterSpec"]["workerGroupSpecs"][1]["template"]
    assert settings.proxy_pods.items() <= runner["metadata"]["labels"].items()
