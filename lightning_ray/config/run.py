"""What a run is: its tasks, how its policy is measured, and the Ray that it runs on."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from lightning_ray.config.reading import Part


class RunConfig(Part):
    dir: Path = Path("runs")
    """Where runs are written; each run gets a directory of its own below it."""
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    steps: int = Field(default=100, ge=1)
    """Policy updates."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    checkpoint_every: int = Field(default=20, ge=1)
    """Steps between checkpoints; the last step always makes one. A resume learns the steps that were recorded since the
    last one again, from their rollouts: a killed run loses the step in progress at most."""
    checkpoints_kept: int = Field(default=2, ge=1)
    logprob_gap_limit: float = Field(default=0.2, gt=0)
    """The run stops when learner and generator disagree by more than this (mean |Δ log-prob| of a step)."""


class TasksConfig(Part):
    source: str = "one_line_bugs"
    """`one_line_bugs` (generated), or a JSONL or Parquet file in SWE-smith's schema."""
    heldout_source: Path | None = None
    """A file of held-out tasks, for file sources."""
    train: int = Field(default=2000, ge=1)
    """How many tasks to train on (generated sources), or at most this many (files)."""
    heldout: int = Field(default=200, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**32)


class PricesConfig(Part):
    """What things cost, in any one currency, for the bill."""

    tokens_in: float = Field(default=0.0, ge=0)
    """A million prompt tokens that no cache held."""
    tokens_in_cached: float = Field(default=0.0, ge=0)
    """A million prompt tokens from the cache."""
    tokens_out: float = Field(default=0.0, ge=0)
    """A million sampled tokens."""
    device_hour: float = Field(default=0.0, ge=0)
    """An hour of one device."""

    @property
    def given(self) -> bool:
        return any((self.tokens_in, self.tokens_in_cached, self.tokens_out, self.device_hour))


class EvaluationConfig(Part):
    every: int = Field(default=0, ge=0)
    """Steps between held-out evaluations; 0: only before and after."""
    temperature: float = Field(default=1.0, ge=0)
    tasks: int | None = Field(default=None, ge=1)
    """Held-out tasks of the evaluations in between; null: all. Before and after always take all."""
    samples: int = Field(default=1, ge=1)
    """`lightning-ray evaluate`: rollouts of each task; pass@k is given for each power of two up to it."""
    prices: PricesConfig = PricesConfig()


class RayConfig(Part):
    address: str | None = None
    """An existing cluster (`auto`, `ray://host:port`); null: the cluster that this job runs in, else a local one."""
    object_store_gib: float = Field(default=0.5, ge=0.1)
    """Object store of a local cluster; Ray takes none below 75 MiB."""
