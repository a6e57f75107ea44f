"""What the tests of the learner share: samples, learners on one rank and on two, the same learning in plain PyTorch."""

from pathlib import Path

import numpy as np
import ray
import torch

from lightning_ray.config import AlgorithmConfig, LearnerConfig
from lightning_ray.learner.optimizer import learning_rate
from lightning_ray.learner.worker import prepare_process
from lightning_ray.trajectory.samples import Sample

TEMPERATURE = 0.8
STEPS = 3


def settings(**fields) -> LearnerConfig:
    return LearnerConfig(**{"dtype": "float32", "lr": 1e-3, "warmup_steps": 2, "micro_batch_tokens": 128} | fields)


def make_samples(seed: int = 0, count: int = 10) -> list[Sample]:
    """Mixed lengths, several trained spans, two samples of one rollout, stale tokens among fresh ones."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(rng.integers(12, 90))
        mask = rng.random(length) < 0.4
        mask[:4] = False
        mask[-1] |= not mask.any()
        samples.append(
            Sample(
                token_ids=rng.integers(0, 512, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -5.5 + rng.normal(0, 1, length), 0).astype(np.float32),
                versions=np.where(mask, rng.integers(0, 2, length), -1).astype(np.int32),
                advantage=float(rng.normal()),
                rollout=index // 2,
                weight=1 / (count // 2 * max(1, int(mask.sum()))),
            )
        )
    return samples


def make_learner(model: Path, config: LearnerConfig, algorithm: AlgorithmConfig | None = None):
    from lightning_ray.learner.engine import Learner

    return Learner(model, config, algorithm or AlgorithmConfig(), temperature=TEMPERATURE, total_steps=10)


class Plain:
    """The same learning written out: one sample at a time, whole logits, torch's own AdamW, no DeepSpeed."""

    def __init__(self, model: Path, config: LearnerConfig, algorithm: AlgorithmConfig) -> None:
        from transformers import AutoModelForCausalLM

        self.config, self.algorithm = config, algorithm
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self.updates = 0

    def logprobs(self, sample: Sample) -> torch.Tensor:
        logits = self.model(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0, :-1].float()
        table = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        trained = torch.from_numpy(np.flatnonzero(sample.loss_mask))
        return table[trained - 1, torch.from_numpy(sample.token_ids.astype(np.int64))[trained]]

    def step(self, samples: list[Sample]) -> tuple[float, float]:
        self.optimizer.zero_grad()
        total = 0.0
        for sample in samples:
            logprobs = self.logprobs(sample)
            behaviour = torch.from_numpy(sample.logprobs[sample.loss_mask])
            if self.algorithm.proximal == "recomputed":
                proximal, weight = logprobs.detach(), torch.exp(logprobs.detach() - behaviour).clamp(max=2.0)
            else:
                proximal, weight = behaviour, torch.ones_like(behaviour)
            ratio = torch.exp(logprobs - proximal)
            low, high = 1 - self.algorithm.clip_low, 1 + self.algorithm.clip_high
            surrogate = torch.minimum(ratio * sample.advantage, ratio.clamp(low, high) * sample.advantage)
            loss = (sample.weight * -weight * surrogate).sum()
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm).item()
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.updates, self.config, 10)
        self.optimizer.step()
        self.updates += 1
        return total, norm


def run(learner, samples: list[Sample]) -> tuple[list[dict], dict]:
    metrics = [learner.step(samples, version) for version in range(STEPS)]
    return metrics, learner.bucket("float32").arrays


def unpack(weights: dict) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(raw.copy()).view(getattr(torch, dtype)).view(shape)
        for name, (raw, dtype, shape) in weights.items()
    }


@ray.remote
class Rank:
    """One rank that makes several learners one after the other, since starting a process takes longest."""

    def __init__(self, rank: int) -> None:
        prepare_process(rank, 2, threads=1, on_gpu=False)
        self.rank = rank

    def join(self, address: tuple[str, int]) -> None:
        from lightning_ray.learner.engine import join

        join(self.rank, 2, address)

    def make(self, model: Path, config: LearnerConfig, algorithm: AlgorithmConfig | None = None) -> None:
        self.learner = make_learner(model, config, algorithm)

    def call(self, method: str, *arguments):
        return getattr(self.learner, method)(*arguments)


def make_everywhere(actors: list, *arguments) -> None:
    """A learner on each rank; arguments as of `make_learner`."""
    ray.get([actor.make.remote(*arguments) for actor in actors])


def everyone(actors: list, method: str, *arguments) -> list:
    """The results of all ranks, which work in step."""
    return ray.get([actor.call.remote(method, *arguments) for actor in actors])
