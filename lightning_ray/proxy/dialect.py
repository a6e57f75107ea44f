"""What a dialect is: it reads a request body, and writes answers and errors the way its vendor does."""

import json
import marshal
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError

from lightning_ray.proxy import sse
from lightning_ray.proxy.codec import Codec
from lightning_ray.proxy.errors import BadRequest, ProxyError, openai_body
from lightning_ray.proxy.message import Message, Recent
from lightning_ray.proxy.plain import plain
from lightning_ray.proxy.session import Choice, Exchange, Session


@dataclass(slots=True)
class Asked:
    """One request, read."""

    request: Any
    """vLLM's `ChatCompletionRequest`, or `CompletionRequest`."""
    messages: list[Message]
    """The conversation in Chat Completions form; empty for Completions."""
    n: int
    stream: bool
    prompts: list[str | list[int]] = field(default_factory=list)
    """The prompts of Completions; empty for a conversation."""
    original: Any = None
    """The request as the dialect's own type, where it is another."""


class Dialect(Protocol):
    """One vendor's API."""

    name: str
    keep_alive: bytes

    def read(self, body: bytes, session: Session) -> Asked:
        """Raises `ProxyError` for what cannot be honoured. Looks into the session for what a request refers to."""

    def answer(self, asked: Asked, exchange: Exchange, created: int) -> bytes:
        """The response body, not streamed."""

    def stream(self, asked: Asked, exchange: Exchange, created: int) -> bytes:
        """The whole event stream of the answer."""

    def error(self, error: ProxyError) -> bytes:
        """The body of an error response."""

    def stream_error(self, error: ProxyError) -> bytes:
        """An error as an event, where the stream has begun."""


class OpenAIDialect:
    """What OpenAI's APIs have in common."""

    keep_alive = sse.KEEP_ALIVE

    def __init__(self, codec: Codec, model: str) -> None:
        self.codec = codec
        self.model = model

    def error(self, error: ProxyError) -> bytes:
        return openai_body(error)

    def stream_error(self, error: ProxyError) -> bytes:
        return sse.event(openai_body(error).decode())

    def tokens(self, choice: Choice) -> list[str]:
        """The text of each sampled token by itself."""
        return [self.codec.decode([token]) for token in choice.token_ids.tolist()]


_construct = BaseModel.__dict__["model_construct"].__func__


def made(kind: type[BaseModel], **fields: Any) -> Any:
    """An object of a protocol type from values that are known to be right. (The SDKs' own `construct` goes through
    every field again; this is pydantic's.)"""
    return _construct(kind, None, **fields)


def scrub(value: Any) -> Any:
    """`value` (JSON) without lone surrogates, which no tokenizer can read: each becomes U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {scrub(key): scrub(item) for key, item in value.items()}
    if isinstance(value, list):
        return [scrub(item) for item in value]
    return value


def load(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body."""
    try:
        data = json.loads(body)
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None
    except ValueError as error:
        raise BadRequest(f"The request body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadRequest("The request body must be a JSON object.")
    return scrub(data) if b"\\u" in body else data


def check(model: type, data: dict[str, Any]) -> Any:
    """`data` as a pydantic protocol object; what it refuses becomes a `BadRequest` that names the field."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where}: {first['msg']}" if where else first["msg"], param=where or None) from None
    except VLLMValidationError as error:
        raise BadRequest(str(error), param=error.parameter) from None


def chat_request(data: dict[str, Any], recent: Recent) -> Any:
    """vLLM's `ChatCompletionRequest` from a body; its messages are plain ones, which vLLM need not look at again.

    What else a harness sends, tools above all, is mostly what it sent before, and then need not be read again."""
    messages = plain(data.get("messages"), recent)
    rest = {**data, "messages": []}
    try:
        sent = marshal.dumps(rest, 2)  # tells 1 from true and from 1.0, which `==` does not
    except ValueError:  # not JSON alone: a dialect made objects of it
        request = check(ChatCompletionRequest, rest)
    else:
        if recent.request is None or recent.request[0] != sent:
            recent.request = (sent, check(ChatCompletionRequest, rest))
        request = recent.request[1].model_copy()
    request.messages = messages
    return request
