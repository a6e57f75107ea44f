"""The policy of the suite: it reads a small bug, mends it, says that it is done. Its choice of words is scripted; the
tokens, the templates, the parsers and everything around are real.
"""

import json

from lightning_ray.generator.request import GenerateRequest
from lightning_ray.proxy.codec import Codec
from tests.harnesses.table import Entry

TURN = "<|im_start|>assistant\n"
ASIDE = "Mend add"
"""Answers what is asked on the side, without tools: a title, a commit message."""
NO_TOOL = "There is no tool for that."


class Script:
    """`say` for a `ScriptedEngine`."""

    def __init__(self, codec: Codec, entry: Entry) -> None:
        self.codec = codec
        self.entry = entry
        self.prompts: list[str] = []

    def __call__(self, request: GenerateRequest) -> str:
        prompt = self.codec.tokenizer.decode(request.prompt_ids)
        self.prompts.append(prompt)
        turns = self.entry.turns
        if all(isinstance(turn, str) for turn in turns):
            return turns[len(self.prompts) - 1] if len(self.prompts) <= len(turns) else ASIDE
        tools = prompt.partition("<tools>")[2].partition("\n</tools>")[0]
        if not tools:
            return ASIDE
        turn = turns[min(prompt.count(TURN), len(turns)) - 1]
        if isinstance(turn, str):
            return turn
        name = next((name for name in turn if f'"name": "{name}"' in tools), None)
        if name is None:
            return NO_TOOL
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': turn[name]})}\n</tool_call>"
