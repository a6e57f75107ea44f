"""Messages between a runner and its warm worker processes: JSON objects, each behind its length.

One frame is four bytes (big-endian length of the body) and a JSON object in UTF-8. A frame longer than `MAX_FRAME`
or a body that is no object is a `FrameError`: the other side is not one of ours any more.
"""

import asyncio
import json
import struct
from typing import Any, BinaryIO

MAX_FRAME = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


class FrameError(Exception):
    """What came over the connection is not a frame."""


def encode(message: Message) -> bytes:
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")
    if len(body) > MAX_FRAME:
        raise FrameError(f"a message of {len(body)} bytes is longer than {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise FrameError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"not an object: {type(message).__name__}")
    return message


def _length(header: bytes) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes is longer than {MAX_FRAME}")
    return length


def receive(stream: BinaryIO) -> Message | None:
    """The next message of a connection (`socket.makefile`), or None at its end. Blocks."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    length = _length(header)
    body = stream.read(length)
    return decode(body) if len(body) == length else None


async def receive_async(reader: asyncio.StreamReader) -> Message | None:
    """The next message, or None at the end of the connection."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        return decode(await reader.readexactly(_length(header)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
