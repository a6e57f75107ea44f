"""Which branches of a rollout are trained (`capture.train`). Pure.

Branches are told apart by the system prompt that their calls began with: a harness gives its side conversations
(titles, summaries, sub-agents) one of their own. `all` selects every branch; `main` those under the system prompt that
most calls have (then the one under which more tokens were sampled, then the earlier one); anything else is a regular
expression, found anywhere in the system prompt. What is left out is masked as `excluded`, so that the account of tokens
names it (law 1).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_ray.trajectory.call import Call

ALL, MAIN = "all", "main"
EXCLUDED = "excluded"


def check_rule(rule: str) -> str:
    """The rule itself. ValueError, with value and remedy, where it is no rule."""
    if not rule:
        raise ValueError("'' fits every system prompt. Say all, main, or a text that only some of them hold")
    try:
        re.compile(rule)
    except re.error as error:
        raise ValueError(f"{rule!r} is neither all nor main nor a regular expression ({error}). Escape the special "
                         "characters of a literal text") from None
    return rule


def select(calls: Sequence[Call], rule: str) -> list[Call]:
    """The calls of one rollout; those that `rule` leaves out are masked as `excluded`, unless they are masked for a
    reason of their own."""
    wanted = _chooser(calls, rule)
    return [call if call.masked is not None or wanted(call.system) else replace(call, masked=EXCLUDED)
            for call in calls]


def _chooser(calls: Sequence[Call], rule: str) -> Callable[[str], bool]:
    if rule == ALL:
        return lambda system: True
    if rule == MAIN:
        main = main_system_prompt(calls)
        return lambda system: system == main
    pattern = re.compile(rule)
    return lambda system: pattern.search(system) is not None


def main_system_prompt(calls: Sequence[Call]) -> str:
    """The system prompt that most calls have; empty where there are no calls."""
    count: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for call in calls:
        count[call.system] += 1
        tokens[call.system] += len(call.sampled_ids)
    return max(count, key=lambda system: (count[system], tokens[system]), default="")
