"""Pass rates with their uncertainty. Pure."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

Z95 = 1.959963984540054
"""The normal quantile of a two-sided 95 % interval."""


def pass_rate(passed: int, total: int) -> dict[str, Any]:
    """`{passed, total, rate, ci95}`; `ci95` is Wilson's score interval (Wilson 1927, J. Am. Stat. Assoc. 22:209),
    which is honest at rates near 0 and 1 and for few tasks."""
    if not 0 <= passed <= total or total < 1:
        raise ValueError(f"{passed} of {total} is no rate")
    rate = passed / total
    spread = Z95**2 / total
    centre = (rate + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * sqrt(rate * (1 - rate) / total + spread / (4 * total))
    low, high = min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half))  # rounding at 0 and 1
    return {"passed": passed, "total": total, "rate": rate, "ci95": [low, high]}


def rate_text(result: Mapping[str, Any]) -> str:
    """`0.92 (184 of 200, 95 % interval 0.87-0.95)`."""
    low, high = result["ci95"]
    return f"{result['rate']:.2f} ({result['passed']} of {result['total']}, 95 % interval {low:.2f}-{high:.2f})"
