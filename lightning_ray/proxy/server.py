"""HTTP in front of the captures: which rollout a request belongs to, its path, its bounds, its response.

Over TCP the rollout is named by a secret token in the path (`/r/TOKEN/...`, 256 bits, compared in constant time, good
for that rollout only and dead once it is finished). On a listener inside a sandbox's network namespace the socket
itself is the identity, and no key is looked at. There is nothing else to reach: no listing, no reward, no control.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import time
from functools import partial

from aiohttp import web
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList

from lightning_ray.config import ProxyConfig
from lightning_ray.proxy import sse
from lightning_ray.proxy.capture import Capture
from lightning_ray.proxy.chat import Chat
from lightning_ray.proxy.codec import Codec
from lightning_ray.proxy.completions import Completions
from lightning_ray.proxy.dialect import Asked, Dialect
from lightning_ray.proxy.endpoint import Endpoint, OpenRollout
from lightning_ray.proxy.engine import Engine
from lightning_ray.proxy.errors import BadRequest, NotFound, ProxyError, TooLarge, openai_body
from lightning_ray.proxy.messages import Messages
from lightning_ray.proxy.responses import Responses
from lightning_ray.proxy.session import Exchange
from lightning_ray.sandbox.network import listen_inside
from lightning_ray.trajectory.call import Call

logger = logging.getLogger(__name__)

JSON = {"Content-Type": "application/json"}
COUNT_TOKENS = "/v1/messages/count_tokens"
IDLE_S = 75
"""An idle connection is closed after this many seconds."""
BODY_TIMEOUT_S = 120
"""A request body must be complete within this many seconds."""


class ProxyServer:
    """All rollouts of one proxy. Methods are called on one event loop."""

    def __init__(self, codec: Codec, engine: Engine, config: ProxyConfig, model: str) -> None:
        self.codec = codec
        self.engine = engine
        self.config = config
        self.model = model
        self.captures: dict[str, Capture] = {}
        self.endpoints: dict[bytes, tuple[bytes, str]] = {}
        self.sockets: dict[str, list[tuple[web.Server, asyncio.Server]]] = {}
        self.address: tuple[str, int] | None = None
        self.started = int(time.time())
        chat, self.messages = Chat(codec, model), Messages(codec)
        self.dialects: dict[str, Dialect] = {
            "/v1/chat/completions": chat, "/v1/messages": self.messages, COUNT_TOKENS: self.messages,
            "/v1/responses": Responses(codec, model), "/v1/completions": Completions(codec, model),
        }

    async def start(self) -> tuple[str, int]:
        """Listen on the loopback. OSError where the port is taken."""
        listener = socket.create_server(("127.0.0.1", self.config.port), backlog=4096, reuse_port=False)
        _, server = await self._serve(listener, self._over_tcp)
        self.address = ("127.0.0.1", listener.getsockname()[1])
        self._tcp = server
        return self.address

    async def _serve(self, listener: socket.socket, handler) -> tuple[web.Server, asyncio.Server]:
        most = self.config.max_body_mb * 1024 * 1024

        def make_request(message, payload, protocol, writer, task) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=most)

        loop = asyncio.get_running_loop()
        http = web.Server(
            handler, request_factory=make_request, handler_cancellation=True, access_log=None, keepalive_timeout=IDLE_S,
        )
        return http, await loop.create_server(http, sock=listener, backlog=4096)

    def open(self, rollout: OpenRollout) -> Endpoint:
        """Make an endpoint for a rollout. ValueError where the rollout is open already."""
        if rollout.rollout_id in self.captures:
            raise ValueError(f"rollout {rollout.rollout_id} is open already")
        if self.address is None:
            raise RuntimeError("the proxy has not been started")
        self.captures[rollout.rollout_id] = Capture(
            rollout, self.codec, self.engine, most_running=self.config.max_concurrent_calls,
            retry_grace_s=self.config.retry_grace_s,
        )
        token = secrets.token_urlsafe(32)
        self.endpoints[hashlib.sha256(token.encode()).digest()] = (token.encode(), rollout.rollout_id)
        host, port = self.address
        return Endpoint(base_url=f"http://{host}:{port}/r/{token}", token=token)

    async def listen(self, rollout_id: str, pid: int, port: int) -> None:
        """Serve the rollout on 127.0.0.1:port inside the network namespace of `pid`. OSError where that fails."""
        capture = self._capture(rollout_id)
        listener = await asyncio.to_thread(listen_inside, pid, port)
        http, server = await self._serve(listener, partial(self._answer, capture))
        self.sockets.setdefault(rollout_id, []).append((http, server))

    async def finish(self, rollout_id: str) -> list[Call]:
        """Revoke the endpoint, cancel what is in flight, and return all calls. KeyError for an unknown rollout."""
        capture = self._capture(rollout_id)
        capture.gate.close()
        self.endpoints = {key: value for key, value in self.endpoints.items() if value[1] != rollout_id}
        await capture.finish()
        for http, server in self.sockets.pop(rollout_id, ()):
            server.close()
            await http.shutdown(timeout=0)
        self.captures.pop(rollout_id, None)
        return capture.session.calls()

    def _capture(self, rollout_id: str) -> Capture:
        try:
            return self.captures[rollout_id]
        except KeyError:
            raise KeyError(f"rollout {rollout_id} is not open on this proxy") from None

    async def stop(self) -> None:
        for rollout_id in list(self.captures):
            await self.finish(rollout_id)
        if self.address is not None:
            self._tcp.close()

    async def _over_tcp(self, request: web.BaseRequest) -> web.StreamResponse:
        parts = request.rel_url.raw_path.split("/", 3)
        if len(parts) >= 3 and parts[1] == "r":
            token = parts[2].encode()
            known = self.endpoints.get(hashlib.sha256(token).digest())
            if known is not None and hmac.compare_digest(known[0], token):
                return await self._answer(self.captures[known[1]], request, "/" + (parts[3] if len(parts) > 3 else ""))
        return self._refuse(NotFound("There is nothing here."))

    async def _answer(self, capture: Capture, request: web.BaseRequest, path: str | None = None) -> web.StreamResponse:
        path = (request.rel_url.raw_path if path is None else path).rstrip("/")
        if request.method in ("GET", "HEAD"):
            if path == "":
                return web.Response(body=b"{}", headers=JSON)
            if path in ("/v1/models", "/models"):
                return web.Response(body=self._models(), headers=JSON)
        dialect = self.dialects.get(path) or self.dialects.get("/v1" + path)
        if dialect is None:
            return self._refuse(NotFound(f"There is no {request.method} {path or '/'}."))
        if request.method != "POST":
            return self._refuse(BadRequest(f"{path} takes POST, not {request.method}."), dialect)
        try:
            capture.gate.enter()
        except ProxyError as error:
            return self._refuse(error, dialect)
        try:
            if path == COUNT_TOKENS:
                asked = self.messages.read_count(await self._body(request))
                return web.Response(body=self.messages.count(await capture.count(asked)), headers=JSON)
            return await self._call(capture, request, dialect)
        except ProxyError as error:
            return self._refuse(error, dialect)
        finally:
            capture.gate.leave()

    async def _body(self, request: web.BaseRequest) -> bytes:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise TooLarge(f"The request is longer than {self.config.max_body_mb} MB.") from None
        except TimeoutError:
            raise BadRequest("The request body did not arrive in time.") from None

    async def _call(self, capture: Capture, request: web.BaseRequest, dialect: Dialect) -> web.StreamResponse:
        body = await self._body(request)
        asked = dialect.read(body, capture.session)
        retried = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        exchange, task = capture.begin(asked, body, dialect.name, retried=retried)
        capture.arrive(exchange)
        delivered = False
        try:
            if asked.stream:
                response = await self._stream(request, dialect, asked, exchange, task)
            else:
                await asyncio.shield(task)
                body = dialect.answer(asked, exchange, self._created(capture, exchange))
                response = web.Response(body=body, headers=JSON)
                await response.prepare(request)
                await response.write_eof()
            delivered = True
            return response
        finally:
            capture.leave(exchange, delivered=delivered)

    async def _stream(
        self, request: web.BaseRequest, dialect: Dialect, asked: Asked, exchange: Exchange, task: asyncio.Task
    ) -> web.StreamResponse:
        """Wait with keep-alives, then write the whole answer as events. Early errors are ordinary error responses."""
        response = web.StreamResponse(headers=sse.HEADERS)
        while True:
            done, _ = await asyncio.wait([task], timeout=self.config.keepalive_s)
            if done:
                break
            if not response.prepared:
                await response.prepare(request)
            await response.write(dialect.keep_alive)
        if not response.prepared:
            task.result()
            await response.prepare(request)
        try:
            task.result()
            await response.write(dialect.stream(asked, exchange, int(time.time())))
        except ProxyError as error:
            await response.write(dialect.stream_error(error))
        await response.write_eof()
        return response

    def _created(self, capture: Capture, exchange: Exchange) -> int:
        return int(time.time() - (capture.now() - exchange.started_s))

    def _models(self) -> bytes:
        card = ModelCard(
            id=self.model, created=self.started, owned_by="lightning-ray", max_model_len=self.codec.max_context
        )
        return ModelList(data=[card]).model_dump_json(exclude={"data": {"__all__": {"permission"}}}).encode()

    def _refuse(self, error: ProxyError, dialect: Dialect | None = None) -> web.Response:
        body = dialect.error(error) if dialect else openai_body(error)
        return web.Response(status=error.status, body=body, headers=JSON)
