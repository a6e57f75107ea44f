"""Text that looks like a control token stays text.

A user, a file or a tool may contain the very characters of a special token (`<|im_end|>`). Rendered into a template
and tokenised, they would become the control token. `Specials.protect` marks them inside the contents before
rendering: a mark (a Unicode noncharacter, never valid text) goes behind the first character of each. Afterwards the
rendered text contains the plain form only where the *template* wrote it. `Specials.encode` tokenises such a text: the
stretches between real control tokens that carry marks lose the marks and are tokenised with special tokens switched
off; all others exactly as ever.

Only tokens that the tokenizer itself calls special are protected. Markers such as `<tool_call>` or `<think>`, which
many tokenizers keep as ordinary added tokens, are part of what harnesses legitimately write in prompts.
"""

import re
from typing import Any

from tokenizers import Tokenizer

MARK = "\ufdd1"
_MARKS = re.compile(MARK + "(" + MARK + "?)")


def unmark(text: str) -> str:
    """The text as it was before `protect`."""
    return _MARKS.sub(r"\1", text) if MARK in text else text


class Specials:
    """The special tokens of one tokenizer, and how to encode a text with and without them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.with_specials = tokenizer
        self.without_specials = Tokenizer.from_str(tokenizer.to_str())
        self.without_specials.encode_special_tokens = True
        for encoder in (self.with_specials, self.without_specials):
            encoder.no_truncation()
            encoder.no_padding()
        self.texts: dict[str, int] = {
            token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and len(token.content) > 1
        }
        longest_first = sorted(self.texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def occurs(self, text: str) -> bool:
        """Whether the text contains a special token's characters, or a mark."""
        return MARK in text or (self._pattern is not None and self._pattern.search(text) is not None)

    def protect_text(self, text: str) -> str:
        if not self.occurs(text):
            return text
        text = text.replace(MARK, MARK + MARK)
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)

    def protect(self, value: Any) -> Any:
        """`value` (JSON) with every string in it protected; the same object where there is nothing to protect."""
        if isinstance(value, str):
            return self.protect_text(value)
        if isinstance(value, dict):
            new = {key: self.protect(item) for key, item in value.items()}
            return new if any(new[key] is not item for key, item in value.items()) else value
        if isinstance(value, list):
            items = [self.protect(item) for item in value]
            return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
        return value

    def encode_raw(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of a text that nobody marked: whatever looks like a special token is one."""
        return self.with_specials.encode(text, add_special_tokens=add_special).ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text; nothing is added at its ends."""
        if MARK not in text:
            return self.with_specials.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        plain = ""
        start = 0
        for found in self._pattern.finditer(text) if self._pattern else ():
            ids, plain = self._add_stretch(ids, plain, text[start:found.start()])
            plain += found[0]
            start = found.end()
        ids, plain = self._add_stretch(ids, plain, text[start:])
        return ids + self._encode_plain(plain)

    def _add_stretch(self, ids: list[int], plain: str, stretch: str) -> tuple[list[int], str]:
        if MARK not in stretch:
            return ids, plain + stretch
        ids = ids + self._encode_plain(plain)
        return ids + self.without_specials.encode(unmark(stretch), add_special_tokens=False).ids, ""

    def _encode_plain(self, text: str) -> list[int]:
        return self.with_specials.encode(text, add_special_tokens=False).ids if text else []
