"""What the cluster is asked for: the isolation of every Job, what a template may add, and Kubernetes' own models."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from lightning_ray.config import Config, ConfigError, SandboxConfig
from lightning_ray.sandbox.base import Limits, Mount, SandboxSpec
from lightning_ray.sandbox.kubernetes import manifest
from lightning_ray.sandbox.kubernetes.manifest import Owner

OWNER = Owner("my-run", "abc123")
ENDPOINT = "http://10.1.2.3:8080/r/SECRET"
CONFIG = SandboxConfig(image="sandbox:1")
LEASE = {"metadata": {"name": "lightning-ray-abc123", "uid": "u1"}}
TEMPLATE = Path(__file__).parents[2] / "jobs" / "kubernetes" / "job-template.yaml"


def modelled(data, kind):
    """`data` after a way through Kubernetes' own model: what the model does not know is lost."""
    api = client.ApiClient()
    return api.sanitize_for_serialization(api.deserialize(json.dumps(data), kind, "application/json"))


def spec(name="g0-r0", **more):
    return SandboxSpec(name, Path("/nowhere"), **more)


def pod_of(job):
    return job["spec"]["template"]["spec"]


def template(tmp_path, text):
    path = tmp_path / "template.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("endpoint", ["", ENDPOINT])
@pytest.mark.parametrize("path", [None, TEMPLATE])
def test_jobs_are_what_kubernetes_knows(endpoint, path):
    mounts = (Mount(Path("/usr"), "/opt/runner/a"), Mount(Path("/etc/passwd"), "/opt/runner/b"))
    job = manifest.job(CONFIG, manifest.read_template(path), OWNER, spec(endpoint=endpoint, mounts=mounts))
    assert modelled(job, "V1Job") == job


def test_policies_secrets_and_leases_are_what_kubernetes_knows():
    job = manifest.job(CONFIG, {}, OWNER, spec(endpoint=ENDPOINT))
    job["metadata"]["uid"] = "u2"
    outside = CONFIG.model_copy(update={"kubernetes": CONFIG.kubernetes.model_copy(update={"proxy_pods": {}})})
    for each in (manifest.no_network("ns"), manifest.proxy_only(CONFIG, OWNER, ENDPOINT, LEASE),
                 manifest.proxy_only(outside, OWNER, ENDPOINT, LEASE)):
        assert modelled(each, "V1NetworkPolicy") == each
    secret = manifest.secret(job, ENDPOINT)
    assert modelled(secret, "V1Secret") == secret
    lease = manifest.lease("ns", OWNER, 60, "2026-12-01T00:00:00.000001Z")
    lost = {"renewTime"}  # the model makes a time of it
    assert modelled(lease, "V1Lease")["spec"].keys() == lease["spec"].keys() | lost


@pytest.mark.parametrize("path", [None, TEMPLATE])
def test_law6_every_pod_has_no_rights_no_token_and_no_network(path):
    job = manifest.job(CONFIG, manifest.read_template(path), OWNER, spec())
    pod, (container,) = pod_of(job), pod_of(job)["containers"]
    assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert not {"hostNetwork", "hostPID", "hostIPC", "ephemeralContainers"} & pod.keys()
    security = container["securityContext"]
    assert (security["allowPrivilegeEscalation"], security["privileged"]) == (False, False)
    assert security["capabilities"] == {"drop": ["ALL"]} and security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any({"hostPath", "secret", "projected"} & volume.keys() for volume in pod["volumes"])
    policy = manifest.no_network("ns")["spec"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"] and not {"ingress", "egress"} & policy.keys()
    assert manifest.REACH not in labels and "envFrom" not in container


def test_law6_a_sandbox_with_an_endpoint_reaches_one_port_of_its_proxy():
    job = manifest.job(CONFIG, {}, OWNER, spec(endpoint=ENDPOINT))
    policy = manifest.proxy_only(CONFIG, OWNER, ENDPOINT, LEASE)["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    (rule,) = policy["egress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8080}]
    assert rule["to"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "lightning-ray"}},
                           "podSelector": {"matchLabels": {"lightning-ray/part": "runner"}}}]
    outside = CONFIG.model_copy(update={"kubernetes": CONFIG.kubernetes.model_copy(update={"proxy_pods": {}})})
    (rule,) = manifest.proxy_only(outside, OWNER, ENDPOINT, LEASE)["spec"]["egress"]
    assert rule["to"] == [{"ipBlock": {"cidr": "10.1.2.3/32"}}]
    other = manifest.job(CONFIG, {}, Owner("my-run", "other"), spec(endpoint=ENDPOINT))
    assert not policy["podSelector"]["matchLabels"].items() <= other["spec"]["template"]["metadata"]["labels"].items()


def test_law6_the_token_is_in_the_secret_alone_and_goes_with_the_job():
    job = manifest.job(CONFIG, {}, OWNER, spec(endpoint=ENDPOINT))
    assert "SECRET" not in json.dumps(job) and job["spec"]["suspend"] is True
    job["metadata"]["uid"] = "u2"
    secret = manifest.secret(job, ENDPOINT)
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", job["metadata"]["name"], "u2")
    assert secret["stringData"] == {"LIGHTNING_RAY_BASE_URL": ENDPOINT}
    assert pod_of(job)["containers"][0]["envFrom"] == [{"secretRef": {"name": secret["metadata"]["name"]}}]


def test_law7_what_is_copied_in_is_filled_by_a_copier_and_read_only_for_the_sandbox():
    mounts = (Mount(Path("/usr"), "/opt/runner/a"), Mount(Path("/etc/passwd"), "/opt/runner/b"))
    pod = pod_of(manifest.job(CONFIG, {}, OWNER, spec(mounts=mounts, endpoint=ENDPOINT)))
    (copier,), (container,) = pod["initContainers"], pod["containers"]
    assert {"name": "copied-0", "mountPath": "/opt/runner", "readOnly": True} in container["volumeMounts"]
    assert copier["volumeMounts"] == [{"name": "run", "mountPath": "/run"},
                                      {"name": "copied-0", "mountPath": "/opt/runner"}]
    assert copier["securityContext"] == container["securityContext"] and copier["image"] == container["image"]
    assert "envFrom" not in copier and "initContainers" not in pod_of(manifest.job(CONFIG, {}, OWNER, spec()))


def test_git_works_in_a_volume_that_belongs_to_root_and_without_a_name_for_the_user(monkeypatch, tmp_path):
    (container,) = pod_of(manifest.job(CONFIG, {}, OWNER, spec()))["containers"]
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to try it
    script = "git init -q . && git commit -q --allow-empty -m x && git log --format='%an %ae'"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("agent agent@sandbox\n", 0), done.stderr


def test_limits_and_deadlines():
    limits = Limits(memory_mb=300, cpus=0.5, disk_mb=20)
    job = manifest.job(CONFIG, {}, OWNER, spec(limits=limits))
    (container,) = pod_of(job)["containers"]
    assert container["resources"]["limits"] == {"cpu": "0.5", "memory": "300Mi", "ephemeral-storage": "104Mi"}
    assert job["spec"]["activeDeadlineSeconds"] == 600 + 7200 and job["spec"]["backoffLimit"] == 0
    assert pod_of(job)["volumes"][0] == {"name": "workspace", "emptyDir": {"sizeLimit": "20Mi"}}


def test_names_come_from_the_rollout_and_are_valid():
    names = {manifest.job_name(owner, rollout) for owner in (OWNER, Owner("my-run", "x"), Owner("other", "abc123"))
             for rollout in ("s12-g3/r0", "s12-g3/r0.1", "S12_g3--r0", "x" * 300, "…")}
    assert len(names) == 15 and all(len(name) <= manifest.NAME_CHARS for name in names)
    assert all(name.replace("-", "a").isalnum() and name.islower() for name in names)
    assert manifest.job_name(OWNER, "r0") == manifest.job_name(OWNER, "r0")
    assert manifest.label("a/b c" * 30) == ("a-b-c" * 30)[:63].strip("-")


def test_the_image_is_the_tasks_then_the_templates_then_the_settings():
    theirs = {"spec": {"template": {"spec": {"containers": [{"name": "sandbox", "image": "theirs:1"}]}}}}
    images = [pod_of(manifest.job(CONFIG, content, OWNER, spec(image=image)))["containers"][0]["image"]
              for content, image in ((theirs, "task:1"), (theirs, ""), ({}, ""))]
    assert images == ["task:1", "theirs:1", "sandbox:1"]


def test_a_template_places_the_pod(tmp_path):
    read = manifest.read_template(template(tmp_path, """
        metadata: {labels: {team: red}}
        spec:
          template:
            metadata: {annotations: {cluster-autoscaler.kubernetes.io/safe-to-evict: "false"}}
            spec:
              nodeSelector: {pool: sandboxes}
              runtimeClassName: gvisor
              securityContext: {runAsUser: 4000}
              volumes: [{name: data, persistentVolumeClaim: {claimName: data, readOnly: true}}]
              containers:
                - name: sandbox
                  env: [{name: EXTRA, value: "1"}]
                  resources: {requests: {cpu: 100m}}
                  volumeMounts: [{name: data, mountPath: /data, readOnly: true}]
        """))
    job = manifest.job(CONFIG, read, OWNER, spec())
    pod, (container,) = pod_of(job), pod_of(job)["containers"]
    assert job["metadata"]["labels"]["team"] == "red" and job["metadata"]["labels"].items() > OWNER.labels.items()
    assert (pod["nodeSelector"], pod["runtimeClassName"]) == ({"pool": "sandboxes"}, "gvisor")
    assert pod["securityContext"]["runAsUser"] == 4000 and pod["securityContext"]["runAsNonRoot"] is True
    assert [volume["name"] for volume in pod["volumes"]] == ["workspace", "tmp", "run", "data"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/testbed", "/tmp", "/run", "/data"]
    assert container["resources"]["requests"]["cpu"] == "100m" and container["resources"]["limits"]["cpu"] == "1"
    assert container["env"][-1] == {"name": "EXTRA", "value": "1"}
    assert modelled(job, "V1Job") == job


@pytest.mark.parametrize(("path", "value"), [
    ("spec.template.spec.hostNetwork", True), ("spec.template.spec.hostPID", True),
    ("spec.template.spec.serviceAccountName", "admin"), ("spec.template.spec.automountServiceAccountToken", True),
    ("spec.template.spec.securityContext.runAsNonRoot", False), ("spec.template.spec.securityContext.runAsUser", 0),
    ("spec.template.spec.securityContext.seccompProfile", {"type": "Unconfined"}),
    ("spec.template.spec.initContainers", [{"name": "x"}]), ("spec.template.spec.hostUsers", True),
    ("spec.template.spec.containers.sandbox.securityContext.privileged", True),
    ("spec.template.spec.containers.sandbox.command", ["x"]), ("spec.template.spec.containers.other.image", "x"),
    ("spec.template.spec.containers.sandbox.envFrom", []), ("spec.backoffLimit", 3), ("spec.suspend", False),
    ("spec.template.spec.containers.sandbox.resources.limits", {"memory": "1Ti"}),
    ("metadata.name", "mine"), ("metadata.ownerReferences", []), ("metadata.labels", {"lightning-ray/owner": "x"}),
    ("spec.template.metadata.labels", {"lightning-ray/reach": "x"}), ("status", {}),
    ("spec.template.spec.volumes", [{"name": "host", "hostPath": {"path": "/"}}]),
    ("spec.template.spec.volumes", [{"name": "key", "secret": {"secretName": "x"}}]),
    ("spec.template.spec.volumes", [{"name": "key", "projected": {}}]),
    ("spec.template.spec.containers.sandbox.env", [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "x"}}}]),
])
def test_law6_what_could_loosen_the_isolation_is_refused_by_name(tmp_path, path, value):
    *parents, last = path.split(".")
    content = {last: value}
    for parent in reversed(parents):
        content = [{"name": parent, **content}] if parent in ("sandbox", "other") else {parent: content}
    with pytest.raises(ConfigError) as error:
        manifest.read_template(template(tmp_path, yaml.safe_dump(content)))
    assert "sandbox.kubernetes.template: " in str(error.value) and path.rpartition(".image")[0] in str(error.value)


@pytest.mark.parametrize(("text", "words"), [
    ("- a list", "holds a list"), ("kind: Pod", "'Pod' is not 'Job'"), ("a: [", "cannot be read as YAML"),
    (None, "cannot be read"),
])
def test_a_template_that_is_none_is_named(tmp_path, text, words):
    path = tmp_path / "no.yaml" if text is None else template(tmp_path, text)
    with pytest.raises(ConfigError, match=words):
        manifest.read_template(path)


@pytest.mark.parametrize(("settings", "words"), [
    ({"sandbox": {"backend": "kubernetes"}}, "sandbox.image: ''"),
    ({"sandbox": {"backend": "kubernetes", "image": "x", "kubernetes": {"namespace": "A_b"}}}, "'A_b'"),
    ({"sandbox": {"backend": "kubernetes", "image": "x", "kubernetes": {"lifetime_s": 100}}},
     r"sandbox.kubernetes.lifetime_s \(100\)"),
    ({"sandbox": {"backend": "kubernetes", "image": "x"}, "harness": {"kind": "command", "command": ["x"]}},
     "proxy.host: '127.0.0.1' is not reached from a pod"),
    ({"sandbox": {"kubernetes": {"pending_timeout": 3}}}, "pending_timeout_s"),
])
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        Config.build(settings)
