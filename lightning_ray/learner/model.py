"""The policy as the learner sees it: a causal language model that gives log-probs of tokens instead of logits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from lightning_ray.config import LoraSettings
from lightning_ray.learner.adapter import add_adapter
from lightning_ray.learner.attention import PACKED, packable
from lightning_ray.learner.batch import Layout, MicroBatch, Part
from lightning_ray.learner.logprobs import LogprobHead
from lightning_ray.learner.sequence import Team


class UnsupportedModel(ValueError):
    """The learner cannot train this architecture as it would run in deployment."""


class Scorer(nn.Module):
    """`policy` with its output projection read through a `LogprobHead`."""

    def __init__(self, policy: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.policy = policy
        self.head = LogprobHead(policy.get_output_embeddings())
        self.layout = layout

    def forward(self, batch: MicroBatch | Part, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs (with gradient) and entropies of the trained tokens that are selected, both float32 [N]."""
        device = self.head.weight.device

        def tensor(array) -> Tensor:  # type: ignore[no-untyped-def]
            return torch.from_numpy(array).to(device)

        packed = {"position_ids": tensor(batch.position_ids), "sample_lengths": batch.lengths}
        hidden = self.policy.base_model(
            input_ids=tensor(batch.input_ids), use_cache=False, **(packed if self.layout == "packed" else {})
        ).last_hidden_state
        chosen = hidden.flatten(0, 1).index_select(0, tensor(batch.select))
        return self.head(chosen, tensor(batch.targets), temperature)


def load_scorer(
    model_dir: Path,
    *,
    dtype: torch.dtype,
    gradient_checkpointing: bool = False,
    lora: LoraSettings | None = None,
    team: Team | None = None,
) -> Scorer:
    """The model in `model_dir`, in `dtype`; packed where its architecture allows, split over `team` where one is given.
    """
    config = AutoConfig.from_pretrained(model_dir)
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "logit_scale", None):
        raise UnsupportedModel(f"{config.model_type} transforms its logits, which the learner does not do")
    layout: Layout = "packed" if packable(config) else "padded"
    attention = PACKED if layout == "packed" else "sdpa"
    if team is not None and team.size > 1:
        if layout == "padded":
            raise UnsupportedModel(
                f"learner.sequence_parallel is {team.size}, and {config.model_type} has recurrent layers, which read a "
                "sequence from its start: it cannot be split. Set it to 1"
            )
        attention = team.attend(config)
    disable_progress_bar()
    policy = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation=attention)
    if lora is not None:
        add_adapter(policy, lora)
    if gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Scorer(policy.train(), layout)


def dtype_of(name: str, on_gpu: bool) -> torch.dtype:
    """`learner.dtype`; `auto` is bfloat16 where the processor multiplies it natively, else float32."""
    if name != "auto":
        return getattr(torch, name)
    fast = on_gpu or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32
