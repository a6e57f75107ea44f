"""What the agent is told about a bug that was made: how a check fails, never where or what was changed.

`Plain` fills a template with a failing check and its message. `Model` asks a model behind an OpenAI-compatible URL to
report the same failure as a user would; it is shown what the template shows and nothing of the change, so that it has
no fix to give away.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Protocol

from lightning_ray.config import ConfigError

PLAIN = """\
{package} {version} has a bug: {failing} of its {total} checks fail, all of which passed before. One of them:

```
{shown}
```

Find the cause in the source code and repair it there. Everything that works today must still work. The checks
themselves are not in this directory, and they are correct.
"""
ASK = """\
You use the Python package {package} {version}, and something in it stopped working. This is a check of its behaviour,
and how it fails:

```
{shown}
```

Write the report that a user would file: a title, what you did (as a short example that can be run), what you expected,
and what happened instead. Do not guess at the cause, do not name files of the package, and do not mention tests, checks
or pytest. Answer with the report alone.
"""
THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
MOST_TOKENS = 2000
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Failure:
    """What a statement may rest on."""

    package: str
    version: str
    failing: int
    """Checks that the bug breaks."""
    total: int
    shown: str
    """A failing check's own lines and its message, and no line of the code under test."""


class Writer(Protocol):
    async def write(self, failure: Failure) -> str | None:
        """The statement; None where the writer has none to give."""


class Plain:
    """The template."""

    async def write(self, failure: Failure) -> str | None:
        return PLAIN.format(package=failure.package, version=failure.version, failing=failure.failing,
                            total=failure.total, shown=failure.shown)


class Model:
    """A model behind an OpenAI-compatible URL (`http://HOST:PORT/v1`)."""

    def __init__(self, url: str, model: str, api_key: str) -> None:
        from openai import AsyncOpenAI

        self._url, self._model = url, model
        self._client = AsyncOpenAI(base_url=url, api_key=api_key)
        self._places = asyncio.Semaphore(AT_ONCE)

    async def write(self, failure: Failure) -> str | None:
        """Raises `ConfigError` where the endpoint gives no answer after the client's own retries."""
        from openai import OpenAIError

        question = ASK.format(package=failure.package, version=failure.version, shown=failure.shown)
        try:
            async with self._places:
                answer = await self._client.chat.completions.create(
                    model=self._model, messages=[{"role": "user", "content": question}], max_tokens=MOST_TOKENS)
        except OpenAIError as error:
            raise ConfigError(f"--statements-url: {self._url} gave no statement for {self._model!r} ({error}). Is the "
                              "server up, and is this the name of its model?") from error
        return checked(answer.choices[0].message.content if answer.choices else None)


def checked(answer: str | None) -> str | None:
    """An answer without its thoughts; None where nothing is left."""
    return THOUGHT.sub("", answer or "").strip() or None
