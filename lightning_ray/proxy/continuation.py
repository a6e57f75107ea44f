"""The prompt of a call, token for token (law 2).

A prompt that goes on from an earlier call of the rollout is that call's prompt ids, its sampled ids, and the tokens of
the new text alone. It goes on when three things hold:

1. its messages begin with the messages and the answer of that call (`history.py`; tool-call arguments may be
   re-serialised, they are put back as the parser first gave them);
2. the template renders those messages as it did for that call: the new text begins with the earlier prompt's text;
3. what the template makes of the answer is either exactly the sampled text, or reads, by the same parsers, as the
   same message (other white space, other JSON formatting).

Where a template strips reasoning from history or the harness drops it, 2 or 3 fails and the prompt is tokenised
afresh, as in deployment; the reason is the call's `relation`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from lightning_ray.proxy.codec import Codec
from lightning_ray.proxy.conversation import chain, digest, settings_digest
from lightning_ray.proxy.errors import ContextLength
from lightning_ray.proxy.history import Answered, History
from lightning_ray.proxy.message import Message

HEADER_CHARACTERS = 200
"""What a template writes at most between the token that begins a turn and the answer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sent to the engine, and how it came about."""

    continues: Answered | None
    """The call whose prompt and sampled ids come first, or None."""
    new_ids: np.ndarray
    """int32: the tokens after them (all tokens where nothing is continued)."""
    relation: str
    text_length: int
    text_digest: bytes
    chain: list[bytes]
    """The conversation's digests, one a message."""
    added: list[Message]
    """The messages that the continued call did not have."""
    raw: bool = False
    """It is no conversation (`raw_prompt.py`)."""


def text_digest(text: str) -> bytes:
    return digest([text])


def at_least(text: str, codec: Codec) -> int:
    """How many tokens a text has at least."""
    return -(-len(text) // codec.tokenizer.max_chars_per_token)


def put_back_arguments(
    messages: Sequence[Message], found: Sequence[tuple[int, list[Answered]]]
) -> list[Message]:
    """The messages with the tool-call arguments of our answers as the parser first gave them; ids stay as sent."""
    result = list(messages)
    for position, calls in found:
        ours = [call.arguments for call in calls[0].answer.tool_calls]
        message = result[position - 1]
        if ours and ours != arguments_of(message):
            if message.restored is None or ours != arguments_of(message.restored):
                message.restored = Message({**message, "tool_calls": [
                    {**call, "function": {**call["function"], "arguments": mine}}
                    for call, mine in zip(message["tool_calls"], ours, strict=True)
                ]})
            result[position - 1] = message.restored
    return result


def arguments_of(message: Message) -> list[str]:
    return [call["function"]["arguments"] for call in message["tool_calls"]]


def end_of_answer(
    one: Answered, text: str, request: ChatCompletionRequest, messages: Sequence[Message], codec: Codec
) -> int | str:
    """Where in `text` the new part begins after the answer of `one`, or why `one` is not continued.

    What the template makes of the answer ends where it first ends a turn, and begins no other one before: contents are
    protected, so that none of them holds such a token.
    """
    start = one.prompt_length
    if len(text) < start or text_digest(text[:start]) != one.prompt_digest:
        return "template_rewrote"
    if text.startswith(one.sampled_text, start):
        return start + len(one.sampled_text)
    if one.stopped_by_text:
        return "stop_string"
    at = min((at for end in {one.end, *codec.end_texts} - {""} if (at := text.find(end, start)) >= 0), default=-1)
    if at < 0 or not text.startswith(one.end, at):
        return "template_rewrote"
    opener = codec.specials.last(text[max(0, start - HEADER_CHARACTERS):start])
    if opener and opener in text[start:at]:
        return "template_rewrote"
    if not codec.reads_as(text[start:at], one.answer, request):
        dropped = one.answer.reasoning and not messages[one.messages - 1].get("reasoning")
        return "reasoning_dropped" if dropped else "template_rewrote"
    return at + len(one.end)


def build_prompt(
    request: ChatCompletionRequest, messages: Sequence[Message], history: History, codec: Codec
) -> Prompt:
    """Render a conversation against what the rollout has already said. Reads `history`, changes nothing.

    Raises `ContextLength` where the text is too long for any tokenisation, and what `Codec.render` raises.
    """
    start = settings_digest(codec.tools_of(request).text, codec.template_kwargs(request))
    digests = chain(start, messages)
    found = history.find(digests, messages)
    messages = put_back_arguments(messages, found)
    text = codec.render(request, messages)
    if len(text) > codec.most_characters:  # it would take long to learn how many tokens exactly
        raise ContextLength(codec.max_context, at_least(text, codec))
    refused = ""
    for _, calls in found:
        for one in calls:
            cut = end_of_answer(one, text, request, messages, codec)
            if isinstance(cut, int):
                return Prompt(
                    continues=one, new_ids=codec.encode(text[cut:], after=one.end),
                    relation=history.relation(digests, messages, one, refused),
                    text_length=len(text), text_digest=text_digest(text), chain=digests, added=messages[one.messages:],
                )
            refused = refused or cut
    return Prompt(
        continues=None, new_ids=codec.encode(text), relation=history.relation(digests, messages, None, refused),
        text_length=len(text), text_digest=text_digest(text), chain=digests, added=list(messages),
    )
