"""OpenAI Responses through HTTP, with the real openai client."""

import json

import openai
import pytest

from tests.unit.proxy_parts import serving, tool_call

TOOL = {"type": "function", "name": "bash", "description": "Run a command.", "strict": True, "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"],
    "additionalProperties": False,
}}


@pytest.fixture
async def started():
    async with serving(lambda url: openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0)) as start:
        yield start


async def streamed(client, **ask):
    async with client.responses.stream(**ask) as stream:
        kinds = [event.type async for event in stream]
        return await stream.get_final_response(), kinds


async def test_law2_items_that_come_back_go_on_token_for_token(started):
    """As Codex does it: streamed, not stored, reasoning and calls echoed as items, unknown fields beside them."""
    answers = iter(["<think>\nhm\n</think>\n\nLooking.\n" + tool_call("ls"), "<think>\nok\n</think>\n\nDone."])
    server, engine, _, client = await started("reasoning", lambda request: next(answers))
    common = {"model": "policy", "tools": [TOOL], "store": False, "include": ["reasoning.encrypted_content"],
              "instructions": "Fix bugs.", "parallel_tool_calls": False, "prompt_cache_key": "k",
              "extra_body": {"client_metadata": {"x": "y"}}, "reasoning": {"effort": "medium", "summary": "auto"}}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}]}
    first, kinds = await streamed(client, **common, input=[asked])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed"
    assert json.loads(first.output[2].arguments) == {"command": "ls"} and first.output_text.strip() == "Looking."
    echo = [item.model_dump(exclude_none=True) for item in first.output]
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "a.py"}
    second = await client.responses.create(**common, input=[asked, *echo, result])
    assert second.output_text.strip() == "Done." and second.status == "completed"
    one, two = await server.finish("r0")
    assert (one.dialect, one.relation, two.relation, two.parent) == ("responses", "new_conversation", "continued", 0)
    assert two.prompt_ids[len(one.prompt_ids):].tolist()[:len(one.sampled_ids)] == one.sampled_ids.tolist()
    assert (one.masked, one.system) == (None, "Fix bugs.") and "structured_outputs" not in engine.requests[0].params
    assert second.usage.input_tokens == len(two.prompt_ids) and second.usage.output_tokens == len(two.sampled_ids)


async def test_a_previous_response_is_gone_on_from(started):
    answers = iter(["One.", "Two.", "Three."])
    server, _, _, client = await started("hermes", lambda request: next(answers))
    first = await client.responses.create(model="policy", input="Say one.", instructions="Count.")
    second = await client.responses.create(
        model="policy", input="Next.", instructions="Count.", previous_response_id=first.id
    )
    third = await client.responses.create(
        model="policy", input="Next.", instructions="Count.", previous_response_id=second.id
    )
    assert third.output_text == "Three."
    with pytest.raises(openai.BadRequestError, match="not found"):
        await client.responses.create(model="policy", input="x", previous_response_id="resp_other")
    calls = await server.finish("r0")
    assert [(call.relation, call.parent) for call in calls] == [
        ("new_conversation", None), ("continued", 0), ("continued", 1),
    ]
    assert json.loads(calls[2].messages) == [{"role": "user", "content": "Next."}]


async def test_free_form_tools_and_cut_answers(started):
    server, _, _, client = await started("hermes", lambda request: (
        '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
        if len(request.prompt_ids) > 60 else "This goes on\\"
    ))
    patch = {"type": "custom", "name": "patch", "description": "Apply a patch.",
             "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
    called, _ = await streamed(client, model="policy", input="Patch it.", tools=[patch])
    assert (called.output[0].type, called.output[0].input) == ("custom_tool_call", "*** Begin")
    output = {"type": "custom_tool_call_output", "call_id": called.output[0].call_id, "output": "ok"}
    echo = called.output[0].model_dump(exclude_none=True)
    await client.responses.create(
        model="policy", tools=[patch], input=[{"role": "user", "content": "Patch it."}, echo, output]
    )
    cut = await client.responses.create(model="policy", input="Talk.")
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    calls = await server.finish("r0")
    assert [call.relation for call in calls] == ["new_conversation", "continued", "new_conversation"]


async def test_a_schema_is_honoured_and_masked_and_errors_look_like_openais(started):
    server, engine, _, client = await started("chatml", lambda request: '{"a": 1}')
    shape = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"type": "json_schema", "name": "a", "schema": shape}
    answer = await client.responses.create(model="policy", input="x", text={"format": schema})
    assert answer.output_text == '{"a": 1}' and engine.requests[0].params["structured_outputs"].json == shape
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="policy", input="word " * 70000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.create(model="policy", input="x", background=True)
    (call,) = await server.finish("r0")
    assert call.masked == "constrained"
