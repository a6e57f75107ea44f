"""LoRA: low-rank matrices beside frozen linear layers, by `peft`, and the merged weights that are published.

A layer with weight W computes x W^T + (alpha / rank) * (x A^T) B^T, of which only A [rank, in] and B [out, rank] are
trained (Hu et al., "LoRA" (2021), section 4.1). B starts at zero, so the policy starts as it was. Everything outside
the learner sees ordinary weights, W + (alpha / rank) * B A, under their usual names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_ray.config import ConfigError, LoraSettings

ADAPTER = "default"


def add_adapter(policy: nn.Module, settings: LoraSettings) -> None:
    """Freeze `policy` and put adapters beside its linear layers, in place. The same on every rank.

    Raises `ConfigError` where a target names none of them.
    """
    targets = settings.target_modules
    if targets != "all-linear":
        _check(policy, targets)
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=targets
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(config, policy, adapter_name=ADAPTER)
    dtype = policy.get_output_embeddings().weight.dtype
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def check_targets(model_dir: Path, settings: LoraSettings) -> None:
    """Raises `ConfigError` where a target names no layer of that model. Loads no weights."""
    if settings.target_modules != "all-linear":
        with torch.device("meta"):
            policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
        _check(policy, settings.target_modules)


def _check(policy: nn.Module, targets: list[str]) -> None:
    """The output projection is left out: it is read in chunks, past the layer's own forward."""
    head = policy.get_output_embeddings()
    linear = [name for name, layer in policy.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(
                f"learner.lora.target_modules: {target!r} names no linear layer inside this "
                f"{policy.config.model_type}. Take some of {known}, or all-linear"
            )


@contextmanager
def switched_off(policy: nn.Module) -> Iterator[None]:
    """Inside, the policy is the one that the run began with. Adapters are computed, and count nothing: under ZeRO-3
    a forward that leaves modules out would disturb the order in which parameters are fetched."""
    layers = [layer for layer in policy.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer.set_scale(ADAPTER, 0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1)


@dataclass(frozen=True, slots=True)
class Published:
    """One weight as the world outside the learner knows it."""

    name: str
    """As in the model's own checkpoint."""
    parts: tuple[nn.Parameter, ...]
    """What it is made of; the first is the model's own."""
    scale: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Also where the parameter is partitioned (ZeRO-3 keeps the whole one's shape beside it)."""
        return tuple(getattr(self.parts[0], "ds_shape", self.parts[0].shape))

    def value(self) -> Tensor:
        """The whole tensor, detached; merged in float32. The parts must be whole."""
        weight, *adapter = (part.detach() for part in self.parts)
        if not adapter:
            return weight
        down, up = (part.float() for part in adapter)
        return torch.addmm(weight.float(), up, down, alpha=self.scale)


def published(policy: nn.Module) -> Iterator[Published]:
    """All weights of `policy` in order, adapters merged in, tied ones once."""
    layers = {name: layer for name, layer in policy.named_modules() if isinstance(layer, LoraLayer)}
    for name, parameter in policy.named_parameters():
        owner, _, rest = name.partition(".base_layer.")
        if rest == "weight" and owner in layers:
            layer = layers[owner]
            adapter = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            yield Published(f"{owner}.{rest}", (parameter, *adapter), layer.scaling[ADAPTER])
        elif rest and owner in layers:
            yield Published(f"{owner}.{rest}", (parameter,))
        elif not any(part in name for part in (".lora_A.", ".lora_B.")):
            yield Published(name, (parameter,))
