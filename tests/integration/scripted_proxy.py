"""A real HTTP endpoint per rollout that answers from a script and keeps every request, for tests of harness and runner.

It stands where the proxy stands (`ProxyClient`), over TCP with a token in the path and inside network namespaces, and
speaks Chat Completions and Responses. What it lacks is a policy: answers come from `script(number of the answer)`.
"""

import asyncio
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from lightning_ray.proxy.endpoint import Endpoint, OpenRollout, Status
from lightning_ray.sandbox.network import listen_inside
from lightning_ray.trajectory.call import Call

TOKENS = 7
"""Tokens that each answer is recorded with."""


@dataclass
class Rollout:
    opened: OpenRollout
    token: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    closed: bool = False
    sites: list[web.BaseSite] = field(default_factory=list)
    waiting: set[asyncio.Task] = field(default_factory=set)
    faults: int = 0


@dataclass
class Answer:
    """`text` and, for models with tools, the `command` of a bash tool call; `delay_s` before it is given."""

    text: str = ""
    command: str | None = None
    delay_s: float = 0.0
    status: int = 200
    code: str | None = None
    """Error code, with another status than 200."""
    cut: bool = False
    """Close the connection instead."""


Script = Callable[[Rollout, int], Answer]


class ScriptedProxy:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.rollouts: dict[str, Rollout] = {}
        """All that were ever opened, by id."""
        self._runners: list[web.AppRunner] = []
        self._port = 0

    async def start(self) -> None:
        runner = await self._serve(lambda request: self._by_token(request.match_info["token"]), "/r/{token}")
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._port = runner.addresses[0][1]

    async def stop(self) -> None:
        for rollout in self.rollouts.values():
            await self._close(rollout)
        for runner in self._runners:
            await runner.cleanup()

    async def open(self, rollout: OpenRollout) -> Endpoint:
        assert rollout.rollout_id not in self.rollouts
        opened = self.rollouts[rollout.rollout_id] = Rollout(rollout, secrets.token_urlsafe(32))
        return Endpoint(f"http://127.0.0.1:{self._port}/r/{opened.token}")

    async def listen(self, rollout_id: str, pid: int, port: int) -> None:
        rollout = self.rollouts[rollout_id]
        runner = await self._serve(lambda request: rollout, "")
        site = web.SockSite(runner, listen_inside(pid, port))
        await site.start()
        rollout.sites.append(site)

    async def finish(self, rollout_id: str) -> list[Call]:
        rollout = self.rollouts[rollout_id]
        await self._close(rollout)
        return rollout.calls

    async def status(self, rollout_id: str) -> Status:
        return Status(self.rollouts[rollout_id].faults)

    async def _close(self, rollout: Rollout) -> None:
        rollout.closed = True
        for task in rollout.waiting:
            task.cancel()
        for site in rollout.sites:
            await site.stop()
        rollout.sites = []

    def _by_token(self, token: str) -> Rollout | None:
        return next((rollout for rollout in self.rollouts.values() if rollout.token == token), None)

    async def _serve(self, find: Callable[[web.Request], Rollout | None], prefix: str) -> web.AppRunner:
        async def chat(request: web.Request) -> web.Response:
            return await self._answer(request, find(request), _chat_body)

        async def responses(request: web.Request) -> web.Response:
            return await self._answer(request, find(request), _responses_body)

        app = web.Application(client_max_size=2**25)
        app.router.add_post(f"{prefix}/v1/chat/completions", chat)
        app.router.add_post(f"{prefix}/v1/responses", responses)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._runners.append(runner)
        return runner

    async def _answer(self, request: web.Request, rollout: Rollout | None,
                      make: Callable[[int, Answer], dict]) -> web.Response:
        if rollout is None or rollout.closed:
            return web.json_response({"error": {"message": "no such endpoint", "code": "not_found"}}, status=404)
        number = len(rollout.requests)
        rollout.requests.append(json.loads(await request.read()))
        answer = self.script(rollout, number)
        waits = asyncio.create_task(asyncio.sleep(answer.delay_s))
        rollout.waiting.add(waits)
        try:
            await waits
        except asyncio.CancelledError:
            return web.json_response({"error": {"message": "the rollout is over", "code": "not_found"}}, status=404)
        finally:
            rollout.waiting.discard(waits)
        if answer.cut:
            request.transport.close()
            return web.Response()
        rollout.faults += answer.status >= 500
        if answer.status != 200:
            return web.json_response({"error": {"message": answer.text, "code": answer.code}}, status=answer.status)
        rollout.calls.append(_call(len(rollout.calls), answer.text))
        return web.json_response(make(number, answer))


def _call(index: int, text: str) -> Call:
    return Call(index, np.zeros(3, np.int32), np.zeros(TOKENS, np.int32), np.zeros(TOKENS, np.float32),
                np.zeros(TOKENS, np.int32), "stop", text=text)


def _chat_body(number: int, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.command is not None:
        message["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": {
            "name": "bash", "arguments": json.dumps({"command": answer.command})}}]
    return {
        "id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": "policy",
        "choices": [{"index": 0, "message": message,
                     "finish_reason": "stop" if answer.command is None else "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": TOKENS, "total_tokens": 3 + TOKENS},
    }


def _responses_body(number: int, answer: Answer) -> dict[str, Any]:
    output: list[dict[str, Any]] = [{
        "id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": answer.text, "annotations": []}]}]
    if answer.command is not None:
        output.append({"id": f"fc_{number}", "type": "function_call", "call_id": f"call_{number}", "name": "bash",
                       "arguments": json.dumps({"command": answer.command}), "status": "completed"})
    return {
        "id": f"resp_{number}", "object": "response", "created_at": 1, "model": "policy", "status": "completed",
        "output": output, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "usage": {"input_tokens": 3, "output_tokens": TOKENS, "total_tokens": 3 + TOKENS,
                  "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
    }
