"""Prompts that are no conversation: the text or the token ids of a Completions request (law 2).

The harness is its own template here, so control tokens that it writes are control tokens. A text goes on from an
earlier call when it begins with that call's prompt and the text of what was sampled, end token included where one was
sampled; token ids go on when they begin with that call's ids.
"""

from collections.abc import Sequence

import numpy as np

from lightning_ray.proxy.codec import Codec
from lightning_ray.proxy.continuation import Prompt, at_least, text_digest
from lightning_ray.proxy.conversation import digest
from lightning_ray.proxy.errors import ContextLength
from lightning_ray.proxy.history import Answered
from lightning_ray.proxy.session import Session


def build_raw_prompt(prompt: str | Sequence[int], session: Session, codec: Codec, *, add_special: bool) -> Prompt:
    """A prompt as sent to the engine. Reads the session, changes nothing."""
    if isinstance(prompt, str):
        if len(prompt) > codec.most_characters:
            raise ContextLength(codec.max_context, at_least(prompt, codec))
        return _from_text(prompt, session, codec, add_special)
    return _from_ids(list(prompt), session)


def _from_text(text: str, session: Session, codec: Codec, add_special: bool) -> Prompt:
    name = digest(["text", text])
    digests: dict[int, bytes] = {}
    for one in sorted(session.history.raw, key=lambda one: -one.prompt_length - len(one.sampled_text)):
        start = one.prompt_length
        if start < 0 or not text.startswith(one.sampled_text, start):
            continue
        if start not in digests:
            digests[start] = text_digest(text[:start])
        if digests[start] == one.prompt_digest:
            rest = text[start + len(one.sampled_text):]
            new_ids = codec.specials.encode_raw(one.end + rest)[bool(one.end):]
            return _prompt(name, session, one, new_ids, len(text), text)
    return _prompt(name, session, None, codec.specials.encode_raw(text, add_special=add_special), len(text), text)


def _from_ids(ids: list[int], session: Session) -> Prompt:
    name = digest(["ids", np.asarray(ids, np.int32).tobytes()])
    best, length = None, 0
    for one in session.history.raw:
        record = session.records[one.call]
        whole = session.prompt_ids(one.call, ())
        if length < len(whole) <= len(ids) and whole.tolist() == ids[:len(whole)] and record.finish_reason != "abort":
            best, length = one, len(whole)
    return _prompt(name, session, best, np.asarray(ids[length:], np.int32), -1, "")


def _prompt(
    name: bytes, session: Session, continues: Answered | None, new_ids: np.ndarray, text_length: int, text: str
) -> Prompt:
    if name in session.history.prompts:
        relation = "resampled"
    elif continues is None:
        relation = "new_conversation"
    else:
        relation = "forked" if continues.children else "continued"
    return Prompt(
        continues=continues, new_ids=new_ids, relation=relation, text_length=text_length,
        text_digest=text_digest(text), chain=[b"", name], added=[], raw=True,
    )
