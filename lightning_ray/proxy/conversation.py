"""Conversations in normal form, so that two of them can be compared whatever the harness did to their JSON.

Every chat dialect is brought to the messages of OpenAI Chat Completions first. Two messages are *the same* when a
reader could not tell them apart: role, texts, tool calls by name and parsed arguments. Not compared: ids of tool
calls, `cache_control`, key order and number formatting of arguments, a lone text as a string or as a list of one part,
and reasoning, which some harnesses send back and others drop (the rendered text decides there).

A conversation is named by a chain of digests, one after each message, each covering everything before it: equal
digests mean equal histories, and the longest shared history is found without comparing messages one by one.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from lightning_ray.proxy.message import Message

LEADING_ROLES = frozenset({"system", "developer"})


def same_numbers(value: Any) -> Any:
    """`value` with every float that is a whole number as an int: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: same_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [same_numbers(item) for item in value]
    return value


def normal_arguments(arguments: Any) -> str:
    """Arguments of a tool call: sorted compact JSON where they parse, else the text itself."""
    if isinstance(arguments, str):
        if not arguments:
            return "{}"
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return arguments
    return json.dumps(same_numbers(arguments), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def texts(content: Any) -> list[str]:
    """The text parts of a message's content; a part that is no text as its JSON."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content] if content else []
    found = []
    for part in content:
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            found.append(part["text"])
        else:
            found.append(json.dumps(
                {key: value for key, value in dict(part).items() if key != "cache_control"}, sort_keys=True, default=str
            ))
    return [text for text in found if text]


def digest(parts: Iterable[str | bytes]) -> bytes:
    """16 bytes that name a sequence of texts (each is delimited, so that no two sequences run together)."""
    state = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def message_parts(message: dict[str, Any]) -> list[str]:
    """What tells one message from another, as texts."""
    parts = ["role", str(message.get("role"))]
    if message.get("name"):
        parts += ["name", str(message["name"])]
    for text in texts(message.get("content")):
        parts += ["text", text]
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        parts += ["call", str(function.get("name")), normal_arguments(function.get("arguments"))]
    return parts


def message_digest(message: Message) -> bytes:
    """16 bytes that name a message."""
    if message.digest is None:
        message.digest = digest(message_parts(message))
    return message.digest


def settings_digest(tools: str, template_kwargs: dict[str, Any]) -> bytes:
    """What else reaches the template: equal conversations under other tools (as JSON) are other conversations."""
    return digest([tools, json.dumps(template_kwargs, sort_keys=True, default=str)])


def chain(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """`len(messages) + 1` digests; number `k` names the settings and the first `k` messages."""
    digests = [start]
    for message in messages:
        if message.link is None or message.link[0] != digests[-1]:
            message.link = (digests[-1], blake2b(digests[-1] + message_digest(message), digest_size=16).digest())
        digests.append(message.link[1])
    return digests


def system_prompt(messages: Sequence[dict[str, Any]]) -> str:
    """The text of the leading system (or developer) messages."""
    lines: list[str] = []
    for message in messages:
        if message.get("role") not in LEADING_ROLES:
            break
        lines += texts(message.get("content"))
    return "\n".join(lines)
