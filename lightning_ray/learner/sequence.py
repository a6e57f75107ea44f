"""Sequence parallelism: a team of ranks reads each micro-batch together, every rank a part of its positions.

All layers but attention work on single positions. Around attention the ranks exchange parts of the sequence for parts
of the heads and back (Jacobs et al., "DeepSpeed Ulysses" (2023), section 3.1); the exchange is DeepSpeed's, and the
attention between is the learner's own over packed samples. Log-probs and entropies of a rank's own tokens are then
given to its whole team, so that every loss is computed as on one rank, also one that reads whole samples (`gspo`);
each rank counts its own tokens only, and the sum over all ranks is the loss.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

from lightning_ray.config import ConfigError
from lightning_ray.learner.attention import packed_attention
from lightning_ray.learner.batch import MicroBatch, part_of

SPLIT = "lightning_ray_split"
"""The name of packed attention over a split sequence."""


class Team:
    """The ranks that this one reads with. All ranks must make theirs together."""

    def __init__(self, size: int) -> None:
        self.size = size
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.number, self.position = divmod(rank, size)
        self.count = ranks // size
        self.group: dist.ProcessGroup | None = None
        if size > 1:
            groups = [dist.new_group(range(first, first + size)) for first in range(0, ranks, size)]
            self.group = groups[self.number]

    def attend(self, config: PreTrainedConfig) -> str:
        """Registers attention for a model of this configuration, split over the team; returns its name."""
        # here, because models are also read without DeepSpeed (`parity.py`)
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if heads % self.size or (kv_heads % self.size and self.size % kv_heads):
            raise ConfigError(
                f"learner.sequence_parallel: {self.size} does not fit this model's {heads} attention heads and "
                f"{kv_heads} key-value heads. Take a divisor of the first that divides the second or is its multiple"
            )
        AttentionInterface.register(
            SPLIT,
            UlyssesSPAttentionHF(
                attn=packed_attention,
                batch_size=1,
                attn_head_count=heads,
                attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
                kv_head_count=kv_heads,
                num_hidden_layers=config.num_hidden_layers,
                process_group=self.group,
                seq_length_is_variable=True,
            ),
        )
        return SPLIT

    def whole(self, values: Tensor, own: np.ndarray, count: int) -> Tensor:
        """[n] of this rank's own tokens -> [count] of the micro-batch's. The gradient goes to the own ones."""
        mine = torch.from_numpy(own).to(values.device)
        everyone = torch.zeros(count, dtype=values.dtype, device=values.device)
        everyone[mine] = values.detach()[: len(own)]
        dist.all_reduce(everyone, group=self.group)
        if not len(own):  # its one selected position only carries the backward pass
            return everyone + 0 * values.sum()
        return everyone.index_copy(0, mine, values)

    def own(self, batch: MicroBatch) -> np.ndarray:
        """float32 [N]: 1 for the tokens that this rank counts."""
        if self.size == 1:
            return np.ones(len(batch.targets), dtype=np.float32)
        counts = np.zeros(len(batch.targets), dtype=np.float32)
        counts[part_of(batch, self.position, self.size).own] = 1
        return counts
