"""The optimizer of the learner, and its learning rate.

AdamW: DeepSpeed's `DeepSpeedCPUAdam` where parameters or optimizer states live on the CPU, torch's fused one on a
GPU. DeepSpeedCPUAdam is C++ that is compiled on first use (half a minute, needs g++); `load_cpu_adam` does that once
for each machine type, one process at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from lightning_ray.config import LearnerConfig

logger = logging.getLogger(__name__)

EXTENSIONS = Path("~/.cache/lightning_ray/extensions")
"""Compiled extensions, unless the environment variable TORCH_EXTENSIONS_DIR says otherwise."""


FAR_STEP = 1 << 40
"""No run gets there."""


class OptimizerUnavailable(RuntimeError):
    """DeepSpeedCPUAdam cannot be compiled here. The message says what is missing."""


def learning_rate(update: int, config: LearnerConfig, total_updates: int) -> float:
    """Of update number `update` (from 0): linear over the first `warmup_steps`, then by `lr_schedule` to the end.

    The warm-up reaches the full rate at update `warmup_steps`; the decay reaches zero after the last update.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.lr
    progress = min(1.0, (update - config.warmup_steps) / max(1, total_updates - config.warmup_steps))
    if config.lr_schedule == "linear":
        return config.lr * (1 - progress)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: LearnerConfig, *, on_gpu: bool):
    """AdamW over `parameters`, its states in float32."""
    settings = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    if on_gpu and not config.offload_optimizer:
        return torch.optim.AdamW(parameters, fused=True, **settings)
    load_cpu_adam()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam(parameters, adamw_mode=True, **settings)
    optimizer.register_step_pre_hook(_compute_powers_anew)
    return optimizer


def _compute_powers_anew(optimizer, *_) -> None:
    """Makes a step the same, bit for bit, in a process that was resumed: DeepSpeed's C++ keeps beta^step as a running
    product, which no checkpoint has. A step that follows no earlier one makes it compute the powers from the step's
    number; here an update of one value that nobody reads stands between any two."""
    group, nothing = optimizer.param_groups[0], torch.zeros(4, 1)
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, FAR_STEP, group["lr"], *group["betas"], group["eps"], 0.0, True,
                                      *nothing)


def load_cpu_adam() -> None:
    """Compile DeepSpeed's CPU Adam if this machine has not yet, and load it into this process.

    Processes take turns by a file lock that dies with its owner. The lock file of torch's own build does not: left by
    a killed compilation it would be waited for without end, so it is removed under our lock.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(EXTENSIONS.expanduser() / _machine()))
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "lightning_ray.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        from deepspeed.ops.op_builder import CPUAdamBuilder

        (root / "cpu_adam" / "lock").unlink(missing_ok=True)
        if not list(root.glob("cpu_adam/*.so")):
            logger.info("compiling DeepSpeed's CPU Adam into %s: once, about half a minute", root)
        try:
            CPUAdamBuilder().load(verbose=False)
        except Exception as error:
            raise OptimizerUnavailable(
                f"DeepSpeed's CPU Adam does not compile here: {error}\nIt needs g++ with OpenMP and ninja "
                f"(`apt-get install g++`, `pip install ninja`), and write access to {root}."
            ) from error


def _machine() -> str:
    """Names what a compiled extension depends on: torch, where it is installed, and the native instruction set."""
    with open("/proc/cpuinfo") as info:
        features = next((line for line in info if line.startswith(("flags", "Features"))), "")
    return f"torch{torch.__version__}-{hashlib.sha256((torch.__file__ + features).encode()).hexdigest()[:12]}"


if __name__ == "__main__":  # `python -m lightning_ray.learner.optimizer`: a set-up's way to compile it beforehand
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no other
    load_cpu_adam()
