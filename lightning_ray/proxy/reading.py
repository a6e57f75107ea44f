"""What sampled tokens say: from a generation to the answer that the harness is told, and to what is kept of it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from lightning_ray.generator.request import Generation
from lightning_ray.proxy.codec import Answer, Codec, ToolCall

logger = logging.getLogger(__name__)

Request = ChatCompletionRequest | CompletionRequest
REPLACEMENT = "\ufffd"
"""What half a character decodes to."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A generation, read."""

    answer: Answer
    sampled_text: str
    """All sampled tokens as text, special tokens included."""
    end: str
    """Text of the end token that was sampled last, or empty where something else ended the answer."""


def read(codec: Codec, request: Request, prompt_ids: Sequence[int], generation: Generation) -> Reading:
    """Decode and parse. `request` is the one that `Codec.adjust` returned, or a `CompletionRequest`."""
    chat = isinstance(request, ChatCompletionRequest)
    ids = generation.token_ids.tolist()
    ended = generation.finish_reason == "stop" and not isinstance(generation.stop_reason, str) and bool(ids)
    said = visible_text(codec, request, prompt_ids, ids[:-1] if ended else ids, generation)
    return Reading(
        answer=parse(codec, request, prompt_ids, ids, said) if chat else Answer(content=said),
        sampled_text=codec.decode(ids, prompt_ids),
        end=codec.decode(ids[-1:]) if ended else "",
    )


def visible_text(
    codec: Codec, request: Request, prompt_ids: Sequence[int], ids: Sequence[int], generation: Generation
) -> str:
    """The answer's text as the harness may see it: a stop string, and half a character at a cut, are taken off."""
    text = codec.decode(ids, prompt_ids, skip_special=request.skip_special_tokens)
    if isinstance(generation.stop_reason, str) and not request.include_stop_str_in_output:
        at = text.find(generation.stop_reason)
        text = text[:at] if at >= 0 else text
    return text.rstrip(REPLACEMENT) if generation.finish_reason != "stop" else text


def parse(
    codec: Codec, request: ChatCompletionRequest, prompt_ids: Sequence[int], ids: Sequence[int], text: str
) -> Answer:
    """Reasoning, content and tool calls. Where vLLM's parser fails, the text is the content: an answer all the same."""
    try:
        answer = codec.parse(text, request, prompt_ids, ids)
    except Exception:
        # Dozens of parsers of mixed quality raise whatever they like on malformed output, which policies do sample.
        logger.warning("the parsers failed on an answer; it is passed on as plain text", exc_info=True)
        return Answer(content=text)
    calls = answer.tool_calls
    if request.parallel_tool_calls is False:
        calls = calls[:1]
    return Answer(answer.content, answer.reasoning, tuple(
        ToolCall(call.id or f"call_{index}", call.name, call.arguments) for index, call in enumerate(calls)
    ))
