"""Chat Completions through HTTP, with the real openai client; the model's words are scripted, nothing else is."""

import asyncio
import json
from itertools import pairwise

import aiohttp
import numpy as np
import openai
import pytest

from tests.unit.proxy_parts import BASH, codec_of, serving, tool_call


@pytest.fixture
async def started():
    async with serving(lambda url: openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0)) as start:
        yield start


def user(text):
    return {"role": "user", "content": text}


async def test_an_answer_comes_back_and_is_recorded(started):
    server, engine, _, client = await started("chatml", lambda request: "The answer.")
    answer = await client.chat.completions.create(model="policy", messages=[user("The question?")])
    assert answer.choices[0].message.content == "The answer."
    assert answer.choices[0].finish_reason == "stop"
    (call,) = await server.finish("r0")
    assert call.prompt_ids.tolist() == engine.requests[0].prompt_ids
    assert codec_of("chatml").decode(call.prompt_ids.tolist()) == (
        "<|im_start|>user\nThe question?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert call.text == "The answer.<|im_end|>"
    assert (call.relation, call.parent, call.masked) == ("new_conversation", None, None)
    assert answer.usage.prompt_tokens == len(call.prompt_ids)
    assert answer.usage.completion_tokens == len(call.sampled_ids) == len(call.logprobs) == len(call.versions)


async def test_a_stream_says_the_same_as_an_answer(started):
    _, _, _, client = await started("hermes", lambda request: "Let me look.\n" + tool_call("ls"))
    ask = {"model": "policy", "messages": [user("Look")], "tools": [BASH]}
    whole = await client.chat.completions.create(**ask)
    stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    calls = [d for c in chunks if c.choices for d in c.choices[0].delta.tool_calls or ()]
    message = whole.choices[0].message
    assert content == message.content
    assert [(c.function.name, c.function.arguments) for c in calls] == [("bash", '{"command": "ls"}')]
    assert message.tool_calls[0].function.arguments == '{"command": "ls"}'
    assert whole.choices[0].finish_reason == "tool_calls"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices


async def test_law2_tool_turns_are_continued_token_for_token(started):
    answers = iter(["Looking.\n" + tool_call("ls"), tool_call("cat a"), "Done."])
    server, _, _, client = await started("hermes", lambda request: next(answers))
    messages = [{"role": "system", "content": "Help."}, user("Fix it")]
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[BASH])
        echo = answer.choices[0].message.model_dump(exclude_none=True)
        for call in echo.get("tool_calls", []):  # re-serialised, as many harnesses do
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
        messages.append(echo)
        messages += [{"role": "tool", "tool_call_id": c["id"], "content": "a.py"} for c in echo.get("tool_calls", [])]
    calls = await server.finish("r0")
    assert [call.relation for call in calls] == ["new_conversation", "continued", "continued"]
    assert [call.parent for call in calls] == [None, 0, 1]
    for before, after in pairwise(calls):
        whole = np.concatenate([before.prompt_ids, before.sampled_ids])
        assert after.prompt_ids[:len(whole)].tolist() == whole.tolist()
    codec = codec_of("hermes")
    assert codec.decode(calls[2].prompt_ids.tolist()).endswith(
        "<tool_response>\na.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_errors_look_like_openais(started):
    _, _, endpoint, client = await started("chatml", lambda request: "x")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="policy", messages=[user("word " * 70000)])
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length is 65536" in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="policy", messages=[user("x")], top_logprobs=3, logprobs=True)
    assert refused.value.param == "top_logprobs"
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="policy", input="x")
    other = openai.AsyncOpenAI(base_url=endpoint.base_url[:-1] + "/v1", api_key="any", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        await other.chat.completions.create(model="policy", messages=[user("x")])
    await other.close()
    async with aiohttp.ClientSession() as http:
        async with http.post(endpoint.base_url + "/v1/chat/completions", data=b"{") as response:
            assert response.status == 400 and (await response.json())["error"]["type"] == "invalid_request_error"
        async with http.head(endpoint.base_url) as response:
            assert response.status == 200
    assert [model.id async for model in client.models.list()] == ["policy"]


async def test_sampling_is_pinned_in_training_and_honoured_in_evaluation(started):
    ask = {"model": "policy", "messages": [user("x")], "temperature": 0.0, "top_p": 0.5, "max_tokens": 99999, "seed": 3}
    server, engine, _, client = await started("chatml", lambda request: "y")
    await client.chat.completions.create(**ask)
    (call,) = await server.finish("r0")
    sent = engine.requests[0]
    assert (sent.temperature, sent.params, sent.max_tokens) == (1.0, {}, 256)
    assert call.overridden == {"temperature": 0.0, "top_p": 0.5, "max_tokens": 99999, "seed": 3}
    server, engine, _, client = await started("chatml", lambda request: "y", mode="evaluate")
    await client.chat.completions.create(**ask)
    assert (engine.requests[0].temperature, engine.requests[0].params) == (0.0, {"top_p": 0.5})


async def test_law1_a_client_that_goes_away_is_counted_as_cancelled(started):
    server, engine, _, client = await started("chatml", lambda request: "Long.", config={"retry_grace_s": 0.05})
    engine.hold = asyncio.Event()
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.2).chat.completions.create(model="policy", messages=[user("x")])
    for _ in range(100):
        if engine.aborted:
            break
        await asyncio.sleep(0.02)
    assert engine.aborted == [engine.requests[0].request_id]
    (call,) = await server.finish("r0")
    assert (call.finish_reason, call.masked, len(call.sampled_ids)) == ("abort", "cancelled", 2)


async def test_a_retry_joins_the_call_in_flight(started):
    server, engine, _, client = await started("chatml", lambda request: "Slow.", config={"retry_grace_s": 5})
    engine.hold = asyncio.Event()
    asyncio.get_running_loop().call_later(1.2, engine.hold.set)
    answer = await client.with_options(timeout=0.3, max_retries=5).chat.completions.create(
        model="policy", messages=[user("x")]
    )
    assert answer.choices[0].message.content == "Slow."
    (call,) = await server.finish("r0")
    assert call.masked is None and len(engine.requests) == 1


async def test_identical_prompts_are_two_calls(started):
    server, engine, _, client = await started("chatml", lambda request: "Same.")
    for _ in range(2):
        await client.chat.completions.create(model="policy", messages=[user("x")])
    calls = await server.finish("r0")
    assert [call.relation for call in calls] == ["new_conversation", "resampled"]
    assert engine.requests[0].seed != engine.requests[1].seed


async def test_keep_alive_while_a_stream_waits(started):
    _, engine, endpoint, _ = await started("chatml", lambda request: "Late.", config={"keepalive_s": 0.1})
    engine.hold = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, engine.hold.set)
    async with aiohttp.ClientSession() as http, http.post(
        endpoint.base_url + "/v1/chat/completions", json={"messages": [user("x")], "stream": True}
    ) as response:
        text = await response.text()
    assert text.count(": keep-alive") >= 3 and "Late." in text and text.endswith("data: [DONE]\n\n")


async def test_the_cap_on_calls_ends_the_rollout(started):
    server, _, _, client = await started("chatml", lambda request: "y", max_calls=1)
    await client.chat.completions.create(model="policy", messages=[user("x")])
    with pytest.raises(openai.PermissionDeniedError) as refused:
        await client.chat.completions.create(model="policy", messages=[user("z")])
    assert refused.value.code == "rollout_limit"
    assert len(await server.finish("r0")) == 1


async def test_several_choices_are_several_calls(started):
    words = iter(["one", "two", "three"])
    server, _, _, client = await started("chatml", lambda request: next(words))
    answer = await client.chat.completions.create(model="policy", messages=[user("x")], n=3)
    assert [choice.message.content for choice in answer.choices] == ["one", "two", "three"]
    calls = await server.finish("r0")
    assert [call.text for call in calls] == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert len({call.prompt_ids.tobytes() for call in calls}) == 1


async def test_streamed_choices_are_told_apart_and_each_can_be_gone_on_from(started):
    words = iter(["one", "two", "three"])
    server, _, _, client = await started("chatml", lambda request: next(words))
    stream = await client.chat.completions.create(model="policy", messages=[user("x")], n=2, stream=True)
    said = {0: "", 1: ""}
    async for chunk in stream:
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert said == {0: "one", 1: "two"}
    await client.chat.completions.create(
        model="policy", messages=[user("x"), {"role": "assistant", "content": "two"}, user("y")])
    calls = await server.finish("r0")
    assert [(call.relation, call.parent) for call in calls][2] == ("continued", 1)
