"""The learning curve of a run as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw_curve(path: Path, metrics: Sequence[dict[str, Any]], before: dict[str, Any] | None,
               after: dict[str, Any] | None) -> None:
    """Pass rate of training rollouts by step, and held-out pass rates with 95 % intervals, as a PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [line["step"] for line in metrics]
    axes.plot(steps, [line["pass_rate"] for line in metrics], color="#8fb3d9", label="training rollouts", linewidth=1.5)
    between = [(line["step"], line["heldout_pass_rate"]) for line in metrics if "heldout_pass_rate" in line]
    if between:
        axes.plot(*zip(*between, strict=True), "o", color="#c2410c", markersize=4)
    last = steps[-1] if steps else 0
    for place, result in ((0, before), (last, after)):
        if result is None:
            continue
        low, high = result["ci95"]
        axes.errorbar([place], [result["rate"]], yerr=[[result["rate"] - low], [high - result["rate"]]], fmt="s",
                      color="#c2410c", capsize=4, label="held-out tasks, 95 % interval" if place == 0 else None)
        axes.annotate(f"{result['rate']:.2f}", (place, result["rate"]), xytext=(8, 8), textcoords="offset points")
    axes.set(xlabel="step (policy updates)", ylabel="pass rate", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    partial = path.with_suffix(".partial")
    figure.savefig(partial, format="png", dpi=130)
    partial.replace(path)
