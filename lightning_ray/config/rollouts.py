"""A rollout: the harness, the proxy that it talks to, the sandbox that it runs in, and its reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lightning_ray.config.reading import Part
from lightning_ray.trajectory.selection import ALL, check_rule


class HarnessResultFile(Part):
    """A JSON file in which a command harness says how it ended, for programs whose exit code does not."""

    path: str = Field(pattern="^/")
    """Absolute path inside the sandbox."""
    key: str = Field(default="exit_status", min_length=1)
    """Where the exit status is; dots lead into objects (`info.exit_status`)."""
    ok: list[str] = Field(min_length=1)
    """Exit statuses whose patch is graded; with any other the rollout ends `harness_failed`."""


class HarnessConfig(Part):
    kind: Literal["python", "command"] = "python"
    entry: str = "lightning_ray.harness.mini_swe_agent:run"
    """Python harness: `module:function`, called in a warm worker process."""
    command: list[str] = []
    """Command harness: the program and its arguments, run in the sandbox; `{task}`, `{base_url}` and `{model}` are
    filled in."""
    env: dict[str, str] = {}
    """Command harness: more environment variables; the same placeholders are filled in."""
    files: dict[str, str] = {}
    """Command harness: files written (outside the workspace's diff) before it starts: absolute path -> content."""
    mounts: dict[str, str] = {}
    """Host path -> path inside: read-only, for the harness's own installation."""
    result: HarnessResultFile | None = None
    """Command harness: where it says how it ended; null: exit code 0 is a success."""
    settings: dict[str, Any] = {}
    """Handed to a Python harness as they are (mini-SWE-agent: its own config)."""
    timeout_s: float = Field(default=120, gt=0)
    """The agent's clock; it starts when the sandbox is ready."""
    workers: int = Field(default=2, ge=1)
    """Warm worker processes of each runner (Python harness)."""
    max_calls: int = Field(default=100, ge=1)
    """Model calls of one rollout; more end it."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that all answers of one rollout may have together; the last one is cut to fit, and the next call ends the
    rollout. Null: `max_calls` times `sampling.max_tokens`."""


class ContainerConfig(Part):
    """`sandbox.backend: container`. The daemon, Docker or Podman, is the one that DOCKER_HOST names, or
    /var/run/docker.sock; it must run on this machine."""

    runtime: str = ""
    """OCI runtime, for Docker; empty: the daemon's own. One that hides the container's processes from the host
    (gVisor's `runsc`, Kata) is refused: a command that takes too long could not be ended, and the endpoint could not be
    reached."""
    pull: Literal["missing", "never"] = "missing"
    """Whether an image that the daemon does not have is pulled (once, before its first sandbox) or is an error."""


class KubernetesConfig(Part):
    """`sandbox.backend: kubernetes`: a Job for each sandbox, in the cluster that this process runs in or that a
    kubeconfig names. `jobs/kubernetes/sandboxes.yaml` has the namespace and the rights that it needs."""

    namespace: str = Field(default="lightning-ray-sandboxes", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    context: str | None = None
    """Context of the kubeconfig; null: the cluster that this process runs in, else the kubeconfig's current context."""
    template: Path | None = None
    """A YAML file with a part of a Job, merged with ours: what places a pod, as node selectors, tolerations, pull
    secrets, requests. A field that could loosen the isolation is refused by name."""
    service_account: str = Field(default="default", min_length=1)
    """Of the pods. Its token is never mounted."""
    read_only_root: bool = False
    """The image's file system read-only; the workspace, /tmp and /run are written to in any case."""
    pending_timeout_s: float = Field(default=600, gt=0)
    """So long a pod may wait for a node and its image. This is not the agent's clock."""
    lifetime_s: float = Field(default=7200, ge=60)
    """The cluster ends a running sandbox after this, whatever became of its runner; above every other timeout."""
    ttl_s: int = Field(default=60, ge=0)
    """The cluster removes an ended Job after this, if its runner did not."""
    proxy_pods: dict[str, str] = {"lightning-ray/part": "runner"}
    """Labels of the pods that the proxies run in, which the network policy lets sandboxes reach; empty: the proxies run
    outside the cluster, and their address is let through instead."""
    proxy_namespace: str = "lightning-ray"
    commands_at_once: int = Field(default=64, ge=1)
    """Commands that one runner has running inside its sandboxes at the same time (a thread each)."""


class SandboxConfig(Part):
    backend: Literal["bubblewrap", "container", "kubernetes"] = "bubblewrap"
    memory_mb: int = Field(default=1024, ge=16)
    processes: int = Field(default=128, ge=4)
    cpus: float = Field(default=1.0, gt=0)
    disk_mb: int = Field(default=512, ge=1)
    output_bytes: int = Field(default=1_000_000, ge=1000)
    command_timeout_s: float = Field(default=30, gt=0)
    image: str = ""
    """Container image for tasks that name none (`image_name`), and for the check before a run. It needs bash, git, tar
    and python3. Bubblewrap shows this machine's own system instead."""
    container: ContainerConfig = ContainerConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    allow_unsafe: bool = False
    """Run without the isolation that this machine cannot give. Never needed where user namespaces work."""

    @model_validator(mode="after")
    def image_given(self) -> Self:
        if self.backend != "bubblewrap" and not self.image:
            raise ValueError(f"sandbox.image: '' names no image. sandbox.backend {self.backend!r} needs one (with "
                             "bash, git, tar and python3) for tasks that name none and for the check before a run")
        return self


class LengthPenaltyConfig(Part):
    """What a solved training rollout loses for being long: for model calls and for its longest prompt, each from
    nothing at its `free` value, linearly, to `penalty` at its `most` value. The defaults are the published recipe's."""

    free_turns: int = Field(default=80, ge=0)
    most_turns: int = Field(default=100, ge=1)
    turns_penalty: float = Field(default=0.1, ge=0, le=1)
    free_tokens: int = Field(default=50_000, ge=0)
    most_tokens: int = Field(default=64_000, ge=1)
    tokens_penalty: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def rising(self) -> Self:
        for what in ("turns", "tokens"):
            free, most = getattr(self, f"free_{what}"), getattr(self, f"most_{what}")
            if most <= free:
                raise ValueError(f"reward.length_penalty: most_{what} ({most}) must be above free_{what} ({free})")
        return self


class RewardConfig(Part):
    timeout_s: float = Field(default=60, gt=0)
    on_suspicion: Literal["zero", "flag"] = "zero"
    """What a solution with suspicions is worth: nothing, or its reward (they are counted and kept in any case)."""
    length_penalty: LengthPenaltyConfig | None = None
    """null: a solved rollout is worth the same however long it was. Never applied in evaluation."""


class RunnersConfig(Part):
    count: int = Field(default=1, ge=1)
    """Runner actors (one or a few per CPU node), each with a proxy beside it."""
    cpus: float = Field(default=0.5, gt=0)
    """CPUs that Ray reserves for a runner and its proxy. The sandboxes use the node's CPUs as they come."""
    resources: dict[str, float] = {}
    """Custom Ray resources of a runner's node, to keep runners off the GPU nodes."""
    rollouts: int = Field(default=64, ge=1)
    """Rollouts that one runner holds at once."""
    grading: int = Field(default=4, ge=1)
    """Rollouts that one runner grades at once."""
    infra_retries: int = Field(default=2, ge=0)
    """How often a rollout that failed for reasons of ours is run again."""


class ProxyConfig(Part):
    host: Literal["127.0.0.1", "0.0.0.0"] = "127.0.0.1"
    """Where the TCP endpoints listen. Sandboxes on other machines (kubernetes) need every address, 0.0.0.0; each
    rollout's endpoint has a secret token in its path."""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port; 0 takes a free one."""
    keepalive_s: float = Field(default=15, gt=0)
    max_body_mb: int = Field(default=32, ge=1)
    max_concurrent_calls: int = Field(default=64, ge=1)
    """Requests that one rollout may have open at once."""
    retry_grace_s: float = Field(default=2, ge=0)
    """A request whose client went away is kept running for so long, in case the client retries it."""
    journal: bool = True
    """Write calls to disk as they are recorded, so that a restarted proxy still knows them."""


class CaptureConfig(Part):
    train: str = ALL
    """Which branches are trained: `all`; `main` (those under the system prompt that most calls of the rollout have); or
    a regular expression, found anywhere in the system prompt. The tokens of the others are counted as `excluded`."""

    @field_validator("train")
    @classmethod
    def a_rule(cls, train: str) -> str:
        return check_rule(train)
