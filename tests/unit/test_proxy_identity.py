"""What an endpoint gives away, and what one rollout may use: nothing of others, and no more than its bounds."""

import asyncio
import contextlib
import json
import socket

import aiohttp
import openai
import pytest
from aiohttp import web

from lightning_ray.proxy.endpoint import Status
from tests.unit.proxy_parts import codec_of, rollout, serving

ASK = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
async def started():
    async with serving(lambda url: openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0)) as start:
        yield start


async def test_law6_an_endpoint_reaches_its_own_rollout_and_nothing_else(started):
    server, _, endpoint, client = await started("chatml", lambda request: "mine")
    other = server.open(rollout("other", mode="evaluate"))
    token = endpoint.base_url.rpartition("/")[2]
    assert other.base_url != endpoint.base_url and len(token) >= 43
    answer = await client.responses.create(model="policy", input="x")
    base = endpoint.base_url.replace(token, "{}")
    async with aiohttp.ClientSession() as http:
        for path in ["", "/", "/r/", "/r/x/v1/models", "/v1/models", "/metrics", "/r/" + "a" * 43 + "/v1/models"]:
            async with http.get(base.split("/r/")[0] + path) as response:
                assert response.status == 404 and "rollout" not in (await response.text()).replace("x", "")
        for path in ["/v1/rollouts", "/v1/reward", "/finish", "/open", "/../other", f"/v1/responses/{answer.id}",
                     "/v1/chat/completions/../../finish"]:
            async with http.post(endpoint.base_url + path, json=ASK) as response:
                assert response.status == 404
        async with http.post(other.base_url + "/v1/responses", json={
            "model": "policy", "input": "y", "previous_response_id": answer.id
        }) as response:
            assert response.status == 400 and "not found" in await response.text()
        await server.finish("r0")
        async with http.get(endpoint.base_url + "/v1/models") as response:
            assert response.status == 404
        async with http.get(other.base_url + "/v1/models") as response:
            assert response.status == 200


async def test_calls_beyond_the_bound_wait_and_a_flood_is_told_to_slow_down(started):
    server, engine, _, client = await started("chatml", lambda request: "y", config={"max_concurrent_calls": 2})
    engine.hold = asyncio.Event()
    asked = [asyncio.create_task(client.chat.completions.create(**ASK)) for _ in range(40)]
    refused = 0
    while refused < 40 - 2 * 16:
        done, _ = await asyncio.wait(asked, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        refused = sum(isinstance(one.exception(), openai.RateLimitError) for one in done)
        asked = [one for one in asked if one not in done] + list(done)
    assert len(engine.requests) == 2
    engine.hold.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(one, openai.RateLimitError) for one in results) == 8
    assert len(engine.requests) == 32 == len(await server.finish("r0"))


async def test_bodies_together_are_bounded(started):
    server, engine, endpoint, _ = await started("chatml", lambda request: "y", config={"max_body_mb": 1})
    engine.hold = asyncio.Event()
    body = json.dumps(ASK).encode().ljust(900_000)
    async with aiohttp.ClientSession() as http:
        async def ask() -> int:
            async with http.post(endpoint.base_url + "/v1/chat/completions", data=body) as response:
                return response.status

        asked = [asyncio.create_task(ask()) for _ in range(12)]
        refused = 0
        while refused < 3:  # nine of these bodies are shorter than eight of the longest
            done, _ = await asyncio.wait(asked, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert {one.result() for one in done} == {429}
            refused += len(done)
            asked = [one for one in asked if one not in done]
        engine.hold.set()
        assert await asyncio.gather(*asked) == [200] * 9
        assert await ask() == 200  # what has been answered no longer counts
    assert len(await server.finish("r0")) == 10


@pytest.mark.parametrize("path, body", [
    ("chat/completions", {"messages": [{"role": "user", "content": "y" * 3_000_000}]}),
    ("completions", {"prompt": "y" * 3_000_000}),
])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(started, monkeypatch, path, body):
    server, engine, endpoint, _ = await started("chatml", lambda request: "y")
    monkeypatch.setattr(server.codec.specials, "_encode_stretch", lambda *text: pytest.fail("it was tokenised"))
    async with aiohttp.ClientSession() as http, http.post(f"{endpoint.base_url}/v1/{path}", json=body) as response:
        assert response.status == 400 and (await response.json())["error"]["code"] == "context_length_exceeded"
    assert not engine.requests


async def test_connections_of_a_sandbox_are_bounded(started):
    server, _, _, _ = await started("chatml", lambda request: "y")

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=b"here")

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    site = await server.front.serve(listener, answer, most_connections=2)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    await asyncio.sleep(0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    held.pop()[1].close()
    await asyncio.sleep(0.1)
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/") as response:
        assert await response.text() == "here"
    held.pop()[1].close()
    await site.close()


async def test_the_cap_on_tokens_ends_the_rollout_with_its_reason(started):
    server, engine, _, client = await started("chatml", lambda request: "abcdefgh", max_tokens=6)
    await client.chat.completions.create(**ASK)
    assert engine.requests[0].max_tokens == 6
    for _ in range(2):
        with pytest.raises(openai.PermissionDeniedError, match=r"harness.max_tokens \(6\)"):
            await client.chat.completions.create(**ASK)
    assert server.status("r0") == Status(limit="harness.max_tokens (6)")


@pytest.mark.parametrize("body, param", [
    ({"messages": []}, "messages"), ({"messages": [{"role": "boss", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
     "messages.0.content.0"),
    ({**ASK, "chat_template": "{{ 1 }}"}, "chat_template"), ({**ASK, "use_beam_search": True}, "use_beam_search"),
    ({**ASK, "n": 10**6}, "n"), ({**ASK, "max_tokens": 0}, "max_tokens"), ({**ASK, "functions": [{}]}, "functions"),
    ({**ASK, "tool_choice": "required"}, "tool_choice"), ({**ASK, "stop": 5}, None),
    ({"messages": {"a": 1}}, "messages"), ({**ASK, "modalities": ["text", "audio"]}, "modalities"),
    ({**ASK, "audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls.0"),
])
async def test_bad_requests_name_the_field(started, body, param):
    _, engine, endpoint, _ = await started("chatml", lambda request: "y")
    async with aiohttp.ClientSession() as http, http.post(
        endpoint.base_url + "/v1/chat/completions", json=body
    ) as response:
        error = (await response.json())["error"]
    assert response.status == 400 and error["type"] == "invalid_request_error" and error["message"]
    if param is not None:
        assert error["param"] == param
    assert not engine.requests


@pytest.mark.parametrize("body", [
    b"", b"[]", b"nothing", b'{"messages": ' + b"[" * 100_000, b"\xff\xfe",
    b'{"messages": [{"role": "user", "content": NaN}]}',
])
async def test_bodies_that_are_no_request_are_refused(started, body):
    _, _, endpoint, _ = await started("chatml", lambda request: "y")
    async with aiohttp.ClientSession() as http:
        for path in ("chat/completions", "completions", "responses", "messages"):
            async with http.post(f"{endpoint.base_url}/v1/{path}", data=body) as response:
                assert response.status == 400, path


async def test_a_request_that_the_proxy_fails_on_is_a_server_error_and_counted(started):
    server, _, _, client = await started("chatml", lambda request: 1 // 0)
    for asked in range(2):
        with pytest.raises(openai.InternalServerError, match="The proxy failed"):
            await client.chat.completions.create(**ASK)
        assert server.status("r0").faults == asked + 1
    assert await server.finish("r0") == [] and server.status("r0").faults == 2


async def test_lone_surrogates_do_not_stop_a_tokenizer(started):
    server, _, endpoint, _ = await started("chatml", lambda request: "y")
    async with aiohttp.ClientSession() as http, http.post(
        endpoint.base_url + "/v1/chat/completions", data=b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}'
    ) as response:
        assert response.status == 200
    (call,) = await server.finish("r0")
    assert "a\ufffdb" in codec_of("chatml").decode(call.prompt_ids.tolist())
