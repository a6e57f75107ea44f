"""The learning curve of a run as a picture."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

MEAN_OF = 5
"""Steps that the heavier line averages: one step has few rollouts, and its tasks are easy or hard by chance."""


def draw_curve(path: Path, metrics: Sequence[Mapping[str, Any]], before: Mapping[str, Any] | None,
               after: Mapping[str, Any] | None) -> None:
    """Writes `curve_png`, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(curve_png(metrics, before, after))
    partial.replace(path)


def curve_png(metrics: Sequence[Mapping[str, Any]], before: Mapping[str, Any] | None,
              after: Mapping[str, Any] | None) -> bytes:
    """Pass rate of training rollouts by step, and held-out pass rates with 95 % intervals."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [line["step"] for line in metrics]
    rates = [line["pass_rate"] for line in metrics]
    axes.plot(steps, rates, color="#c5d8ee", label="training rollouts", linewidth=1.2)
    if len(rates) >= MEAN_OF:
        means = np.convolve(rates, np.full(MEAN_OF, 1 / MEAN_OF), mode="valid")
        axes.plot(steps[MEAN_OF - 1:], means, color="#2f6db3", label=f"mean of the last {MEAN_OF} steps", linewidth=2)
    between = [(line["step"], line["heldout_pass_rate"]) for line in metrics
               if line.get("heldout_pass_rate") is not None]
    if between:
        axes.plot(*zip(*between, strict=True), "o", color="#c2410c", markersize=4)
    last = steps[-1] if steps else 0
    for place, result, beside in ((0, before, 8), (last, after, -34)):
        if result is None:
            continue
        low, high = result["ci95"]
        axes.errorbar([place], [result["rate"]], yerr=[[result["rate"] - low], [high - result["rate"]]], fmt="s",
                      color="#c2410c", capsize=4, label="held-out tasks, 95 % interval" if place == 0 else None)
        axes.annotate(f"{result['rate']:.2f}", (place, result["rate"]), xytext=(beside, 8), textcoords="offset points")
    axes.set(xlabel="step (policy updates)", ylabel="pass rate", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()
