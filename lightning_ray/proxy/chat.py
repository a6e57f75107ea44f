"""The dialect of OpenAI Chat Completions, streamed and not."""

from collections.abc import Iterable
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

from lightning_ray.proxy import sse
from lightning_ray.proxy.dialect import Asked, OpenAIDialect, chat_request, load, made
from lightning_ray.proxy.errors import BadRequest
from lightning_ray.proxy.session import Choice, Exchange, Session

MOST_CHOICES = 128


def usage(exchange: Exchange) -> CompletionUsage:
    sampled = sum(len(choice.token_ids) for choice in exchange.choices)
    return made(
        CompletionUsage, prompt_tokens=exchange.prompt_tokens, completion_tokens=sampled,
        total_tokens=exchange.prompt_tokens + sampled,
    )


def prepare(data: dict[str, Any]) -> dict[str, Any]:
    """Forms that mean nothing and that vLLM's protocol refuses are left out."""
    if data.get("tools") == []:
        data = {key: value for key, value in data.items() if key not in ("tools", "tool_choice")}
    elif not data.get("tools") and data.get("tool_choice") in ("auto", "none"):
        data = {key: value for key, value in data.items() if key != "tool_choice"}
    for legacy in ("functions", "function_call"):
        if data.get(legacy):
            raise BadRequest(f"`{legacy}` is not supported; use `tools` and `tool_choice`.", param=legacy)
    for name in ("audio", "web_search_options"):
        if data.get(name):
            raise BadRequest(f"`{name}` is not supported.", param=name)
    if set(data.get("modalities") or ["text"]) != {"text"}:
        raise BadRequest("`modalities` may be [\"text\"] only.", param="modalities")
    return data


class Chat(OpenAIDialect):
    """`POST /v1/chat/completions`."""

    name = "chat"

    def read(self, body: bytes, session: Session) -> Asked:
        request = chat_request(prepare(load(body)), session.recent)
        n = 1 if request.n is None else request.n
        if not 1 <= n <= MOST_CHOICES:
            raise BadRequest(f"`n` must be between 1 and {MOST_CHOICES}.", param="n")
        return Asked(request=request, messages=request.messages, n=n, stream=bool(request.stream))

    def answer(self, asked: Asked, exchange: Exchange, created: int) -> bytes:
        choices = [
            {"index": index, "message": self._message(choice), "finish_reason": choice.finish_reason,
             "logprobs": self._logprobs(asked, choice)}
            for index, choice in enumerate(exchange.choices)
        ]
        response = ChatCompletion.model_validate({
            "id": exchange.name("chatcmpl-"), "object": "chat.completion", "created": created,
            "model": asked.request.model or self.model, "choices": choices, "usage": usage(exchange),
        })
        return response.model_dump_json(exclude_unset=True).encode()

    def stream(self, asked: Asked, exchange: Exchange, created: int) -> bytes:
        options = asked.request.stream_options
        with_usage = bool(options and options.include_usage)

        def chunk(choices: list[ChunkChoice], **more: Any) -> str:
            return made(
                ChatCompletionChunk, id=exchange.name("chatcmpl-"), object="chat.completion.chunk", created=created,
                model=asked.request.model or self.model, choices=choices, **more,
            ).model_dump_json(exclude_unset=True, warnings=False)

        unknown = {"usage": None} if with_usage else {}
        lines = [
            chunk([made(
                ChunkChoice, index=index, delta=delta, finish_reason=finish, logprobs=logprobs
            )], **unknown)
            for index, choice in enumerate(exchange.choices)
            for delta, finish, logprobs in self._deltas(asked, choice)
        ]
        if with_usage:
            lines.append(chunk([], usage=usage(exchange)))
        return sse.events(lines) + sse.DONE

    def _message(self, choice: Choice) -> dict[str, Any]:
        fields = dict(choice.answer.message())
        if choice.answer.tool_calls and not fields["content"]:
            fields["content"] = None
        if choice.answer.reasoning:
            fields["reasoning_content"] = choice.answer.reasoning
        return fields

    def _deltas(self, asked: Asked, choice: Choice) -> Iterable[tuple[ChoiceDelta, str | None, Any]]:
        answer = choice.answer
        yield made(ChoiceDelta, role="assistant", content=""), None, None
        if answer.reasoning:
            delta = made(ChoiceDelta, reasoning_content=answer.reasoning, reasoning=answer.reasoning)
            yield delta, None, None
        logprobs = self._logprobs(asked, choice)
        if answer.content or logprobs:
            yield made(ChoiceDelta, content=answer.content), None, logprobs
        for index, call in enumerate(answer.tool_calls):
            function = made(ChoiceDeltaToolCallFunction, name=call.name, arguments=call.arguments)
            delta = made(ChoiceDeltaToolCall, index=index, id=call.id, type="function", function=function)
            yield made(ChoiceDelta, tool_calls=[delta]), None, None
        yield made(ChoiceDelta), choice.finish_reason, None

    def _logprobs(self, asked: Asked, choice: Choice) -> ChoiceLogprobs | None:
        if not asked.request.logprobs:
            return None
        return ChoiceLogprobs(refusal=None, content=[
            ChatCompletionTokenLogprob(token=text, bytes=list(text.encode()), logprob=logprob, top_logprobs=[])
            for text, logprob in zip(self.tokens(choice), choice.logprobs.tolist(), strict=True)
        ])
