"""The learner of one rank: a DeepSpeed engine that takes samples and makes updates.

All ranks call every method together, with the same arguments. The gradient of an update is

    d/d theta  sum over all trained tokens of all ranks ( weight * token loss ),

exactly: DeepSpeed averages gradients over ranks, so each rank's loss is multiplied by their number. It depends
neither on the number of ranks nor on the division into micro-batches, but for rounding.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from lightning_ray.config import AlgorithmConfig, LearnerConfig
from lightning_ray.learner.adapter import published, switched_off
from lightning_ray.learner.batch import MicroBatch, build, part_of, plan, read_length, split_updates, update_scale
from lightning_ray.learner.buckets import Bucket
from lightning_ray.learner.losses import Tokens, policy_loss
from lightning_ray.learner.model import Scorer, dtype_of, load_scorer
from lightning_ray.learner.offload import offload, reload
from lightning_ray.learner.optimizer import learning_rate, make_optimizer
from lightning_ray.learner.sequence import Team
from lightning_ray.learner.sharing import Layout, SharedBucket, export
from lightning_ray.learner.tally import Tally, add, tally_of
from lightning_ray.learner.totals import Totals
from lightning_ray.trajectory.samples import Sample

CHECKPOINT = "learner"
"""Name of the DeepSpeed checkpoint inside the directory that `save` is given."""


class LearnerError(RuntimeError):
    """Training cannot go on. The weights of the last checkpoint are sound."""


def join(rank: int, ranks: int, address: tuple[str, int]) -> None:
    """Join the process group of the learner's ranks, whose rank 0 listens at `address`."""
    # Else DeepSpeed probes the compiler for each of its extensions here, and compiles one that only inference uses.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(
        dist_backend="nccl" if torch.cuda.is_available() else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        init_method=f"tcp://{address[0]}:{address[1]}",
        rank=rank,
        world_size=ranks,
    )


class Learner:
    """One rank. `join` must have been called in this process."""

    def __init__(
        self,
        model_dir: Path,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        total_steps: int,
    ) -> None:
        """`total_steps`: steps of the run, for the decay of the learning rate."""
        self.config, self.algorithm, self.temperature = config, algorithm, temperature
        self.model_dir = Path(model_dir)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.team = Team(config.sequence_parallel)
        self.updates = 0
        self.total_updates = total_steps * config.updates_per_step
        on_gpu = torch.cuda.is_available()
        self.dtype = dtype_of(config.dtype, on_gpu)
        settings = _deepspeed_settings(config, self.dtype)
        partitioned = HfDeepSpeedConfig(settings) if config.zero_stage == 3 else None  # in force while it lives
        self.scorer = load_scorer(
            self.model_dir, dtype=self.dtype, gradient_checkpointing=config.gradient_checkpointing,
            lora=config.lora, team=self.team,
        )
        del partitioned
        self.reference = None
        if algorithm.kl_coef > 0 and config.lora is None:  # whole on each rank
            self.reference = load_scorer(self.model_dir, dtype=self.dtype, team=self.team)
            self.reference.eval().requires_grad_(False).to("cuda" if on_gpu else "cpu")
        parameters = [p for p in self.scorer.parameters() if p.requires_grad]
        optimizer = make_optimizer(parameters, config, on_gpu=on_gpu)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.scorer, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self._shared: Tensor | None = None
        self._norm: float | None = None
        if self.optimizer is optimizer:  # ZeRO-0 in float32: DeepSpeed would clip, but keep the norm to itself
            optimizer.register_step_pre_hook(self._clip)

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm).item()

    def facts(self) -> dict[str, Any]:
        """What was built, for the records of a run."""
        return {
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in self.scorer.policy.parameters()),
            "trained_parameters": sum(
                getattr(p, "ds_numel", p.numel()) for p in self.scorer.policy.parameters() if p.requires_grad
            ),
            "dtype": str(self.dtype).removeprefix("torch."),
            "layout": self.scorer.layout,
            "zero_stage": self.config.zero_stage,
            "ranks": self.ranks,
            "device": str(self.engine.device),
        }

    # --- learning ---

    def step(self, samples: Sequence[Sample], version: int) -> dict[str, float | None]:
        """Learn from all samples of one step, each once, in `updates_per_step` updates.

        `version` is the policy version of the weights before the step: over tokens that it sampled (and the first
        update trains), the metrics compare the learner's log-probs with the recorded ones. Raises ValueError where
        no token is trained, and LearnerError where the loss or the gradient is not finite.
        """
        started = time.perf_counter()
        lengths = [read_length(sample) for sample in samples]
        parts = split_updates(samples, self.config.updates_per_step)
        if not parts:
            raise ValueError(f"none of the {len(samples)} samples has a trained token: there is nothing to learn from")
        batches = [self._batches(samples, lengths, part, update_scale(samples, part)) for part in parts]
        proximal: list[list[np.ndarray | None]] = [[None] * len(part) for part in batches]
        if self.algorithm.proximal == "recomputed":  # before the first update; the first needs no pass of its own
            proximal[1:] = [[self._score(batch) for batch in part] for part in batches[1:]]
        totals = Totals()
        for number, (part, known) in enumerate(zip(batches, proximal, strict=True)):
            self._update(part, known, version if number == 0 else None, totals)
        metrics = totals.reduced()
        for name in ("loss", "grad_norm", "lr"):
            metrics[name] /= len(parts)
        return metrics | {"updates": float(len(parts)), "learn_s": time.perf_counter() - started}

    def _batches(
        self, samples: Sequence[Sample], lengths: Sequence[int], part: Sequence[int], scale: float
    ) -> list[MicroBatch]:
        layout = self.scorer.layout
        budget = self.config.micro_batch_tokens * self.team.size
        shares = plan(lengths, part, ranks=self.team.count, budget=budget, layout=layout)
        return [build(samples, batch, layout=layout, scale=scale) for batch in shares[self.team.number]]

    def _update(
        self, batches: list[MicroBatch], proximal: list[np.ndarray | None], version: int | None, totals: Totals
    ) -> None:
        torch.manual_seed(self.updates * self.ranks + self.rank)  # dropout, where a model has it
        rate = learning_rate(self.updates, self.config, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss_sum = 0.0
        for batch, known in zip(batches, proximal, strict=True):
            with totals.timed("forward_s"):
                reference = self._reference(batch)
                logprobs, entropy = self._read(batch, self.engine)
                result = policy_loss(self._tokens(batch, logprobs, known, reference), self.algorithm)
                loss = (self._tensor(batch.weights * self.team.own(batch)) * result.loss).sum()
            with totals.timed("backward_s"):
                self.engine.backward(loss * self.ranks)
            loss_sum += loss.item()
            if batch.samples and self.team.position == 0:
                totals.add(batch, version, logprobs.detach(), entropy, result)
        mine = torch.tensor([loss_sum], dtype=torch.float64, device=self.engine.device)
        dist.all_reduce(mine)
        if not math.isfinite(mine.item()):
            raise LearnerError(f"the loss of update {self.updates} is {mine.item()}; the weights are untouched by it")
        with totals.timed("optimizer_s"):
            self.engine.step()
        norm = float(self._norm if self._norm is not None else self.engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise LearnerError(f"the gradient norm of update {self.updates} is {norm}; go on from the last checkpoint")
        self.updates += 1
        totals.shared(loss=mine.item(), grad_norm=norm, lr=rate)

    def _tokens(
        self, batch: MicroBatch, logprobs: Tensor, known: np.ndarray | None, reference: Tensor | None
    ) -> Tokens:
        behaviour = self._tensor(batch.behaviour)
        if self.algorithm.proximal == "behaviour":
            proximal = behaviour
        else:
            proximal = logprobs.detach() if known is None else self._tensor(known)
        advantages, segments = self._tensor(batch.advantages), self._tensor(batch.segments)
        return Tokens(logprobs, behaviour, proximal, advantages, segments, reference)

    def _read(self, batch: MicroBatch, model: deepspeed.DeepSpeedEngine | Scorer) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all trained tokens of a micro-batch [N]; those read here have a gradient."""
        if self.team.size == 1:
            return model(batch, self.temperature)
        part = part_of(batch, self.team.position, self.team.size)
        found = model(part, self.temperature)
        logprobs, entropy = (self.team.whole(values, part.own, len(batch.targets)) for values in found)
        return logprobs, entropy

    def _reference(self, batch: MicroBatch) -> Tensor | None:
        """Log-probs [N] under the policy that the run began with, where the loss asks for them."""
        if self.algorithm.kl_coef == 0:
            return None
        if self.reference is not None:
            with torch.no_grad():
                return self._read(batch, self.reference)[0]
        with self._only_reading(), switched_off(self.scorer.policy):
            return self._read(batch, self.engine)[0]

    @contextmanager
    def _only_reading(self) -> Iterator[None]:
        """No gradient, and no dropout."""
        self.engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.engine.train()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.engine.device)

    def _score(self, batch: MicroBatch) -> np.ndarray:
        with self._only_reading():
            return self._read(batch, self.engine)[0].cpu().numpy()

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """float32 [T] for each sample: the learner's log-probs of its trained tokens, 0 elsewhere. On every rank."""
        lengths = [read_length(sample) for sample in samples]
        indices = [i for i, length in enumerate(lengths) if length]
        found: dict[int, np.ndarray] = {}
        for batch in self._batches(samples, lengths, indices, 1.0):
            scores = self._score(batch)
            for position, index in enumerate(batch.samples):
                found[index] = scores[batch.segments == position]
        everyone: list[dict[int, np.ndarray]] = [{}] * self.ranks
        dist.all_gather_object(everyone, found)
        merged = {index: scores for part in everyone for index, scores in part.items()}
        result = [np.zeros(len(sample.token_ids), dtype=np.float32) for sample in samples]
        for index, scores in merged.items():
            result[index][samples[index].loss_mask] = scores
        return result

    # --- weights ---

    def parameters(self) -> list[tuple[str, int]]:
        """(name, number of values) of all that `weights` gives, in the same order, without gathering."""
        return [(weight.name, math.prod(weight.shape)) for weight in published(self.scorer.policy)]

    def bucket(self, dtype: str = "bfloat16", names: Collection[str] | None = None, *, copy: bool = True) -> Bucket:
        """The weights under their Hugging Face names, on rank 0; nothing on the others.

        Parameters that are tied to another one are left out. `names`: only these. The arrays are copies; without `copy`
        they may be the weights themselves, to be read before the next step.
        """
        arrays: dict[str, tuple[np.ndarray, str, tuple[int, ...]]] = {}
        tally: Tally = {}
        for name, whole, shape in self._gathered(names):
            tensor = whole.to(getattr(torch, dtype))
            add(tally, name, tensor)
            tensor = tensor.to("cpu", copy=tensor is whole and (copy or self.config.zero_stage == 3))
            arrays[name] = (tensor.contiguous().view(-1).view(torch.uint8).numpy(), dtype, shape)
        return Bucket(arrays, tally)

    def _gathered(self, names: Collection[str] | None = None):  # type: ignore[no-untyped-def]
        """(name, whole tensor, shape) of each weight, adapters merged in, on rank 0. Under ZeRO-3 a tensor is there
        until the next one is asked for."""
        for weight in published(self.scorer.policy):
            if names is not None and weight.name not in names:
                continue
            with deepspeed.zero.GatheredParameters(list(weight.parts), enabled=self.config.zero_stage == 3):
                if self.rank == 0:
                    yield weight.name, weight.value(), weight.shape

    def share(self, dtype: str, names: Collection[str]) -> SharedBucket | None:
        """These parameters in the memory of each rank's GPU, for generators on the same GPUs, until the next `share` or
        `unshare`. On rank 0; None on the others."""
        self.unshare()
        chosen = [weight for weight in published(self.scorer.policy) if weight.name in names]
        layout = Layout.of([(weight.name, weight.shape) for weight in chosen], dtype)
        self._shared = torch.empty(layout.size, dtype=torch.uint8, device=self.engine.device)
        views = layout.views(self._shared)
        for weight in chosen:
            with deepspeed.zero.GatheredParameters(list(weight.parts), enabled=self.config.zero_stage == 3):
                views[weight.name].copy_(weight.value())
        handles: list[Any] = [None] * self.ranks
        dist.all_gather_object(handles, export(self._shared))
        return SharedBucket(layout, dict(handles), tally_of(views.items())) if self.rank == 0 else None

    def unshare(self) -> None:
        """What was shared may go. Idempotent."""
        self._shared = None
        torch.cuda.ipc_collect()

    def offload(self) -> None:
        """All states leave the GPU for host memory."""
        offload(self.engine, self.config, self.reference)

    def reload(self) -> None:
        """All states are back where they are worked with. Idempotent."""
        reload(self.engine, self.config, self.reference)

    def save(self, directory: Path) -> None:
        """Weights (with `learner.lora` the adapters only), optimizer and progress, for `load`; every rank writes its
        part below `directory`."""
        self.engine.save_checkpoint(
            str(directory), tag=CHECKPOINT, client_state={"updates": self.updates}, save_latest=False,
            exclude_frozen_parameters=self.config.lora is not None,
        )

    def load(self, directory: Path) -> None:
        """What `save` wrote, by as many ranks and the same `zero_stage`. Raises LearnerError where it is not there."""
        found = (Path(directory) / CHECKPOINT).is_dir()
        path, state = None, {}
        if found:
            path, state = self.engine.load_checkpoint(
                str(directory), tag=CHECKPOINT, load_module_strict=self.config.lora is None
            )
        if path is None:
            raise LearnerError(f"{directory} holds no checkpoint of a learner with these ranks and this zero_stage")
        self.updates = state["updates"]

    def export(self, directory: Path) -> None:
        """A Hugging Face checkpoint in the learner's dtype: config, weights, and the tokenizer's files as they were."""
        state = {name: tensor.to("cpu", self.dtype, copy=True) for name, tensor, _ in self._gathered()}
        if self.rank == 0:
            directory = Path(directory)
            directory.mkdir(parents=True, exist_ok=True)
            for file in self.model_dir.iterdir():
                if file.is_file() and not file.name.startswith(("model", "pytorch_model")):
                    shutil.copy2(file, directory / file.name)
            self.scorer.policy.save_pretrained(directory, state_dict=state)
        dist.barrier()


def _deepspeed_settings(config: LearnerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's own settings. Losses come scaled, and `step` alone decides when gradients are complete."""
    offload = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    zero: dict[str, Any] = {"stage": config.zero_stage, "reduce_bucket_size": 50_000_000, "overlap_comm": False}
    if config.offload_optimizer:
        zero["offload_optimizer"] = offload
    if config.offload_params:
        zero["offload_param"] = offload
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": zero,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
    }
    if dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True}
        if config.zero_stage:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    clips_itself = config.zero_stage > 0 or dtype == torch.bfloat16  # else see Learner._clip
    return settings | {"gradient_clipping": config.max_grad_norm if clips_itself else 0.0}
