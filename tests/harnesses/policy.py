"""The policy of the suite: it reads a small bug, mends it, says that it is done. Its choice of words is scripted; the
tokens, the templates, the parsers and everything around are real.
"""

import json

from lightning_ray.generator.request import GenerateRequest
from lightning_ray.proxy.codec import Codec
from tests.harnesses.table import MEND, READ, Entry

TURN = "<|im_start|>assistant\n"
ASIDE = "Mend add"
"""Answers what is asked on the side, without tools: a title, a commit message."""


class Script:
    """`say` for a `ScriptedEngine`."""

    def __init__(self, codec: Codec, entry: Entry) -> None:
        self.codec = codec
        self.entry = entry
        self.prompts: list[str] = []

    def __call__(self, request: GenerateRequest) -> str:
        prompt = self.codec.tokenizer.decode(request.prompt_ids)
        self.prompts.append(prompt)
        turn = prompt.count(TURN) - 1
        offered = prompt.partition("<tools>")[2].partition("\n</tools>")[0]
        tool = next((name for name in self.entry.tools if f'"name": "{name}"' in offered), None)
        if tool is None:
            return ASIDE
        said = [READ, MEND, self.entry.done]
        command = said[turn] if turn < len(said) else self.entry.done
        if command == self.entry.done and not self.entry.done_by_tool:
            return command
        call = {"name": tool, "arguments": self.entry.tools[tool](command)}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
