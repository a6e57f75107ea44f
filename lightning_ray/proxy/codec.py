"""Messages to tokens and tokens to messages, by vLLM's own renderer and parsers. No engine and no GPU is needed.

`Codec` wraps what one policy needs: its tokenizer, its chat template as vLLM's `HfRenderer` applies it, and vLLM's
tool-call and reasoning parsers. It knows nothing of rollouts. All methods are synchronous and thread-safe; a long
prompt takes milliseconds, so callers move those off the event loop.

Texts that come out of `render` may carry marks (`special.py`); `encode` understands them.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser import ParserManager
from vllm.renderers import ChatParams, merge_kwargs, renderer_from_config
from vllm.renderers.chat_utils import load_chat_template, parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

from lightning_ray.config import ConfigError, PolicyConfig
from lightning_ray.generator.text_only import allow_text_only
from lightning_ray.proxy.conversation import normal_arguments
from lightning_ray.proxy.message import Message
from lightning_ray.proxy.special import Specials, unmark

for name in ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning", "vllm.renderers.chat_utils", "vllm.renderers.hf"):
    # They report each malformed tool call with a traceback. Policies sample those all day: data, not errors.
    logging.getLogger(name).setLevel(logging.CRITICAL)

REMEMBERED_TOOLS = 64
"""So many lists of tools are remembered."""
CONTEXT_TOKENS = 6
"""So many tokens before a stretch are decoded with it, so that its first characters come out right."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an answer. `arguments` is the JSON text as the parser found it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the sampled tokens say, as the harness is told."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def says_the_same(self, other: "Answer") -> bool:
        """Equal but for white space at the ends, ids, and the formatting of arguments."""

        return (
            self.content.strip() == other.content.strip()
            and self.reasoning.strip() == other.reasoning.strip()
            and [(call.name, normal_arguments(call.arguments)) for call in self.tool_calls]
            == [(call.name, normal_arguments(call.arguments)) for call in other.tool_calls]
        )

    def message(self) -> Message:
        """The assistant message (Chat Completions) that a harness would send back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return Message(message)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request."""

    text: str
    """As JSON: equal texts, equal tools."""
    protected: list[dict[str, Any]] | None
    """As the template is given them; None where there are none."""


class Codec:
    """The tokenizer, chat template and parsers of one policy.

    Raises `ConfigError` where the model directory, the template or a parser's name is bad.
    """

    def __init__(self, model_dir: str | Path, policy: PolicyConfig) -> None:
        model_dir = Path(model_dir)
        if not (model_dir / "config.json").is_file():
            raise ConfigError(f"policy.path: {model_dir} has no config.json; give a Hugging Face model directory")
        self.max_context = policy.max_context
        """Tokens, prompt and answer together."""
        allow_text_only()
        self.model_config = ModelConfig(
            model=str(model_dir), tokenizer=str(model_dir), max_model_len=policy.max_context, generation_config="vllm",
        )
        self.renderer = renderer_from_config(VllmConfig(model_config=self.model_config))
        self.tokenizer = self.renderer.get_tokenizer()
        if not isinstance(self.tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                f"policy.path: the tokenizer in {model_dir} is a {type(self.tokenizer).__name__}; "
                "a fast tokenizer (tokenizer.json) is needed"
            )
        self.most_characters = policy.max_context * self.tokenizer.max_chars_per_token
        """A longer text has too many tokens, whatever it says."""
        self.chat_template = self._template(model_dir, policy)
        self.parser_class = self._parser(policy)
        self.specials = Specials(self.tokenizer.backend_tokenizer)
        self.end_texts = self._end_texts(model_dir)
        self._protected_tools: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        self._latest_tools: tuple[list[Any], Tools] | None = None

    def _template(self, model_dir: Path, policy: PolicyConfig) -> str | None:
        if policy.chat_template is not None:
            file = policy.chat_template.expanduser()
            if not file.is_file():
                raise ConfigError(f"policy.chat_template: {file} does not exist; give a Jinja file")
            return load_chat_template(file)
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"policy.path: the tokenizer in {model_dir} has no chat template; set policy.chat_template to a file"
            )
        return None

    def _parser(self, policy: PolicyConfig) -> type | None:
        try:
            return ParserManager.get_parser(
                tool_parser_name=policy.tool_parser, reasoning_parser_name=policy.reasoning_parser,
                enable_auto_tools=policy.tool_parser is not None, model_name=self.model_config.model,
                tokenizer=self.tokenizer,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"policy.tool_parser = {policy.tool_parser!r}, policy.reasoning_parser = {policy.reasoning_parser!r}: "
                f"{error}; use names of vLLM's parsers"
            ) from error

    def _end_texts(self, model_dir: Path) -> tuple[str, ...]:
        """The texts of the tokens that end an answer (the tokenizer's and the generation config's)."""
        ids = {self.tokenizer.eos_token_id}
        declared = self.model_config.try_get_generation_config().get("eos_token_id")
        ids.update(declared if isinstance(declared, list) else [declared])
        return tuple(self.tokenizer.decode([index]) for index in sorted(i for i in ids if i is not None))

    def tools_of(self, request: ChatCompletionRequest) -> Tools:
        """The tools of a request. It is asked several times for the same one."""
        if not request.tools:
            return Tools("", None)
        latest = self._latest_tools
        if latest is None or latest[0] is not request.tools:
            latest = self._latest_tools = (request.tools, self._read_tools(request.tools))
        return latest[1]

    def _read_tools(self, given: list[Any]) -> Tools:
        tools = [tool.model_dump() for tool in given]
        text = json.dumps(tools, default=str)
        known = self._protected_tools.get(text)
        if known is None:
            known = self._protected_tools[text] = self.specials.protect(tools)
            if len(self._protected_tools) > REMEMBERED_TOOLS:
                self._protected_tools.popitem(last=False)
        return Tools(text, known)

    def chat_params(self, request: ChatCompletionRequest) -> ChatParams:
        return request.build_chat_params(self.chat_template, "auto")

    def template_kwargs(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """What a request tells the template besides messages and tools."""
        return self.chat_params(request).chat_template_kwargs

    def system_must_lead(self) -> bool:
        """Whether the template refuses system messages that do not come first."""
        messages = [Message({"role": role, "content": "x"}) for role in ("system", "user", "system", "user")]
        try:
            self.render(ChatCompletionRequest(messages=messages), messages)
        except VLLMValidationError:
            return True
        return False

    def render(self, request: ChatCompletionRequest, messages: Sequence[Message]) -> str:
        """The conversation as the template writes it, contents protected.

        Raises vLLM's `VLLMValidationError` where the template or the message format refuses it.
        """
        params = self.chat_params(request)
        tools = self.tools_of(request).protected
        extra = {"tools": tools, "tokenize": False}
        settings = merge_kwargs(params.get_apply_chat_template_kwargs(), extra, unset_values=(None,))
        content_format = resolve_chat_template_content_format(
            params.chat_template, tools, params.chat_template_content_format, self.tokenizer,
            model_config=self.model_config,
        )
        entries = [entry for message in messages for entry in self._entries(message, content_format)]
        return safe_apply_chat_template(self.model_config, self.tokenizer, entries, **settings)

    def _entries(self, message: Message, content_format: str) -> list[Any]:
        """What the template is given of a message, as vLLM's renderer reads it."""
        if message.entries is None or message.entries[0] != content_format:
            entries, _, _ = parse_chat_messages([self._protected(message)], self.model_config, content_format)
            message.entries = (content_format, entries)
        return message.entries[1]

    def _protected(self, message: Message) -> dict[str, Any]:
        """A message with all its texts protected, those in tool-call arguments too, however JSON escapes them there.

        Tool calls are copied in any case: vLLM parses their arguments in place.
        """
        calls = message.get("tool_calls")
        if not calls:
            return self.specials.protect(message)
        protected = [
            {**call, "function": {
                **self.specials.protect(call["function"]),
                "arguments": self.specials.protect_json(call["function"]["arguments"]),
            }}
            for call in calls
        ]
        return {**self.specials.protect({**message, "tool_calls": None}), "tool_calls": protected}

    def encode(self, text: str, after: str = "") -> np.ndarray:
        """int32: token ids of a rendered text; `after` is the special token just before it, which is not among them."""
        if not after:
            return self.specials.encode(text)
        ids = self.specials.encode(after + text)
        own = self.specials.encode(after)
        if not np.array_equal(ids[:len(own)], own):
            raise ValueError(f"{after!r} does not stand alone as a token in front of {text[:40]!r}")
        return ids[len(own):]

    def decode(self, ids: Sequence[int], before: Sequence[int] = (), *, skip_special: bool = False) -> str:
        """Text of `ids`, read as the continuation of `before` (only its last few tokens count)."""
        decode = self.specials.with_specials.decode
        context = list(before[-CONTEXT_TOKENS:])
        head = decode(context, skip_special_tokens=skip_special) if context else ""
        both = decode([*context, *ids], skip_special_tokens=skip_special)
        return both[len(head):] if both.startswith(head) else decode(list(ids), skip_special_tokens=skip_special)

    def adjust(self, request: ChatCompletionRequest, *, free: bool) -> ChatCompletionRequest:
        """The request as the parsers want it: constraints for a forced tool choice, special tokens kept in text.

        `free` leaves a free choice of tools unconstrained (no grammar for `strict` tools or a single call).
        """
        if self.parser_class is None:
            return request
        if free and request.tool_choice in (None, "auto", "none"):
            tools = [
                tool.model_copy(update={"function": tool.function.model_copy(update={"strict": None})})
                for tool in request.tools or []
            ]
            request = request.model_copy(update={"tools": tools or None, "parallel_tool_calls": True})
        else:
            request = request.model_copy(update={"tools": deepcopy(request.tools)})
        return self._new_parser(request).adjust_request(request)

    def parse(self, text: str, request: ChatCompletionRequest, prompt_ids: Sequence[int], ids: Sequence[int]) -> Answer:
        """The answer that `text` (end-of-turn token and stop string removed) says."""
        if self.parser_class is None:
            return Answer(content=text)
        parser = self._new_parser(request)
        parser.set_prompt_token_ids(list(prompt_ids))
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=self.parser_class.tool_parser_cls is not None, model_output_token_ids=ids
        )
        return Answer(
            content=content or "", reasoning=reasoning or "",
            tool_calls=tuple(ToolCall(call.id or "", call.name, call.arguments) for call in calls or ()),
        )

    def reads_as(self, text: str, answer: Answer, request: ChatCompletionRequest) -> bool:
        """Whether a rendered assistant turn, parsed as if the policy had sampled it, says what `answer` says."""
        plain = unmark(text)
        return self.parse(plain, request, (), self.specials.encode(text).tolist()).says_the_same(answer)

    def _new_parser(self, request: ChatCompletionRequest):
        return self.parser_class(
            self.tokenizer, request.tools, chat_template_kwargs=self.template_kwargs(request),
            model_config=self.model_config,
        )
