"""The dialect of Anthropic Messages, streamed and not, with `count_tokens`.

Requests are read by vLLM's Anthropic protocol and turned into Chat Completions by vLLM's own conversion; answers are
written with the types of the `anthropic` package.
"""

import json
from typing import Any

from anthropic import types
from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.exceptions import VLLMValidationError

from lightning_ray.proxy import sse
from lightning_ray.proxy.codec import Answer, Codec
from lightning_ray.proxy.dialect import Asked, check, load, made
from lightning_ray.proxy.errors import BadRequest, ContextLength, ProxyError
from lightning_ray.proxy.message import Recent
from lightning_ray.proxy.plain import plain
from lightning_ray.proxy.session import Choice, Exchange, Session

ERROR_TYPES = {
    400: "invalid_request_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error",
}


def dump(model: BaseModel) -> str:
    return model.model_dump_json(exclude_unset=True, warnings=False)


def arguments(text: str) -> dict[str, Any]:
    """The input of a tool call; a parser may have let through what is no JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def stop_reason(choice: Choice) -> tuple[str, str | None]:
    """Anthropic's `stop_reason` and `stop_sequence`."""
    if choice.answer.tool_calls:
        return "tool_use", None
    if choice.finish_reason == "length":
        return "max_tokens", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "end_turn", None


class Messages:
    """`POST /v1/messages`."""

    name = "messages"
    keep_alive = sse.event('{"type":"ping"}', "ping")

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.system_first = codec.system_must_lead()

    def read(self, body: bytes, session: Session) -> Asked:
        return self._asked(check(AnthropicMessagesRequest, load(body)), session.recent)

    def read_count(self, body: bytes) -> Asked:
        """A `count_tokens` request."""
        return self._asked(check(AnthropicCountTokensRequest, load(body)), Recent())

    def count(self, tokens: int) -> bytes:
        return dump(types.MessageTokensCount(input_tokens=tokens)).encode()

    def _asked(self, original: AnthropicMessagesRequest | AnthropicCountTokensRequest, recent: Recent) -> Asked:
        if original.tools == []:
            original.tools = original.tool_choice = None
        try:
            request = AnthropicServingMessages.to_chat_completion_request(
                original, merge_inline_system=self.system_first
            )
        except VLLMValidationError as error:
            raise BadRequest(str(error), param=error.parameter) from None
        except ValueError as error:
            raise BadRequest(str(error)) from None
        request.messages = plain(request.messages, recent)
        return Asked(request=request, messages=request.messages, n=1, stream=bool(getattr(original, "stream", False)))

    def answer(self, asked: Asked, exchange: Exchange, created: int) -> bytes:
        (choice,) = exchange.choices
        reason, sequence = stop_reason(choice)
        return dump(self._message(
            asked, exchange, content=self._blocks(choice.answer, exchange), stop_reason=reason, stop_sequence=sequence,
            output_tokens=len(choice.token_ids),
        )).encode()

    def stream(self, asked: Asked, exchange: Exchange, created: int) -> bytes:
        (choice,) = exchange.choices
        events: list[BaseModel] = [made(
            types.RawMessageStartEvent, type="message_start", message=self._message(
                asked, exchange, content=[], stop_reason=None, stop_sequence=None, output_tokens=0
            ),
        )]
        for index, block in enumerate(self._blocks(choice.answer, exchange)):
            empty, deltas = self._opened(block)
            events.append(made(
                types.RawContentBlockStartEvent, type="content_block_start", index=index, content_block=empty
            ))
            events += [
                made(types.RawContentBlockDeltaEvent, type="content_block_delta", index=index, delta=delta)
                for delta in deltas
            ]
            events.append(made(types.RawContentBlockStopEvent, type="content_block_stop", index=index))
        reason, sequence = stop_reason(choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = made(
            types.MessageDeltaUsage, input_tokens=exchange.prompt_tokens, output_tokens=len(choice.token_ids)
        )
        events.append(made(types.RawMessageDeltaEvent, type="message_delta", delta=delta, usage=usage))
        events.append(made(types.RawMessageStopEvent, type="message_stop"))
        return b"".join(sse.event(dump(event), event.type) for event in events)

    def error(self, error: ProxyError) -> bytes:
        message = error.message
        if isinstance(error, ContextLength):
            message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
        kind = ERROR_TYPES.get(error.status, "api_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()

    def stream_error(self, error: ProxyError) -> bytes:
        return sse.event(self.error(error).decode(), "error")

    def _message(self, asked: Asked, exchange: Exchange, *, output_tokens: int, **fields: Any) -> types.Message:
        usage = made(types.Usage, input_tokens=exchange.prompt_tokens, output_tokens=output_tokens)
        return made(
            types.Message, id=exchange.name("msg_"), type="message", role="assistant", model=asked.request.model,
            usage=usage, **fields,
        )

    def _blocks(self, answer: Answer, exchange: Exchange) -> list[BaseModel]:
        blocks: list[BaseModel] = []
        if answer.reasoning:
            signature = exchange.name("")
            blocks.append(types.ThinkingBlock(type="thinking", thinking=answer.reasoning, signature=signature))
        if answer.content or not (answer.reasoning or answer.tool_calls):
            blocks.append(made(types.TextBlock, type="text", text=answer.content))
        for call in answer.tool_calls:
            blocks.append(made(
                types.ToolUseBlock, type="tool_use", id=call.id, name=call.name, input=arguments(call.arguments)
            ))
        return blocks

    def _opened(self, block: BaseModel) -> tuple[BaseModel, list[BaseModel]]:
        """A block as it starts, and the deltas that fill it."""
        if block.type == "thinking":
            return types.ThinkingBlock(type="thinking", thinking="", signature=""), [
                types.ThinkingDelta(type="thinking_delta", thinking=block.thinking),
                types.SignatureDelta(type="signature_delta", signature=block.signature),
            ]
        if block.type == "tool_use":
            text = json.dumps(block.input, ensure_ascii=False)
            return block.model_copy(update={"input": {}}), [
                types.InputJSONDelta(type="input_json_delta", partial_json=text)
            ]
        return made(types.TextBlock, type="text", text=""), [
            types.TextDelta(type="text_delta", text=block.text)
        ]
