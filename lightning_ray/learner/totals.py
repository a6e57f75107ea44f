"""What the learner measures in one step: sums over tokens and updates, seconds of its parts, reduced over the ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ray.learner.batch import MicroBatch
from lightning_ray.learner.losses import TokenLoss


class Totals:
    """Sums over tokens and updates of one step, reduced over ranks at the end."""

    def __init__(self) -> None:
        names = ("tokens", "clipped", "capped", "kl", "entropy", "gap", "gap_tokens", "read", "area")
        self.sums = dict.fromkeys(names, 0.0)
        self.gap_max = 0.0
        self.seconds = dict.fromkeys(("forward_s", "backward_s", "optimizer_s"), 0.0)
        self.per_update = {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def shared(self, **values: float) -> None:
        """Values of one update that are the same on every rank."""
        for name, value in values.items():
            self.per_update[name] += value

    def add(
        self, batch: MicroBatch, version: int | None, logprobs: Tensor, entropy: Tensor, result: TokenLoss
    ) -> None:
        gaps = np.abs(logprobs.cpu().numpy() - batch.behaviour)[batch.versions == version]
        for name, value in (
            ("tokens", len(batch.targets)),
            ("clipped", result.clipped.sum().item()),
            ("capped", result.capped.sum().item()),
            ("kl", result.kl.double().sum().item()),
            ("entropy", entropy.double().sum().item()),
            ("gap", gaps.sum(dtype=np.float64)),
            ("gap_tokens", len(gaps)),
            ("read", batch.tokens),
            ("area", batch.input_ids.size),
        ):
            self.sums[name] += float(value)
        self.gap_max = max(self.gap_max, float(gaps.max(initial=0.0)))

    def reduced(self) -> dict[str, float | None]:
        """The log-prob gap is None where no token was sampled by the learner's own version."""
        sums = torch.tensor(list(self.sums.values()), dtype=torch.float64)
        gap_max = torch.tensor([self.gap_max], dtype=torch.float64)
        if torch.cuda.is_available():
            sums, gap_max = sums.cuda(), gap_max.cuda()
        dist.all_reduce(sums)
        dist.all_reduce(gap_max, op=dist.ReduceOp.MAX)
        total = dict(zip(self.sums, sums.tolist(), strict=True))
        fresh = total["gap_tokens"] > 0
        return self.per_update | self.seconds | {
            "clip_fraction": total["clipped"] / total["tokens"],
            "capped_fraction": total["capped"] / total["tokens"],
            "entropy_mean": total["entropy"] / total["tokens"],
            "kl_mean": total["kl"] / total["tokens"],
            "logprob_gap_mean": total["gap"] / total["gap_tokens"] if fresh else None,
            "logprob_gap_max": gap_max.item() if fresh else None,
            "logprob_gap_tokens": total["gap_tokens"],
            "tokens": total["tokens"],
            "tokens_read": total["read"],
            "padding_share": 1 - total["read"] / total["area"],
        }
