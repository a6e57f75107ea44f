"""What the proxy's tests share: model directories that hold a tokenizer and a template only, and scripted engines.

A codec needs no weights, so these directories have none. The templates are written after the published formats of
five families: ChatML, Hermes (tools as JSON in tags), Qwen3 (reasoning, stripped from turns before the last question),
Qwen3.5 (tools as XML, an answer begins inside its reasoning) and Llama 3 (headers, trimmed contents).
"""

import asyncio
import atexit
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from lightning_ray.config import PolicyConfig, ProxyConfig, SamplingConfig
from lightning_ray.generator.request import GenerateRequest, Generation
from lightning_ray.proxy.codec import Codec
from lightning_ray.proxy.endpoint import Endpoint, OpenRollout
from lightning_ray.proxy.engine import Engine
from lightning_ray.proxy.rollouts import ProxyServer
from lightning_ray.trajectory.call import Call

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

HERMES = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- '<tools>' -}}{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

REASONING = """\
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\n<tools>' -}}{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ('user', 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- set thought = message.reasoning_content or '' -%}
{%- if loop.index0 > last.question and (loop.last or thought) -%}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- (message.content or '').lstrip('\\n') -}}
{%- for call in message.tool_calls or [] -%}
{%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

CODER = """\
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\n<tools>' -}}{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>' -}}
{%- if messages[0].role == 'system' -%}{{- '\\n\\n' + messages[0].content | trim -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content | trim + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{%- set said = (message.content or '') | trim -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > last.question -%}
{{- '<think>\\n' + (message.reasoning_content or '') | trim + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- said -}}
{%- for call in message.tool_calls or [] -%}
{%- if loop.first and said -%}{{- '\\n\\n' -}}{%- elif not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in (call.function.arguments if call.function.arguments is mapping else {}) | items -%}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""

LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content or '') | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

CHATML_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

FAMILIES = {
    "chatml": (CHATML, CHATML_SPECIAL, "<|im_end|>", None, None),
    "hermes": (HERMES, CHATML_SPECIAL, "<|im_end|>", "hermes", None),
    "reasoning": (REASONING, CHATML_SPECIAL, "<|im_end|>", "hermes", "qwen3"),
    "coder": (CODER, CHATML_SPECIAL, "<|im_end|>", "qwen3_coder", "qwen3"),
    "llama3": (LLAMA3, LLAMA3_SPECIAL, "<|eot_id|>", None, None),
}
"""Family -> template, special tokens, end of turn, tool parser, reasoning parser."""

BASH = {"type": "function", "function": {
    "name": "bash", "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}}

CORPUS = ["the answer is in the file and the file is here\n", '{"name": "bash", "arguments": {"command": "ls -la"}}',
          "assistant user system tool think\n", "for value in values:\n    total += value\n"]


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    template, special, end, _, _ = FAMILIES[family]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    ))
    backend.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, pad_token=special[0], chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def model_dir(family: str, root: Path) -> Path:
    """A directory with config and tokenizer: enough for a codec."""
    target = root / family
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(target)
    Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, intermediate_size=64, max_position_embeddings=131072, architectures=["Qwen3ForCausalLM"],
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(target)
    return target


@cache
def codec_of(family: str, max_context: int = 65536) -> Codec:
    _, _, _, tools, reasoning = FAMILIES[family]
    kept = TemporaryDirectory(prefix="lightning-ray-tokenizers-")
    atexit.register(kept.cleanup)
    directory = model_dir(family, Path(kept.name))
    return Codec(directory, PolicyConfig(
        path=directory, tool_parser=tools, reasoning_parser=reasoning, max_context=max_context
    ))


class ScriptedEngine:
    """A generator whose answers are written in advance: `say` maps a request to text, or to token ids.

    The end-of-turn token is appended to text, unless the text ends with a backslash (which is taken off: cut off by
    length). `hold` keeps generations back until they are released or aborted.
    """

    def __init__(self, codec: Codec, say: Callable[[GenerateRequest], str | list[int]]) -> None:
        self.codec = codec
        self.say = say
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.hold: asyncio.Event | None = None
        self.version = 0
        self.ended: dict[str, Generation] = {}
        self._events: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        said = self.say(request)
        if isinstance(said, str):
            cut = said.endswith("\\")
            ids = self.codec.specials.encode(said[:-1] if cut else said).tolist()
            ids = ids if cut else [*ids, self.codec.tokenizer.eos_token_id]
        else:
            ids, cut = list(said), said[-1:] != [self.codec.tokenizer.eos_token_id]
        finish = "length" if cut else "stop"
        if len(ids) > request.max_tokens:
            ids, finish = ids[:request.max_tokens], "length"
        if self.hold is not None:
            aborted = self._events.setdefault(request.request_id, asyncio.Event())
            waits = [asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(aborted.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if aborted.is_set():
                ids, finish = ids[:2], "abort"
        size = len(ids)
        self.ended[request.request_id] = Generation(
            np.asarray(ids, np.int32), np.full(size, -0.5, np.float32), np.full(size, self.version, np.int32), finish
        )
        return self.ended[request.request_id]

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._events.setdefault(request_id, asyncio.Event()).set()

    async def claim(self, request_id: str) -> Generation | None:
        await self.abort(request_id)
        while request_id not in self.ended and any(one.request_id == request_id for one in self.requests):
            await asyncio.sleep(0.01)
        return self.ended.pop(request_id, None)


def proxy_of(
    codec: Codec, say: Callable[[GenerateRequest], str | list[int]], **config
) -> tuple[ProxyServer, ScriptedEngine]:
    """A proxy in this process (not started) and its engine."""
    engine = ScriptedEngine(codec, say)
    return ProxyServer(codec, Engine([engine]), ProxyConfig(**config), "policy"), engine


class InProcess:
    """A `ProxyServer` of this process as a runner's `ProxyClient`."""

    def __init__(self, server: ProxyServer) -> None:
        self.server = server

    async def open(self, opened: OpenRollout) -> Endpoint:
        return self.server.open(opened)

    async def listen(self, rollout_id: str, pid: int, port: int) -> None:
        await self.server.listen(rollout_id, pid, port)

    async def finish(self, rollout_id: str) -> list[Call]:
        return await self.server.finish(rollout_id)


@asynccontextmanager
async def serving(client_of: Callable[[str], Any]) -> AsyncIterator[Callable]:
    """Gives `start(family, say, config=None, **rollout)` -> (server, engine, endpoint, client); closes all at the end.

    `client_of` makes a client from an endpoint's base URL.
    """
    servers, clients = [], []

    async def start(family, say, config=None, **fields):
        server, engine = proxy_of(codec_of(family), say, **(config or {}))
        await server.start()
        servers.append(server)
        endpoint = server.open(rollout(**fields))
        clients.append(client_of(endpoint.base_url))
        return server, engine, endpoint, clients[-1]

    try:
        yield start
    finally:
        for client in clients:
            await client.close()
        for server in servers:
            await server.stop()


def rollout(name: str = "r0", **fields) -> OpenRollout:
    defaults = {"mode": "train", "sampling": SamplingConfig(max_tokens=256), "seed": 7, "max_calls": 100}
    return OpenRollout(rollout_id=name, **defaults | fields)


def keepers_of(directory: Path) -> list[psutil.Process]:
    """The keepers of listening sockets that run for directories below this one."""
    return [process for process in psutil.process_iter(["cmdline"])
            if any(word.startswith(str(directory)) for word in process.info["cmdline"] or ())]


def call_in(family: str, command: str) -> str:
    """A call of `bash` as the family's model writes it."""
    if family != "coder":
        return tool_call(command)
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


def tool_call(command: str, name: str = "bash") -> str:
    return '<tool_call>\n' + json.dumps({"name": name, "arguments": {"command": command}}) + '\n</tool_call>'
