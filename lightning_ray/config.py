"""All settings, one class a part. A run is described by one YAML file and dotted overrides on the command line.

    Config.load("jobs/quickstart.yaml", ["--learner.lr", "1e-4"])

Bad input raises `ConfigError`, whose message names the field, the value and the remedy. Nothing here starts,
imports or touches anything expensive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from lightning_ray.settings import ConfigError, Part, explain, merged, parse_overrides, read_yaml
from lightning_ray.trajectory.advantages import AdvantageName
from lightning_ray.trajectory.selection import ALL, check_rule


class RunConfig(Part):
    dir: Path = Path("runs")
    """Where runs are written; each run gets a directory of its own below it."""
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    steps: int = Field(default=100, ge=1)
    """Policy updates."""
    seed: int = 0
    checkpoint_every: int = Field(default=20, ge=1)
    """Steps between checkpoints; the last step always makes one. A resume learns the steps that were recorded since the
    last one again, from their rollouts: a killed run loses the step in progress at most."""
    checkpoints_kept: int = Field(default=2, ge=1)
    logprob_gap_limit: float = Field(default=0.2, gt=0)
    """The run stops when learner and generator disagree by more than this (mean |Δ log-prob| of a step)."""


class WarmStartConfig(Part):
    """A policy made on the spot: random weights and a tokenizer of its own, or those of `model`, then supervised
    warm-up on demonstrations whose choice is random, so that the format is known and the answer is not."""

    model: Path | None = None
    """A model directory in Hugging Face format whose tokenizer knows ChatML's marks; `hidden_size`, `layers` and
    `heads` are not used then."""
    hidden_size: int = Field(default=128, ge=32)
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    steps: int = Field(default=250, ge=0)
    batch_size: int = Field(default=32, ge=1)
    lr: float = Field(default=3e-3, gt=0)
    seed: int = 0
    cache: Path = Path("~/.cache/lightning_ray/policies")
    """Warm-started policies are kept here, by the hash of everything that made them."""


class PolicyConfig(Part):
    path: Path | None = None
    """Model directory in Hugging Face format, with a tokenizer that has a chat template."""
    warm_start: WarmStartConfig | None = None
    """Make a policy by supervised warm-up instead of loading one."""
    name: str = "policy"
    """The model name that harnesses use."""
    chat_template: Path | None = None
    """A chat template file, where the tokenizer has none or another is wanted."""
    tool_parser: str | None = None
    """Name of a vLLM tool-call parser (`hermes`, `qwen3_coder`, ...)."""
    reasoning_parser: str | None = None
    """Name of a vLLM reasoning parser (`qwen3`, ...)."""
    max_context: int = Field(default=2048, ge=64)
    """Tokens, prompt and answer together."""

    @model_validator(mode="after")
    def one_origin(self) -> Self:
        if (self.path is None) == (self.warm_start is None):
            raise ValueError("give exactly one of policy.path and policy.warm_start")
        return self


class TasksConfig(Part):
    source: str = "one_line_bugs"
    """`one_line_bugs` (generated), or a JSONL or Parquet file in SWE-smith's schema."""
    heldout_source: Path | None = None
    """A file of held-out tasks, for file sources."""
    train: int = Field(default=2000, ge=1)
    """How many tasks to train on (generated sources), or at most this many (files)."""
    heldout: int = Field(default=200, ge=0)
    seed: int = 0


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
        if self.backend == "container" and not self.image:
            raise ValueError("sandbox.backend: 'container' needs sandbox.image, for tasks that name no image of their "
                             "own and for the check before a run")
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


class SamplingConfig(Part):
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of one answer; a harness may ask for fewer."""


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


class GeneratorConfig(Part):
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    replicas: int = Field(default=1, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    kv_cache_gib: int = Field(default=1, ge=1)
    """KV cache on the CPU."""
    max_num_seqs: int = Field(default=64, ge=1)
    in_flight: Literal["auto", "keep", "resend"] = "auto"
    """What becomes of generations while the learner works. `keep`: they are frozen with their KV cache. `resend`:
    learner and generator have the memory of their devices by turns. While the learner works, the generator's weights
    and KV cache leave it, and generations are sent again afterwards with the tokens that they have; while the generator
    works, the learner's states are in host memory.
    `auto`: `resend` on GPUs (`keep` where learner.zero_stage is 0), `keep` on the CPU."""
    transport: Literal["object_store", "ipc"] = "object_store"
    """How weights get from the learner to the generators. `object_store`: through Ray's shared memory on the host, or
    over the network. `ipc`: within the memory of each GPU, from the learner rank to the generator that share it."""
    bucket_mb: int = Field(default=512, ge=1)
    """Weights are published in buckets of so many MB at most, one after the other: the memory that a publish needs. A
    layer is never split; one that is larger is a bucket of its own."""
    enforce_eager: bool = True
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine."""
    extra: dict[str, Any] = {}
    """More `AsyncEngineArgs`, by vLLM's own names."""


class LoraSettings(Part):
    """Low-rank adapters are trained instead of the weights. What is published and exported are ordinary weights, with
    the adapters merged in (in float32, then rounded to the generator's dtype: in bfloat16 the log-prob gap holds that
    rounding); checkpoints hold the adapters only."""

    rank: int = Field(default=32, ge=1)
    alpha: float = Field(default=64, gt=0)
    """An adapter's product counts alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On what goes into an adapter, while learning. The log-prob gap then holds its noise."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Linear layers by the ends of their names (`q_proj`), or all inside the model (the output projection is none)."""

    @model_validator(mode="after")
    def some_target(self) -> Self:
        if not self.target_modules:
            raise ValueError("learner.lora.target_modules is []: nothing would be trained. Name layers, or all-linear")
        return self


class LearnerConfig(Part):
    ranks: int = Field(default=1, ge=1)
    sequence_parallel: int = Field(default=1, ge=1)
    """So many ranks read each micro-batch together, each a part of its positions (Ulysses: they exchange attention
    heads). For contexts whose activations do not fit on one. Divides `ranks` and the model's attention heads."""
    lora: LoraSettings | None = None
    """null: all weights are trained."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of weights and activations; the optimizer's are float32 always. `auto`: bfloat16 where the processor multiplies
    it natively (GPUs, CPUs with AMX or AVX512-BF16), else float32, which is then ten times faster."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    offload_optimizer: bool = False
    offload_params: bool = False
    gradient_checkpointing: bool = False
    lr: float = Field(default=1e-6, gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to zero at the last update of the run."""
    warmup_steps: int = Field(default=5, ge=0)
    """Updates of linear warm-up. A fresh optimizer without any can ruin a policy in one step."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon. A larger one damps the first updates of a tiny policy."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=8192, ge=64)
    """Padded tokens of one micro-batch on each rank that reads it. A longer sample goes alone."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer steps over the samples of one step (the samples are split, not repeated)."""
    threads: int = Field(default=2, ge=1)
    """CPU threads of each rank."""

    @model_validator(mode="after")
    def offload_what_is_partitioned(self) -> Self:
        if self.offload_params and self.zero_stage < 3:
            raise ValueError(f"learner.offload_params needs learner.zero_stage 3, not {self.zero_stage}")
        if self.offload_optimizer and self.zero_stage < 1:
            raise ValueError("learner.offload_optimizer needs learner.zero_stage 1, 2 or 3, not 0")
        return self

    @model_validator(mode="after")
    def whole_teams(self) -> Self:
        if self.ranks % self.sequence_parallel:
            raise ValueError(
                f"learner.sequence_parallel ({self.sequence_parallel}) must divide learner.ranks ({self.ranks})"
            )
        return self


class AlgorithmConfig(Part):
    advantage: AdvantageName = "grpo"
    loss: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    """Ratios stay within [1 - clip_low, 1 + clip_high]. `gspo` wants bounds around 0.0003."""
    normalise: Literal["rollout", "token", "sample"] = "rollout"
    proximal: Literal["recomputed", "behaviour"] = "recomputed"
    """The policy that clipping measures from: the learner's own before the step, or the one that sampled."""
    tis_cap: float | None = Field(default=2.0, ge=1)
    """Truncated importance sampling of the proximal policy against the behaviour log-probs; null turns it off."""
    mis_cap: float | None = Field(default=None, gt=1)
    """Masked importance sampling instead: tokens whose weight is outside [1 / mis_cap, mis_cap] do not train."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty to the policy that the run began with; above 0 that policy is kept in memory
    (with `learner.lora` it is the policy without its adapters, and costs none)."""

    @model_validator(mode="after")
    def one_correction(self) -> Self:
        if self.tis_cap is not None and self.mis_cap is not None:
            raise ValueError("give at most one of algorithm.tis_cap and algorithm.mis_cap (set the other one to null)")
        return self


class ScheduleConfig(Part):
    group_size: int = Field(default=8, ge=2)
    groups_per_step: int = Field(default=8, ge=1)
    groups_in_flight: int = Field(default=8, ge=1)
    """Equal to groups_per_step: synchronous. More: unfinished groups carry over."""
    max_staleness: int = Field(default=2, ge=0)
    """Policy versions between the oldest token of a group and the learner; older groups are dropped whole."""
    stale_limit: int = Field(default=3, ge=1)
    """A task whose rollouts take longer than `max_staleness` updates so many times in a row is set aside: named,
    counted as `set_aside`, and not run again."""
    resample_zero_variance: int = Field(default=0, ge=0)
    """So many groups of a step at most are replaced by other tasks where all their rewards are equal (counted as
    `resampled`)."""
    admission: Literal["all", "pressure"] = "all"
    """`all`: every rollout of the groups in flight runs, as far as the runners have places. `pressure`: how many run at
    once follows the generators' KV cache and queues, from one group's up to all."""
    on_update: Literal["continue", "drain"] = "continue"
    """What happens to requests in flight when the policy is updated. `continue`: they are frozen, and go on with the
    new weights from the tokens that they have. `drain`: they are finished first, while new ones wait inside the
    generators; one long generation then idles all. For comparison with schemes that work so."""

    @model_validator(mode="after")
    def enough_in_flight(self) -> Self:
        if self.groups_in_flight < self.groups_per_step:
            raise ValueError(
                f"schedule.groups_in_flight ({self.groups_in_flight}) must be at least "
                f"schedule.groups_per_step ({self.groups_per_step}), or no step ever fills"
            )
        return self


class PricesConfig(Part):
    """What things cost, in any one currency, for the bill."""

    tokens_in: float = Field(default=0.0, ge=0)
    """A million prompt tokens that no cache held."""
    tokens_in_cached: float = Field(default=0.0, ge=0)
    """A million prompt tokens from the cache."""
    tokens_out: float = Field(default=0.0, ge=0)
    """A million sampled tokens."""
    device_hour: float = Field(default=0.0, ge=0)
    """An hour of one device."""

    @property
    def given(self) -> bool:
        return any((self.tokens_in, self.tokens_in_cached, self.tokens_out, self.device_hour))


class EvaluationConfig(Part):
    every: int = Field(default=0, ge=0)
    """Steps between held-out evaluations; 0: only before and after."""
    temperature: float = Field(default=1.0, ge=0)
    tasks: int | None = Field(default=None, ge=1)
    """Held-out tasks of the evaluations in between; null: all. Before and after always take all."""
    samples: int = Field(default=1, ge=1)
    """`lightning-ray evaluate`: rollouts of each task; pass@k is given for each power of two up to it."""
    prices: PricesConfig = PricesConfig()


class RayConfig(Part):
    address: str | None = None
    """An existing cluster (`auto`, `ray://host:port`); null: the cluster that this job runs in, else a local one."""
    object_store_gib: float = Field(default=0.5, gt=0)
    """Object store of a local cluster."""


class Config(Part):
    """Everything that one run needs to know. The environment never changes a run."""

    run: RunConfig = RunConfig()
    policy: PolicyConfig = Field(default_factory=lambda: PolicyConfig(warm_start=WarmStartConfig()))
    tasks: TasksConfig = TasksConfig()
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    reward: RewardConfig = RewardConfig()
    runners: RunnersConfig = RunnersConfig()
    sampling: SamplingConfig = SamplingConfig()
    proxy: ProxyConfig = ProxyConfig()
    capture: CaptureConfig = CaptureConfig()
    generator: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def memory_that_can_move(self) -> Self:
        if self.generator.in_flight == "resend" and self.learner.zero_stage == 0:
            raise ValueError("generator.in_flight: resend moves the learner's states to host memory, which needs "
                             "learner.zero_stage 1, 2 or 3, not 0")
        return self

    @model_validator(mode="after")
    def fits_a_cluster(self) -> Self:
        if self.sandbox.backend != "kubernetes":
            return self
        if not self.sandbox.image:
            raise ValueError("sandbox.image: '' names no image. sandbox.backend kubernetes needs one (with bash, git, "
                             "tar and python3) for tasks that name none and for the look at the first pod")
        longest = max(self.harness.timeout_s, self.reward.timeout_s)
        if self.sandbox.kubernetes.lifetime_s <= longest:
            raise ValueError(f"sandbox.kubernetes.lifetime_s ({self.sandbox.kubernetes.lifetime_s:g}) must be above "
                             f"harness.timeout_s and reward.timeout_s ({longest:g})")
        if self.harness.kind == "command" and self.proxy.host == "127.0.0.1":
            raise ValueError("proxy.host: '127.0.0.1' is not reached from a pod. Give 0.0.0.0")
        return self

    @classmethod
    def load(cls, path: str | Path | None, overrides: Sequence[str] = (), given: dict[str, Any] | None = None) -> Self:
        """Reads a YAML file (None: nothing but defaults), applies `--part.field value` overrides, then `given` as plain
        data. Raises `ConfigError`."""
        settings = merged(read_yaml(Path(path)) if path else {}, parse_overrides(overrides))
        return cls.build(merged(settings, given or {}))

    @classmethod
    def build(cls, settings: dict[str, Any]) -> Self:
        """Validates plain data. Raises `ConfigError` with every fault named at once."""
        try:
            return cls(**settings)
        except ValidationError as error:
            raise ConfigError("\n".join(explain(cls, item) for item in error.errors())) from None

    def to_yaml(self) -> str:
        """The resolved configuration, as it is kept in the run directory."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def digest(self) -> str:
        """SHA-256 over everything that decides what is learned: all but where the run lies and how Ray is reached."""
        content = self.model_dump(mode="json", exclude={"ray": True, "run": {"dir", "name"}})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
