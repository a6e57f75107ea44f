"""The dialect of OpenAI Completions: text and token-id prompts, one or several, streamed and not."""

from itertools import accumulate
from typing import Any

from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from lightning_ray.proxy import sse
from lightning_ray.proxy.chat import MOST_CHOICES, usage
from lightning_ray.proxy.dialect import Asked, OpenAIDialect, check, load, made
from lightning_ray.proxy.errors import BadRequest
from lightning_ray.proxy.session import Choice, Exchange, Session


class Completions(OpenAIDialect):
    """`POST /v1/completions`."""

    name = "completions"

    def read(self, body: bytes, session: Session) -> Asked:
        request = check(CompletionRequest, load(body))
        if request.logprobs:
            raise BadRequest("`logprobs` may be 0 (those of the sampled tokens) or absent.", param="logprobs")
        prompt = request.prompt
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt or ())
        vocabulary = len(self.codec.tokenizer)
        for one in prompts:
            if not one:
                raise BadRequest("`prompt` must not be empty.", param="prompt")
            if not isinstance(one, str) and max(one) >= vocabulary:
                raise BadRequest(f"`prompt` has token ids outside the vocabulary of {vocabulary}.", param="prompt")
        if not 1 <= request.n * len(prompts) <= MOST_CHOICES:
            raise BadRequest(f"`n` times the prompts must be between 1 and {MOST_CHOICES}.", param="n")
        return Asked(request=request, messages=[], n=request.n, stream=bool(request.stream), prompts=prompts)

    def answer(self, asked: Asked, exchange: Exchange, created: int) -> bytes:
        choices = [self._choice(asked, choice, index) for index, choice in enumerate(exchange.choices)]
        return self._dump(asked, exchange, created, choices, usage=usage(exchange)).encode()

    def stream(self, asked: Asked, exchange: Exchange, created: int) -> bytes:
        lines = [
            self._dump(asked, exchange, created, [self._choice(asked, choice, index)])
            for index, choice in enumerate(exchange.choices)
        ]
        options = asked.request.stream_options
        if options and options.include_usage:
            lines.append(self._dump(asked, exchange, created, [], usage=usage(exchange)))
        return sse.events(lines) + sse.DONE

    def _dump(
        self, asked: Asked, exchange: Exchange, created: int, choices: list[CompletionChoice], **more: Any
    ) -> str:
        return made(
            Completion, id=exchange.name("cmpl-"), object="text_completion", created=created,
            model=asked.request.model or self.model, choices=choices, **more,
        ).model_dump_json(exclude_unset=True, warnings=False)

    def _choice(self, asked: Asked, choice: Choice, index: int) -> CompletionChoice:
        return made(
            CompletionChoice, index=index, text=choice.answer.content, finish_reason=choice.finish_reason,
            logprobs=self._logprobs(asked, choice),
        )

    def _logprobs(self, asked: Asked, choice: Choice) -> Logprobs | None:
        if asked.request.logprobs is None:
            return None
        tokens = self.tokens(choice)
        offsets = list(accumulate(map(len, tokens), initial=0))[:-1]
        return Logprobs(
            tokens=tokens, text_offset=offsets, token_logprobs=choice.logprobs.tolist(), top_logprobs=None
        )
