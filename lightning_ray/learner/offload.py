"""The learner's states leave the GPU while a generator has its memory, and come back before the next step.

DeepSpeed moves what it trains: weights, gradients, optimizer. Where ZeRO-3 partitions an optimizer other than its own
FusedAdam it refuses to move the optimizer's part, which is then moved here in the same way; so are weights that are not
trained (under adapters, and the reference policy's). What `learner.offload_optimizer` or `learner.offload_params` keeps
in host memory anyway stays there. On the CPU every move is a move to where things are.
"""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
from deepspeed.runtime.zero.offload_states import offload_optimizer_states, reload_optimizer_states
from torch import nn

from lightning_ray.config import LearnerConfig


def offload(engine: Any, config: LearnerConfig, reference: nn.Module | None) -> None:
    """To host memory. `engine`: DeepSpeed's, with ZeRO stage 1, 2 or 3."""
    pin = torch.cuda.is_available()
    if not config.offload_params:
        if _by_hand(config):
            moved = [State.lp_params, State.lp_grads, State.contiguous_grad_buffer]
            engine.offload_states(include=moved, pin_memory=pin)
            offload_optimizer_states(engine.optimizer.optimizer, "cpu", pin_memory=pin)
        else:
            engine.offload_states(pin_memory=pin)
    for tensor in _others(engine, config, reference):
        tensor.data = tensor.data.to("cpu")
    if pin:
        torch.cuda.empty_cache()


def reload(engine: Any, config: LearnerConfig, reference: nn.Module | None) -> None:
    """Back to where they are worked with. Nothing happens where nothing was moved."""
    if not config.offload_params:
        engine.reload_states()
        if _by_hand(config):
            reload_optimizer_states(engine.optimizer.optimizer, engine.device)
    for tensor in _others(engine, config, reference):
        tensor.data = tensor.data.to(engine.device)


def _by_hand(config: LearnerConfig) -> bool:
    return config.zero_stage == 3 and not config.offload_optimizer and not config.offload_params


def _others(engine: Any, config: LearnerConfig, reference: nn.Module | None) -> Iterator[torch.Tensor]:
    """What DeepSpeed does not move. ZeRO-3 has the weights of all layers in its own partitions, trained or not."""
    if _by_hand(config):
        yield from engine.optimizer.fp32_partitioned_groups_flat
    if config.zero_stage < 3:
        yield from (part for part in engine.module.parameters() if not part.requires_grad)
    if reference is not None:
        yield from reference.parameters()
