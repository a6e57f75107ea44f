"""Learning: the learner, the algorithm, and the schedule of groups and updates."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from lightning_ray.config.reading import Part
from lightning_ray.trajectory.advantages import AdvantageName


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
    resources: dict[str, float] = {}
    """Custom Ray resources of the nodes that learner and generators stand on, for each GPU (without GPUs: for each rank
    and each generator), where GPUs alone do not say which: `{accelerator_type:H100: 0.001}`."""

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
