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
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from lightning_ray.config.learning import (
    AlgorithmConfig,
    LearnerConfig,
    LoraSettings,
    ScheduleConfig,
)
from lightning_ray.config.policy import (
    GeneratorConfig,
    PolicyConfig,
    SamplingConfig,
    WarmStartConfig,
)
from lightning_ray.config.reading import ConfigError, Part, explain, merged, parse_overrides, read_yaml
from lightning_ray.config.rollouts import (
    CaptureConfig,
    ContainerConfig,
    HarnessConfig,
    HarnessResultFile,
    KubernetesConfig,
    LengthPenaltyConfig,
    ProxyConfig,
    RewardConfig,
    RunnersConfig,
    SandboxConfig,
)
from lightning_ray.config.run import (
    EvaluationConfig,
    PricesConfig,
    RayConfig,
    RunConfig,
    TasksConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CaptureConfig",
    "Config",
    "ConfigError",
    "ContainerConfig",
    "EvaluationConfig",
    "GeneratorConfig",
    "HarnessConfig",
    "HarnessResultFile",
    "KubernetesConfig",
    "LearnerConfig",
    "LengthPenaltyConfig",
    "LoraSettings",
    "Part",
    "PolicyConfig",
    "PricesConfig",
    "ProxyConfig",
    "RayConfig",
    "RewardConfig",
    "RunConfig",
    "RunnersConfig",
    "SamplingConfig",
    "SandboxConfig",
    "ScheduleConfig",
    "TasksConfig",
    "WarmStartConfig",
]


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
        data. A `policy.path` on the command line takes the place of the file's warm start. Raises `ConfigError`."""
        over = parse_overrides(overrides)
        if isinstance(policy := over.get("policy"), dict) and policy.get("path") is not None:
            policy.setdefault("warm_start", None)
        settings = merged(read_yaml(Path(path)) if path else {}, over)
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
