"""Text that looks like a control token stays text.

A user, a file or a tool may contain the very characters of a special token (`<|im_end|>`). Rendered into a template
and tokenised, they would become the control token. `Specials.protect` marks them inside the contents before
rendering: a mark (a Unicode noncharacter, never valid text) goes behind the first character of each. Afterwards the
rendered text contains the plain form only where the *template* wrote it. `Specials.encode` tokenises such a text: the
stretches between real control tokens that carry marks lose the marks and are tokenised with special tokens switched
off; all others exactly as ever.

Only tokens that the tokenizer itself calls special are protected. Markers such as `<tool_call>` or `<think>`, which
many tokenizers keep as ordinary added tokens, are part of what harnesses legitimately write in prompts.

A tokenizer cuts a text at its special tokens before anything else and treats the stretches between them separately.
So do we, and remember the stretches: a system prompt that a thousand rollouts share, or the unchanged messages of a
history that is rendered afresh, are tokenised once.
"""

import json
import re
from threading import Lock
from typing import Any

import numpy as np
from tokenizers import Tokenizer

MARK = "\ufdd1"
REMEMBERED_CHARACTERS = 32_000_000
"""Most characters of stretches whose tokens are remembered (about 60 MB)."""
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
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._alone = {text: np.asarray([index], np.int32) for text, index in self.texts.items()}
        self._separable = not any(
            token.lstrip or token.rstrip or token.single_word or (token.normalized and tokenizer.normalizer is not None)
            for token in tokenizer.get_added_tokens_decoder().values() if token.special
        )
        self._young: dict[tuple[bool, str], np.ndarray] = {}
        self._old: dict[tuple[bool, str], np.ndarray] = {}
        self._characters = 0
        """Of the stretches in `_young`."""
        self._lock = Lock()

    def occurs(self, text: str) -> bool:
        """Whether the text contains a special token's characters, unmarked."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def last(self, text: str) -> str:
        """The last special token that a template wrote into `text`, or an empty text."""
        return max(self.texts, key=text.rfind) if self.occurs(text) else ""

    def protect_text(self, text: str) -> str:
        if MARK not in text and not self.occurs(text):
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

    def protect_json(self, text: str) -> str:
        """JSON text whose strings are protected, also where they are written with escapes; any other text as a text."""
        if "\\" in text:
            try:
                return json.dumps(self.protect(json.loads(text)), ensure_ascii=False)
            except ValueError:
                return self.protect_text(text)
        return self.protect_text(text)

    def encode_raw(self, text: str, *, add_special: bool = False) -> np.ndarray:
        """int32: token ids of a text that nobody marked: whatever looks like a special token is one."""
        return np.asarray(self.with_specials.encode(text, add_special_tokens=add_special).ids, np.int32)

    def encode(self, text: str) -> np.ndarray:
        """int32: token ids of a rendered text; nothing is added at its ends."""
        if self._pattern is None:
            return self._encode_stretch("", text)
        if not self._separable and MARK not in text:
            return self.encode_raw(text)
        parts: list[np.ndarray] = []
        before = ""
        for number, stretch in enumerate(self._pattern.split(text)):
            if number % 2:
                before = stretch
                parts.append(self._alone[before])
            elif stretch:
                parts.append(self._remembered(before, stretch))
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def _remembered(self, before: str, stretch: str) -> np.ndarray:
        """Tokens of a stretch. Half of the memory is given up at once: what was not needed since the last time."""
        key = (bool(before), stretch)
        ids = self._young.get(key)
        if ids is None:
            ids = self._old.get(key)
            if ids is None:
                ids = self._encode_stretch(before, stretch)
            with self._lock:
                if self._characters > REMEMBERED_CHARACTERS // 2:
                    self._old, self._young, self._characters = self._young, {}, 0
                self._young[key] = ids
                self._characters += len(stretch)
        return ids

    def _encode_stretch(self, before: str, stretch: str) -> np.ndarray:
        """Tokens of a stretch without special tokens. `before` is the one in front of it: some tokenizers treat the
        beginning of a text differently."""
        if MARK in stretch:
            ids = self.without_specials.encode(unmark(stretch), add_special_tokens=False).ids
        else:
            ids = self.with_specials.encode(before + stretch, add_special_tokens=False).ids
            ids = ids[1:] if before else ids
        return np.asarray(ids, np.int32)
