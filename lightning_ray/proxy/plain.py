"""Messages as plain data: checked once, reduced to what a template can see, and the same for every way to write them.

Harnesses send messages in many shapes (a text as a string or as parts, cache marks, ids, `reasoning_content` or
`reasoning`, arguments as a string or an object). `plain` makes one shape of them: dictionaries with `role`, `content`
(a string, or a list of text parts where there are several), `reasoning`, `tool_calls`, `tool_call_id` and `name`.
Everything else is left out. Only text is accepted: nothing that a request says may make the proxy fetch something.
"""

import json
from collections.abc import Sequence
from typing import Any

from lightning_ray.proxy.errors import BadRequest
from lightning_ray.proxy.message import Message, Recent

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part -> where its text is."""


def plain(messages: Any, recent: Recent) -> list[Message]:
    """The messages of a request (Chat Completions) in plain form. Raises `BadRequest` that names the place."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadRequest("`messages` must be a list with at least one message.", param="messages")
    return recent.read(messages, _message)


def _message(message: Any, number: int) -> Message:
    where = f"messages.{number}"
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object.", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role: {role!r} is not one of {', '.join(sorted(ROLES))}.", param=f"{where}.role")
    content, thought = _content(message.get("content"), f"{where}.content")
    result: dict[str, Any] = {"role": role, "content": content}
    if isinstance(message.get("name"), str) and message["name"]:
        result["name"] = message["name"]
    if role == "assistant":
        reasoning = message.get("reasoning") or message.get("reasoning_content") or thought
        if reasoning:
            result["reasoning"] = _string(reasoning, f"{where}.reasoning")
        if message.get("tool_calls"):
            result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
            if not all(isinstance(call["function"].get("arguments"), str) for call in message["tool_calls"]):
                return Message(result)  # in Python 1 == 1.0 == True: equal objects may be different arguments
    elif role == "tool":
        result["tool_call_id"] = _string(message.get("tool_call_id") or "", f"{where}.tool_call_id")
    return Message(result, source=message)


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a string.", param=where)
    return value


def _content(content: Any, where: str) -> tuple[str | list[dict[str, Any]], str]:
    """The content, and what of it was thinking."""
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where} must be a string or a list of parts.", param=where)
    parts: list[dict[str, Any]] = []
    thought = ""
    for number, part in enumerate(content):
        place = f"{where}.{number}"
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_PARTS:
            parts.append({"type": "text", "text": _string(part.get(TEXT_PARTS[kind]) or "", place)})
        elif kind == "thinking":
            thought += _string(part.get("thinking") or "", place)
        elif kind == "tool_reference":
            parts.append({"type": kind, "name": _string(part.get("name"), f"{place}.name")})
        else:
            raise BadRequest(f"{place}: content of type {kind!r} is not supported, only text.", param=place)
    if not parts:
        return "", thought
    return (parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts), thought


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRequest(f"{where} must be a list.", param=where)
    result = []
    for number, call in enumerate(calls):
        place = f"{where}.{number}"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise BadRequest(f"{place} must be an object with a `function`.", param=place)
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        result.append({
            "id": _string(call.get("id") or "", f"{place}.id"), "type": "function",
            "function": {"name": _string(function.get("name"), f"{place}.function.name"), "arguments": arguments},
        })
    return result
