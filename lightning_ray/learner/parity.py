"""Log-probs of a rollout's trainable tokens once more, by the learner's own model code, outside a training run.

`gaps` reads the samples through `Scorer`, which is what a learner rank trains, in plain PyTorch without DeepSpeed.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lightning_ray.config import LearnerConfig
from lightning_ray.learner.batch import build, read_length
from lightning_ray.learner.model import dtype_of, load_scorer
from lightning_ray.trajectory.samples import Sample


def gaps(model_dir: Path, samples: Sequence[Sample], config: LearnerConfig, temperature: float) -> np.ndarray:
    """float32 [N]: |learner log-prob - behaviour log-prob| of all trained tokens of `samples`, one sample after the
    other. Raises `UnsupportedModel` for an architecture that the learner does not train."""
    on_gpu = torch.cuda.is_available()
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        scorer = load_scorer(model_dir, dtype=dtype_of(config.dtype, on_gpu)).eval()
        scorer = scorer.to("cuda") if on_gpu else scorer
        found = [np.empty(0, np.float32)]
        with torch.no_grad():
            for index, sample in enumerate(samples):
                if read_length(sample):
                    batch = build(samples, [index], layout=scorer.layout)
                    logprobs, _ = scorer(batch, temperature)
                    found.append(np.abs(logprobs.float().cpu().numpy() - batch.behaviour))
        return np.concatenate(found)
    finally:
        torch.set_num_threads(before)
