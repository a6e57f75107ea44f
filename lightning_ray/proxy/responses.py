"""The dialect of OpenAI Responses, streamed and not.

Input items become chat messages, and answers become output items, by vLLM's own conversions. `previous_response_id`
is resolved from what was recorded: an earlier response of the same rollout, and no other.
"""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from openai.types import responses as types
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel
from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items,
    construct_input_messages,
    construct_tool_dicts,
    should_continue_final_message,
)
from vllm.exceptions import VLLMValidationError

from lightning_ray.proxy import sse
from lightning_ray.proxy.dialect import Asked, OpenAIDialect, chat_request, check, load, made
from lightning_ray.proxy.errors import BadRequest, ProxyError, openai_error
from lightning_ray.proxy.sampling import NEUTRAL
from lightning_ray.proxy.session import Choice, Exchange, Session

WITHOUT_EFFECT = ("service_tier", "truncation", "store", "prompt_cache_key", "prompt", "metadata", "user")
"""Fields that change nothing here; their values are not even looked at (new ones appear all the time)."""
LOGPROBS = "message.output_text.logprobs"
ID_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_"}


def prepare(data: dict[str, Any]) -> dict[str, Any]:
    """The body with what means nothing here left out. Raises `BadRequest` for what cannot be honoured."""
    for name in ("background", "conversation", "prompt"):
        if data.get(name):
            raise BadRequest(f"`{name}` is not supported by this endpoint.", param=name)
    data = {key: value for key, value in data.items() if key not in WITHOUT_EFFECT and value is not None}
    if "include" in data:
        data["include"] = [name for name in data["include"] if name == LOGPROBS]
    # A grammar that shapes a free-form tool's input would constrain sampling; the harness checks its input anyway.
    data["tools"] = [
        {key: value for key, value in tool.items() if key != "format"} if tool.get("type") == "custom" else tool
        for tool in data.get("tools") or [] if isinstance(tool, dict)
    ]
    return data


class Responses(OpenAIDialect):
    """`POST /v1/responses`."""

    name = "responses"

    def read(self, body: bytes, session: Session) -> Asked:
        original = check(ResponsesRequest, prepare(load(body)))
        earlier = None
        if original.previous_response_id is not None:
            earlier = session.conversation(original.previous_response_id)
            if earlier is None:
                message = f"Previous response with id {original.previous_response_id!r} not found."
                raise BadRequest(message, param="previous_response_id")
        try:
            messages = construct_input_messages(
                request_instructions=original.instructions, request_input=original.input, prev_msg=earlier
            )
            tools = construct_tool_dicts(original.tools, original.tool_choice)
            fields = self._chat_fields(original)
        except VLLMValidationError as error:
            raise BadRequest(str(error), param=error.parameter) from None
        if tools:
            fields |= {"tools": tools, "tool_choice": self._tool_choice(original)}
        request = chat_request({**fields, "messages": messages}, session.recent)
        return Asked(request=request, messages=request.messages, n=1, stream=bool(original.stream), original=original)

    def _chat_fields(self, original: ResponsesRequest) -> dict[str, Any]:
        """A Responses request's fields under the names of Chat Completions."""
        same = ("model", "temperature", "seed", "stop", "stop_token_ids", "chat_template_kwargs", "parallel_tool_calls",
                "skip_special_tokens", "include_stop_str_in_output", "top_logprobs", *NEUTRAL)
        fields = {name: value for name in same if (value := getattr(original, name, None)) is not None}
        if original.max_output_tokens is not None:
            fields["max_completion_tokens"] = original.max_output_tokens
        if original.reasoning is not None and original.reasoning.effort is not None:
            fields["reasoning_effort"] = original.reasoning.effort
        if original.is_include_output_logprobs():
            fields["logprobs"] = True
        if should_continue_final_message(original.input):
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        constraint = original.extract_structured_outputs()
        if constraint is not None:
            fields["structured_outputs"] = constraint
        return fields

    def _tool_choice(self, original: ResponsesRequest) -> Any:
        choice = original.tool_choice
        if isinstance(choice, str):
            return choice
        if choice.type in ("function", "custom"):
            return {"type": "function", "function": {"name": choice.name}}
        raise BadRequest(f"A `tool_choice` of type {choice.type!r} is not supported.", param="tool_choice")

    def answer(self, asked: Asked, exchange: Exchange, created: int) -> bytes:
        (choice,) = exchange.choices
        return self._dump(self._response(asked, exchange, created, choice)).encode()

    def stream(self, asked: Asked, exchange: Exchange, created: int) -> bytes:
        (choice,) = exchange.choices
        events = []
        for number, (kind, fields) in enumerate(self._events(asked, exchange, created, choice)):
            event = made(kind, sequence_number=number, **fields)
            events.append(sse.event(self._dump(event), event.type))
        return b"".join(events)

    def stream_error(self, error: ProxyError) -> bytes:
        """Twice: as OpenAI's SDK raises it (the error inside the event), and as the end of the response, where other
        clients look for it."""
        first = {"type": "error", "error": openai_error(error), "sequence_number": 0}
        response = made(
            types.Response, id=f"resp_{secrets.token_hex(16)}", object="response", created_at=int(time.time()),
            model=self.model, status="failed", output=[], tools=[], tool_choice="auto", parallel_tool_calls=True,
            error={"code": error.code or error.kind, "message": error.message},
        )
        last = made(types.ResponseFailedEvent, type="response.failed", response=response, sequence_number=1)
        return sse.event(json.dumps(first), "error") + sse.event(self._dump(last), last.type)

    def _dump(self, model: BaseModel) -> str:
        return model.model_dump_json(exclude_unset=True, by_alias=True, warnings=False)

    def _items(self, asked: Asked, exchange: Exchange, choice: Choice) -> list[types.ResponseOutputItem]:
        answer = choice.answer
        calls = [FunctionCall(id=call.id, name=call.name, arguments=call.arguments) for call in answer.tool_calls]
        content = answer.content or ("" if answer.reasoning or calls else " ")
        items = build_response_output_items(
            answer.reasoning, content, calls, logprobs=self._logprobs(asked, choice), tools=asked.original.tools
        )
        for index, item in enumerate(items):
            item.id = f"{exchange.name(ID_PREFIXES[item.type])}_{index}"
            if item.type == "message":
                item.content[0].text = answer.content
        return items

    def _response(self, asked: Asked, exchange: Exchange, created: int, choice: Choice | None) -> types.Response:
        """The response object; without a choice as it stands before the answer."""
        original: ResponsesRequest = asked.original
        cut = choice is not None and choice.finish_reason == "length"
        status = "in_progress" if choice is None else "incomplete" if cut else "completed"
        fields: dict[str, Any] = {
            "id": exchange.name("resp_"), "object": "response", "created_at": created, "status": status, "error": None,
            "incomplete_details": IncompleteDetails(reason="max_output_tokens") if cut else None,
            "instructions": original.instructions, "metadata": {}, "model": original.model or self.model,
            "output": self._items(asked, exchange, choice) if choice else [], "parallel_tool_calls":
            bool(original.parallel_tool_calls), "temperature": original.temperature, "top_p": original.top_p,
            "tool_choice": original.tool_choice, "tools": original.tools, "max_output_tokens":
            original.max_output_tokens, "previous_response_id": original.previous_response_id, "usage": None,
        }
        if choice is not None:
            sampled = len(choice.token_ids)
            fields["usage"] = types.ResponseUsage(
                input_tokens=exchange.prompt_tokens, output_tokens=sampled,
                total_tokens=exchange.prompt_tokens + sampled,
                input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
                output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            )
        return made(types.Response, **fields)

    def _events(
        self, asked: Asked, exchange: Exchange, created: int, choice: Choice
    ) -> Iterator[tuple[type[BaseModel], dict[str, Any]]]:
        before = self._response(asked, exchange, created, None)
        yield types.ResponseCreatedEvent, {"type": "response.created", "response": before}
        yield types.ResponseInProgressEvent, {"type": "response.in_progress", "response": before}
        after = self._response(asked, exchange, created, choice)
        for index, item in enumerate(after.output):
            where = {"output_index": index, "item_id": item.id}
            yield types.ResponseOutputItemAddedEvent, {
                "type": "response.output_item.added", "output_index": index, "item": self._begun(item)
            }
            yield from self._fill(item, where)
            yield types.ResponseOutputItemDoneEvent, {
                "type": "response.output_item.done", "output_index": index, "item": item
            }
        if after.status == "incomplete":
            yield types.ResponseIncompleteEvent, {"type": "response.incomplete", "response": after}
        else:
            yield types.ResponseCompletedEvent, {"type": "response.completed", "response": after}

    def _begun(self, item: types.ResponseOutputItem) -> types.ResponseOutputItem:
        """An output item as it is when nothing of it has been streamed."""
        empty = {"message": {"content": [], "status": "in_progress"}, "reasoning": {"content": []},
                 "function_call": {"arguments": "", "status": "in_progress"}, "custom_tool_call": {"input": ""}}
        return item.model_copy(update=empty[item.type])

    def _fill(
        self, item: types.ResponseOutputItem, where: dict[str, Any]
    ) -> Iterator[tuple[type[BaseModel], dict[str, Any]]]:
        if item.type == "message":
            (part,) = item.content
            where = {**where, "content_index": 0}
            logprobs = part.logprobs or []
            yield types.ResponseContentPartAddedEvent, {
                "type": "response.content_part.added", **where, "part": part.model_copy(update={"text": ""})
            }
            yield types.ResponseTextDeltaEvent, {
                "type": "response.output_text.delta", **where, "delta": part.text, "logprobs": logprobs
            }
            yield types.ResponseTextDoneEvent, {
                "type": "response.output_text.done", **where, "text": part.text, "logprobs": logprobs
            }
            yield types.ResponseContentPartDoneEvent, {"type": "response.content_part.done", **where, "part": part}
        elif item.type == "reasoning":
            text = item.content[0].text
            where = {**where, "content_index": 0}
            yield types.ResponseReasoningTextDeltaEvent, {
                "type": "response.reasoning_text.delta", **where, "delta": text
            }
            yield types.ResponseReasoningTextDoneEvent, {"type": "response.reasoning_text.done", **where, "text": text}
        elif item.type == "function_call":
            yield types.ResponseFunctionCallArgumentsDeltaEvent, {
                "type": "response.function_call_arguments.delta", **where, "delta": item.arguments
            }
            yield types.ResponseFunctionCallArgumentsDoneEvent, {
                "type": "response.function_call_arguments.done", **where, "arguments": item.arguments, "name": item.name
            }
        else:
            yield types.ResponseCustomToolCallInputDeltaEvent, {
                "type": "response.custom_tool_call_input.delta", **where, "delta": item.input
            }
            yield types.ResponseCustomToolCallInputDoneEvent, {
                "type": "response.custom_tool_call_input.done", **where, "input": item.input
            }

    def _logprobs(self, asked: Asked, choice: Choice) -> list[Any] | None:
        if not asked.request.logprobs:
            return None
        return [
            types.response_output_text.Logprob(token=text, bytes=list(text.encode()), logprob=logprob, top_logprobs=[])
            for text, logprob in zip(self.tokens(choice), choice.logprobs.tolist(), strict=True)
        ]
