"""Messages that were read before are found again, and nothing that differs is taken for the same."""

import json
import pickle

import pytest

from lightning_ray.proxy.dialect import chat_request
from lightning_ray.proxy.message import CONVERSATIONS, Message, Recent
from lightning_ray.proxy.plain import plain
from tests.unit.test_proxy_exactness import Rollout


def conversation(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def test_the_shared_beginning_is_read_once():
    recent = Recent()
    first = plain(conversation("a", "b", "c"), recent)
    second = plain(conversation("a", "b", "c", "d", "e"), recent)
    assert all(one is other for one, other in zip(first, second, strict=False))
    side = plain(conversation("a", "x"), recent)
    assert side[0] is first[0] and side[1] == {"role": "assistant", "content": "x"}
    assert plain(conversation("a", "b", "c", "d", "e", "f"), recent)[:5] == second
    assert len(recent.conversations) == 2  # the one that goes on, and the one beside it
    for number in range(2 * CONVERSATIONS):
        plain(conversation(f"other {number}"), recent)
    assert len(recent.conversations) == CONVERSATIONS


@pytest.mark.parametrize("field, one, other", [
    ("arguments", {"x": 1}, {"x": True}), ("arguments", {"x": 1}, {"x": 1.0}), ("arguments", '{"x":1}', '{"x": 1}'),
    ("name", "a", "b"),
])
def test_what_differs_is_read_anew(field, one, other):
    recent = Recent()

    def read(value) -> Message:
        function = {"name": "bash", "arguments": "{}", field: value}
        (message,) = plain([{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}], recent)
        return message

    assert read(one) != read(other)


@pytest.mark.parametrize("one, other", [({"seed": 1}, {"seed": 2}), ({"default": 1}, {"default": True}),
                                        ({"default": 1}, {"default": 1.0})])
def test_a_request_is_read_anew_where_anything_but_its_messages_differs(one, other):
    recent = Recent()

    def read(text: str, parameters: dict):
        tool = {"type": "function", "function": {"name": "bash", "parameters": parameters}}
        return chat_request({"messages": conversation(text), "tools": [tool], "tool_choice": "auto"}, recent)

    first, again, changed = read("a", one), read("b", one), read("c", other)
    assert first.tools is again.tools and [request.messages[0]["content"] for request in (first, again)] == ["a", "b"]
    assert json.dumps(changed.tools[0].function.parameters) == json.dumps(other)


def test_a_message_is_pickled_as_a_plain_dictionary():
    message = Message({"role": "user", "content": "x"}, source={"role": "user", "content": "x", "id": 1})
    again = pickle.loads(pickle.dumps(message))
    assert type(again) is dict and again == message


def test_an_old_message_costs_no_second_reading():
    """vLLM reads, and the protection of special tokens looks at, the new messages of a conversation only."""
    asked = Rollout("hermes", tools=True)
    looked = []
    protected = asked.codec._protected
    messages = [{"role": "user", "content": "Go."}]
    try:
        asked.codec._protected = lambda message: looked.append(message) or protected(message)
        for turn in range(30):
            looked.clear()
            _, answer = asked.ask(messages, asked.say(f'<tool_call>\n{{"name": "bash", "arguments": {{"n":{turn}}}}}'
                                                      "\n</tool_call>"))
            (call,) = answer.tool_calls
            echo = {"id": call.id, "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(json.loads(call.arguments), indent=1)}}
            messages = [*messages, {"role": "assistant", "content": "", "tool_calls": [echo]},
                        {"role": "tool", "tool_call_id": call.id, "content": f"line {turn}"}]
            assert len(looked) <= 3
    finally:
        asked.codec._protected = protected
    assert {record.relation for record in asked.session.records[1:]} == {"continued"}
