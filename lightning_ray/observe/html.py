"""A run and a rollout as HTML, for notebooks. Pure: text from data. Everything that a policy, a harness or a task wrote
is escaped; there are no scripts and nothing is loaded from elsewhere.

A `RunDirectory` and a `Trajectory` show themselves so at the end of a cell; `rollout_html` shows more when it is told
more.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from lightning_ray.statistics import rate_text
from lightning_ray.trajectory.branches import branches
from lightning_ray.trajectory.call import Call, Trajectory
from lightning_ray.trajectory.samples import call_mask

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, as a tokenizer's `decode`."""

SHOWN_STEPS = 10
WIDTH = 600
TEXT = "white-space:pre-wrap;font-family:monospace;margin:2px 0"
SAMPLED = f"{TEXT};border-left:3px solid #16a34a;padding-left:6px"
LEAST_LOGPROB = -5.0
"""Log-probs from here down have the strongest colour."""


def rollout_html(trajectory: Trajectory, *, decode: Decode | None = None, max_tokens: int | None = None) -> str:
    """One rollout as a conversation: what each call added to the prompt, what was sampled, and what of it is trained.

    Each sampled token has a colour by its log-prob (the unlikelier, the stronger), and its id, log-prob, policy version
    and whether it is trained in its tooltip; tokens that are not trained are grey. `decode` gives the tokens' text;
    without it they are boxes beside the text of the whole answer. `max_tokens` (`policy.max_context`) shows what is cut
    off as too long.
    """
    parts = [f"<h4>{escape(trajectory.rollout_id)}: task {escape(trajectory.task_id)}</h4>"]
    for call in trajectory.calls:
        parts.append(f'<div style="color:#6b7280;margin-top:8px">{escape(heading(call))}</div>')
        for message in json.loads(call.messages or "[]"):
            role, text = str(message.get("role", "?")), content(message)
            parts.append(f'<div style="{TEXT}"><b>{escape(role)}</b>: {escape(text)}</div>')
        parts.append(_answer(call, decode, max_tokens))
    verdict = f"{trajectory.end}: {trajectory.reason}; reward {trajectory.reward:.2f}"
    if trajectory.suspicions:
        verdict += f"; suspicions: {', '.join(trajectory.suspicions)}"
    parts.append(f'<div style="margin-top:8px"><b>{escape(verdict)}</b>; {len(branches(trajectory.calls))} branches, '
                 f"{trajectory.tokens_sampled} tokens sampled</div>")
    parts.append(f'<pre style="margin:4px 0">{escape(trajectory.patch) or "(empty patch)"}</pre>')
    return f'<div>{"".join(parts)}</div>'


def run_html(name: str, metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None) -> str:
    """A run: its curve, its last steps, and held-out pass rates where it is done."""
    parts = [f"<h4>run {escape(name)}: {len(metrics)} steps</h4>"]
    for when in ("before", "after"):
        result = (summary or {}).get(f"heldout_{when}")
        if result:
            parts.append(f"<div>held-out pass rate {when}: {rate_text(result)}</div>")
    if metrics:
        from lightning_ray.observe.curve import curve_png  # matplotlib takes half a second, and `view` needs none

        png = curve_png(metrics, *((summary or {}).get(f"heldout_{when}") for when in ("before", "after")))
        parts.append(f'<img width="{WIDTH}" alt="pass rate by step" '
                     f'src="data:image/png;base64,{b64encode(png).decode()}">')
        parts.append(_table(metrics[-SHOWN_STEPS:]))
    return f'<div>{"".join(parts)}</div>'


def heading(call: Call) -> str:
    """A call in a line."""
    span = f"version {call.versions.min()}-{call.versions.max()}" if len(call.versions) else "no token"
    mean = f", mean log-prob {call.logprobs.mean():.3f}" if len(call.logprobs) else ""
    masked = f", not trained: {call.masked}" if call.masked else ""
    return (f"call {call.index} ({call.dialect}, {call.relation}): {len(call.prompt_ids)} tokens in, "
            f"{len(call.sampled_ids)} out ({call.finish_reason}), {span}{mean}{masked}")


def content(message: Mapping[str, Any]) -> str:
    """What a message says, its tool calls included."""
    body = message.get("content") or ""
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    calls = message.get("tool_calls")
    return f"{text} {json.dumps(calls, ensure_ascii=False)}" if calls else text


def _answer(call: Call, decode: Decode | None, max_tokens: int | None) -> str:
    limit = len(call.prompt_ids) + len(call.sampled_ids) if max_tokens is None else max_tokens
    tokens = [_token(call, place, trained, decode) for place, trained in enumerate(call_mask(call, limit))]
    if decode is not None:
        return f'<div style="{SAMPLED}">{"".join(tokens)}</div>'
    return f'<div style="{SAMPLED}">{escape(call.text)}</div><div style="line-height:10px">{"".join(tokens)}</div>'


def _token(call: Call, place: int, trained: np.bool_, decode: Decode | None) -> str:
    token, logprob = int(call.sampled_ids[place]), float(call.logprobs[place])
    text = "▪" if decode is None else escape(decode([token]))
    strength = min(1.0, logprob / LEAST_LOGPROB) if np.isfinite(logprob) else 1.0
    colour = f"background:rgba(234,88,12,{max(0.0, strength):.2f})" if trained else "background:#e5e7eb;color:#9ca3af"
    use = "trained" if trained else f"not trained: {call.masked or 'truncated'}"
    tip = f"token {token}, log-prob {logprob:.3f}, version {call.versions[place]}, {use}"
    return f'<span style="{colour}" title="{escape(tip)}">{text}</span>'


def _table(metrics: Sequence[Mapping[str, Any]]) -> str:
    names = {"step": "step", "pass_rate": "pass rate", "heldout_pass_rate": "held out", "rollouts": "rollouts",
             "tokens_sampled": "tokens sampled", "tokens_trained": "tokens trained", "loss": "loss",
             "wall_s": "seconds"}
    head = "".join(f"<th>{title}</th>" for title in names.values())
    rows = "".join(f"<tr>{''.join(f'<td>{_cell(line.get(name))}</td>' for name in names)}</tr>" for line in metrics)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return escape(f"{value:.3f}" if isinstance(value, float) else str(value))
