"""What a trainer would get of one run of a harness: a pure function over its recorded calls, and its text.

`report` counts as the trainer does (`trajectory/samples.py`): the same branches, the same masks, the same account of
tokens. `lines` writes it for readers, `Report.as_dict` for scripts. Nothing here runs or asks anything.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_ray.trajectory.branches import branches
from lightning_ray.trajectory.call import Call, End, Trajectory
from lightning_ray.trajectory.samples import call_mask, rollout_samples
from lightning_ray.trajectory.selection import ALL, EXCLUDED, select

REASONS = {
    "new_conversation": "a conversation of its own (a sub-agent, a title, a second task)",
    "continued": "goes on from an earlier call",
    "forked": "goes on from a call that another one has continued already",
    "resampled": "the same prompt was asked again",
    "rewritten_history": "the harness changed or left out earlier messages",
    "compacted": "the harness replaced earlier messages by fewer or by a summary",
    "template_rewrote": "the chat template writes earlier turns differently from how they were sampled",
    "reasoning_dropped": "the reasoning of an earlier answer was not sent back, or the template strips it",
    "stop_string": "a stop string cut the earlier answer, so its last tokens are not in the history",
}
"""What a call's `relation` means."""
REWRITTEN = frozenset({"rewritten_history", "compacted", "template_rewrote", "reasoning_dropped", "stop_string"})
"""Relations of calls that go on from an earlier one in the harness's eyes, and not in tokens."""
OFTEN = 0.5
"""A share of rewritten calls (of those that could have continued) from which it is "every turn"."""
GAP_LIMIT = 0.1
"""A mean |difference of log-probs| above this is more than the rounding of bfloat16 explains."""
TOOL_MARKS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>")
"""Texts with which models begin a tool call. An answer that holds one although no parser is set reached the harness as
plain text."""
LOG_CHARS = 600
SYSTEM_CHARS = 60


@dataclass(frozen=True, slots=True)
class Parity:
    """Log-probs of the trainable tokens, the engine's against the learner's."""

    tokens: int
    mean: float
    """Mean |difference|, in nats."""
    largest: float
    temperature: float


@dataclass(frozen=True, slots=True)
class BranchReport:
    calls: list[int]
    """Indices, from the root to the leaf. Calls shared with an earlier branch are among them."""
    relation: str
    """Of the first call that belongs to this branch alone: why it is a branch."""
    reason: str
    dialect: str
    length: int
    """Tokens, prompt and answers together."""
    sampled: int
    """Tokens of the calls that this branch owns."""
    trainable: int
    system: str
    """The beginning of the system prompt."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run ended, beside its calls."""

    end: End
    reason: str
    """As in `Trajectory`."""
    reward: float | None = None
    """None where nothing was graded."""
    exit_status: str = ""
    """The harness's own word, or `exit code N`."""
    log: str = ""
    """The end of what the harness printed."""
    seconds: float = 0.0
    """How long the harness ran."""
    sandbox: str = "bubblewrap"
    """`none` where it ran without."""
    unsafe: str = ""
    """What the run went on without."""


@dataclass(frozen=True, slots=True)
class Report:
    """See `lines` for how it reads."""

    ending: Ending
    calls: int
    dialects: dict[str, int]
    relations: dict[str, int]
    branches: list[BranchReport]
    sampled: int
    trainable: int
    masked: dict[str, int]
    """Reason -> tokens. `sampled == trainable + sum(masked.values())`."""
    prompt_tokens: int
    overridden: dict[str, list[Any]]
    """Parameter -> the values that the harness asked for and did not get, in the order of their first use."""
    parity: Parity | None
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return asdict(self)


def report(
    calls: Sequence[Call], ending: Ending, *, max_context: int, train: str = ALL, parity: Parity | None = None,
    tool_parser: str | None = None,
) -> Report:
    """`max_context`: tokens of the longest sample that the trainer takes. `train`: which branches it selects.
    `tool_parser`: the policy's."""
    calls = select(calls, train)
    trajectory = Trajectory("capture", "capture", "capture", list(calls), end="graded", reward=1.0)
    _, ledger, _ = rollout_samples(trajectory, advantage=1.0, rollout=0, max_tokens=max_context)
    found = []
    for branch in branches(calls):
        owned = [calls[position] for position in branch.calls if position in branch.owned]
        leaf, first = calls[branch.calls[-1]], owned[0]
        found.append(BranchReport(
            calls=list(branch.calls), relation=first.relation, reason=REASONS.get(first.relation, first.relation),
            dialect=leaf.dialect, length=len(leaf.prompt_ids) + len(leaf.sampled_ids),
            sampled=sum(len(call.sampled_ids) for call in owned),
            trainable=sum(int(call_mask(call, max_context).sum()) for call in owned),
            system=" ".join(leaf.system.split())[:SYSTEM_CHARS],
        ))
    made = Report(
        ending=ending, calls=len(calls), dialects=dict(Counter(call.dialect for call in calls)),
        relations=dict(Counter(call.relation for call in calls)), branches=found, sampled=ledger.sampled,
        trainable=ledger.trained, masked=dict(ledger.dropped), prompt_tokens=trajectory.tokens_prompt,
        overridden=overridden(calls), parity=parity,
    )
    made.warnings.extend(warnings(made, calls, train=train, tool_parser=tool_parser))
    return made


def overridden(calls: Sequence[Call]) -> dict[str, list[Any]]:
    asked: dict[str, list[Any]] = {}
    for call in calls:
        for name, value in call.overridden.items():
            values = asked.setdefault(name, [])
            if value not in values:
                values.append(value)
    return asked


def warnings(made: Report, calls: Sequence[Call], *, train: str, tool_parser: str | None) -> list[str]:
    """What somebody who brings a harness should know before training with it."""
    found = []
    if made.ending.end == "harness_failed":
        found.append(f"the harness did not end well ({made.ending.reason}); a trainer gives it reward 0")
    if made.ending.end == "infra_failed":
        found.append(f"the run failed for no fault of the harness ({made.ending.reason}); a trainer runs it again")
    if made.ending.unsafe:
        found.append(f"what the model wrote ran without isolation: {made.ending.unsafe}")
    if not calls:
        return [*found, "no call was made: the harness did not reach the endpoint. It must take its base URL from "
                        "OPENAI_BASE_URL, OPENAI_API_BASE or ANTHROPIC_BASE_URL, or from its own settings, where "
                        "{base_url} is filled in"]
    rewritten = [call for call in calls if call.relation in REWRITTEN]
    could = len(calls) - sum(call.relation == "new_conversation" for call in calls)
    if len(rewritten) > 1 and len(rewritten) >= OFTEN * could:
        names = ", ".join(sorted({call.relation for call in rewritten}))
        found.append(f"history is rewritten every turn: {counted(len(made.branches), 'branch')} of "
                     f"{counted(len(calls), 'call')} ({names}). Each one is trained on its own prompt, which costs "
                     "time and memory")
    if constrained := [call for call in calls if call.masked == "constrained"]:
        tokens = sum(len(call.sampled_ids) for call in constrained)
        found.append("constrained decoding (a forced tool choice or a JSON schema) in "
                     f"{counted(len(constrained), 'call')}: {counted(tokens, 'token')} will not be trained")
    if cut := sum(call.finish_reason == "length" for call in calls):
        found.append(f"{counted(cut, 'answer')} of {len(calls)} cut off by a token limit. Raise sampling.max_tokens or "
                     "policy.max_context if they should not be")
    if gone := sum(call.masked == "cancelled" for call in calls):
        found.append(f"the harness went away before {counted(gone, 'answer')}; their tokens are masked as cancelled")
    if tool_parser is None and (marked := sum(any(mark in call.text for mark in TOOL_MARKS) for call in calls)):
        found.append(f"{counted(marked, 'answer')} held a tool call that was passed on as text, because "
                     "policy.tool_parser is not set. Give vLLM's parser of this model, as --policy.tool_parser hermes")
    if train != ALL and all(call.masked == EXCLUDED for call in calls):
        found.append(f"capture.train {train!r} fits no system prompt of this run")
    if not made.trainable:
        found.append("nothing is trainable: a rollout like this one teaches nothing")
    if made.parity is not None and made.parity.mean > GAP_LIMIT:
        found.append(f"learner and engine disagree: their log-probs differ by {made.parity.mean:.3f} on average. "
                     "Training on this policy would be off-policy from the first step")
    return found


def counted(number: int, thing: str) -> str:
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"


def lines(made: Report) -> list[str]:
    """The report as text, one string a line."""
    ending = made.ending
    dialects = ", ".join(f"{name} {count}" for name, count in made.dialects.items())
    reward = "not graded" if ending.reward is None else f"reward {ending.reward:g}"
    text = [_row("harness", f"{ending.exit_status or 'did not end'} after {ending.seconds:.1f} s, "
                            f"{_where(ending.sandbox)}"),
            _row("end", f"{ending.end} ({ending.reason}), {reward}"),
            _row("calls", f"{made.calls} ({dialects}), {made.prompt_tokens:,} prompt tokens" if dialects else "0")]
    if made.branches:
        text.append(_row("branches", str(len(made.branches))))
    for number, branch in enumerate(made.branches, start=1):
        what = f'"{branch.system}"' if branch.system else "no system prompt"
        text.append(f"  {number}. {_calls(branch.calls)}: {branch.relation}, {branch.reason}")
        text.append(f"     {branch.dialect}, {counted(branch.length, 'token')}, {branch.sampled:,} sampled, "
                    f"{branch.trainable:,} trainable; {what}")
    masked = "".join(f", {count:,} masked ({reason})" for reason, count in made.masked.items())
    text.append(_row("tokens", f"{made.sampled:,} sampled, {made.trainable:,} trainable{masked}"))
    if made.parity is not None:
        parity = made.parity
        text.append(_row("log-probs", f"engine and learner differ by {parity.mean:.4f} on average, "
                                      f"{parity.largest:.4f} at most ({counted(parity.tokens, 'token')}, "
                                      f"temperature {parity.temperature:g})"))
    if made.overridden:
        asked = "; ".join(f"{name} {' '.join(map(str, values))}" for name, values in made.overridden.items())
        text.append(_row("overridden", f"the harness asked for {asked}"))
    text += [_row("warning", warning) for warning in made.warnings]
    if ending.log.strip() and (ending.end != "graded" or not made.calls):
        text.append("The end of what the harness printed:")
        text += [f"  {line}" for line in ending.log.strip()[-LOG_CHARS:].splitlines()]
    return text


def _row(name: str, value: str) -> str:
    return f"{name:<11}{value}"


def _where(sandbox: str) -> str:
    return "without a sandbox" if sandbox == "none" else f"in a sandbox ({sandbox})"


def _calls(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"call {indices[0]}"
    if list(indices) == list(range(indices[0], indices[-1] + 1)):
        return f"calls {indices[0]} to {indices[-1]}"
    return "calls " + " ".join(map(str, indices))
