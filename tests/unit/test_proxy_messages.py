"""Anthropic Messages through HTTP, with the real anthropic client."""

import asyncio

import anthropic
import pytest

from tests.unit.proxy_parts import serving, tool_call

TOOL = {"name": "bash", "description": "Run a command.", "input_schema": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"],
}}


@pytest.fixture
async def started():
    async with serving(lambda url: anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0)) as start:
        yield start


def user(content):
    return {"role": "user", "content": content}


async def test_law2_a_tool_conversation_streamed_goes_on_token_for_token(started):
    """As Claude Code does it: system as an array, cache marks that move, thinking, streamed, arguments as objects."""
    answers = iter(["<think>\nhm\n</think>\n\nLooking.\n" + tool_call("ls -la 'é'"), "<think>\nok\n</think>\n\nDone."])
    server, _, _, client = await started("reasoning", lambda request: next(answers))
    common = {"model": "policy", "max_tokens": 100, "tools": [TOOL], "metadata": {"user_id": "u"},
              "thinking": {"type": "adaptive"}, "extra_body": {"context_management": {"edits": []}}}
    system = [{"type": "text", "text": "You fix bugs.", "cache_control": {"type": "ephemeral"}}]
    asked = user([{"type": "text", "text": "Fix it", "cache_control": {"type": "ephemeral"}}])
    async with client.messages.stream(**common, system=system, messages=[asked]) as stream:
        first = await stream.get_final_message()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[2].input == {"command": "ls -la 'é'"} and first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": [{"type": "text", "text": "a.py"}]}
    echo = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
    second = await client.messages.create(**common, system=system, messages=[
        user("Fix it"), echo, user([{**result, "cache_control": {"type": "ephemeral"}}]),
    ])
    assert [block.type for block in second.content] == ["thinking", "text"] and second.stop_reason == "end_turn"
    one, two = await server.finish("r0")
    assert (one.dialect, one.relation, two.relation, two.parent) == ("messages", "new_conversation", "continued", 0)
    assert one.system == "You fix bugs."
    assert two.prompt_ids[len(one.prompt_ids):].tolist()[:len(one.sampled_ids)] == one.sampled_ids.tolist()
    assert second.usage.input_tokens == len(two.prompt_ids) and second.usage.output_tokens == len(two.sampled_ids)


async def test_a_stream_says_the_same_as_an_answer(started):
    _, _, _, client = await started("hermes", lambda request: "Two.\n" + tool_call("ls") + "\n" + tool_call("pwd"))
    ask = {"model": "policy", "max_tokens": 100, "tools": [TOOL], "messages": [user("Go")]}
    whole = await client.messages.create(**ask)
    async with client.messages.stream(**ask) as stream:
        streamed = await stream.get_final_message()
    say = lambda message: [(b.type, getattr(b, "text", None), getattr(b, "input", None)) for b in message.content]  # noqa: E731
    assert say(whole) == say(streamed)
    assert [block.input for block in whole.content[1:]] == [{"command": "ls"}, {"command": "pwd"}]
    assert whole.usage.output_tokens == streamed.usage.output_tokens


async def test_tokens_are_counted(started):
    server, _, _, client = await started("hermes", lambda request: "ok")
    ask = {"model": "policy", "messages": [user("How long is this?")], "system": "Be brief.", "tools": [TOOL]}
    counted = await client.messages.count_tokens(**ask)
    answer = await client.messages.create(**ask, max_tokens=10)
    assert counted.input_tokens == answer.usage.input_tokens > 10
    assert len(await server.finish("r0")) == 1


async def test_errors_look_like_anthropics(started):
    _, _, _, client = await started("chatml", lambda request: "x", max_calls=0)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await client.messages.create(model="policy", max_tokens=0, messages=[user("x")])
    with pytest.raises(anthropic.PermissionDeniedError) as refused:
        await client.messages.create(model="policy", max_tokens=5, messages=[user("x")])
    assert refused.value.body["error"]["type"] == "permission_error"
    _, _, _, client = await started("chatml", lambda request: "x")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* tokens > 65536 maximum") as refused:
        await client.messages.create(model="policy", max_tokens=5, messages=[user("word " * 70000)])
    assert refused.value.body["type"] == "error"
    with pytest.raises(anthropic.BadRequestError, match="image"):
        source = {"type": "url", "url": "http://169.254.169.254/"}
        await client.messages.create(
            model="policy", max_tokens=5, messages=[user([{"type": "image", "source": source}])]
        )


async def test_pings_while_it_waits_and_stop_sequences(started):
    _, engine, _, client = await started("chatml", lambda request: "Late.", config={"keepalive_s": 0.1})
    engine.hold = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, engine.hold.set)
    async with client.messages.stream(
        model="policy", max_tokens=9, messages=[user("x")], stop_sequences=["END"]
    ) as stream:
        assert await stream.get_final_text() == "Late."
    assert engine.requests[0].stop == ["END"] and engine.requests[0].max_tokens == 9


async def test_a_forced_tool_is_honoured_and_masked(started):
    server, engine, _, client = await started("hermes", lambda request: tool_call("ls"))
    answer = await client.messages.create(
        model="policy", max_tokens=100, tools=[TOOL], messages=[user("x")], tool_choice={"type": "any"}
    )
    assert answer.content[0].input == {"command": "ls"}
    assert engine.requests[0].params["structured_outputs"] is not None
    (call,) = await server.finish("r0")
    assert call.masked == "constrained"
