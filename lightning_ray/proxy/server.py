"""HTTP in front of a capture: paths, bounds, bodies, responses. It knows nothing of how rollouts come and go."""

import asyncio
import logging
import socket
import time

from aiohttp import web
from aiohttp.web_protocol import _RequestHandler as Handler
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList

from lightning_ray.config import ProxyConfig
from lightning_ray.proxy import sse
from lightning_ray.proxy.capture import Capture
from lightning_ray.proxy.chat import Chat
from lightning_ray.proxy.codec import Codec
from lightning_ray.proxy.completions import Completions
from lightning_ray.proxy.dialect import Asked, Dialect
from lightning_ray.proxy.errors import BadRequest, NotFound, ProxyError, TooLarge, openai_body
from lightning_ray.proxy.gate import Visit
from lightning_ray.proxy.messages import Messages
from lightning_ray.proxy.responses import Responses
from lightning_ray.proxy.session import Exchange

logger = logging.getLogger(__name__)

JSON = {"Content-Type": "application/json"}
COUNT_TOKENS = "/v1/messages/count_tokens"
IDLE_S = 75
"""An idle connection is closed after this many seconds."""
BODY_TIMEOUT_S = 120
"""A request body must be complete within this many seconds."""
BACKLOG = 4096
CLOSE_S = 0.05
"""So long a connection may go on when its socket is closed. (To aiohttp 0 means for ever.)"""


class Front:
    """Answers the requests of rollouts in all dialects."""

    def __init__(self, codec: Codec, config: ProxyConfig, model: str) -> None:
        self.codec = codec
        self.config = config
        self.model = model
        self.most_body = config.max_body_mb * 1024 * 1024
        self.started = int(time.time())
        self.messages = Messages(codec)
        self.dialects: dict[str, Dialect] = {
            "/v1/chat/completions": Chat(codec, model), "/v1/completions": Completions(codec, model),
            "/v1/responses": Responses(codec, model), "/v1/messages": self.messages, COUNT_TOKENS: self.messages,
        }

    async def serve(
        self, listener: socket.socket, handler: Handler, *, most_connections: int | None = None
    ) -> "Site":
        """Serve a listening socket with `handler(request)`."""
        loop = asyncio.get_running_loop()

        def make_request(message, payload, protocol, writer, task) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop)

        http = web.Server(
            handler, request_factory=make_request, handler_cancellation=True, access_log=None, keepalive_timeout=IDLE_S,
        )

        def connect() -> asyncio.Protocol:
            full = most_connections is not None and len(http.connections) >= most_connections
            return Refusing() if full else http()

        return Site(http, await loop.create_server(connect, sock=listener, backlog=BACKLOG))

    async def answer(self, capture: Capture, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Answer one request of a rollout; `path` begins behind what named the rollout. Never raises for what a
        client can do."""
        path = path.rstrip("/")
        if request.method in ("GET", "HEAD"):
            if path == "":
                return web.Response(body=b"{}", headers=JSON)
            if path in ("/v1/models", "/models"):
                return web.Response(body=self._models(), headers=JSON)
        dialect = self.dialects.get(path) or self.dialects.get("/v1" + path)
        if dialect is None:
            return refuse(NotFound(f"There is no {request.method} {path or '/'}."))
        if request.method != "POST":
            return refuse(BadRequest(f"{path} takes POST, not {request.method}."), dialect)
        try:
            with capture.gate.visit() as visit:
                body = await self._body(request, visit)
                if path.endswith(COUNT_TOKENS):
                    tokens = await capture.count(self.messages.read_count(body))
                    return web.Response(body=self.messages.count(tokens), headers=JSON)
                return await self._call(capture, request, dialect, body)
        except ProxyError as error:
            return refuse(error, dialect)
        except ConnectionError:
            raise
        except Exception:
            logger.exception("a request of rollout %s failed", capture.session.opened.rollout_id)
            capture.session.fault()
            return refuse(ProxyError("The proxy failed on this request."), dialect)

    async def _body(self, request: web.BaseRequest, visit: Visit) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.content.iter_any():
                    visit.receive(len(part))
                    body += part
                    if len(body) > self.most_body:
                        raise TooLarge(f"The request is longer than {self.config.max_body_mb} MB.")
        except TimeoutError:
            raise BadRequest("The request body did not arrive in time.") from None
        return bytes(body)

    async def _call(
        self, capture: Capture, request: web.BaseRequest, dialect: Dialect, body: bytes
    ) -> web.StreamResponse:
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
                created = int(time.time() - (capture.now() - exchange.started_s))
                response = web.Response(body=dialect.answer(asked, exchange, created), headers=JSON)
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

    def _models(self) -> bytes:
        card = ModelCard(
            id=self.model, created=self.started, owned_by="lightning-ray", max_model_len=self.codec.max_context
        )
        return ModelList(data=[card]).model_dump_json(exclude={"data": {"__all__": {"permission"}}}).encode()


def refuse(error: ProxyError, dialect: Dialect | None = None) -> web.Response:
    """An error response in the dialect's shape."""
    return web.Response(status=error.status, body=dialect.error(error) if dialect else openai_body(error), headers=JSON)


class Refusing(asyncio.Protocol):
    """Closes a connection as soon as it comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.abort()


class Site:
    """A socket that is being served."""

    def __init__(self, http: web.Server, server: asyncio.Server) -> None:
        self.http = http
        self.server = server

    async def close(self) -> None:
        """Stop listening and cut all connections."""
        self.server.close()
        await self.http.shutdown(timeout=CLOSE_S)
