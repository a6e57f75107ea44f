"""Server-sent events of a finished answer. The engine is never streamed: one delta for each part is enough."""

from collections.abc import Iterable

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment; clients ignore it, and nothing in between closes an idle connection."""
DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: str, name: str | None = None) -> bytes:
    """One event; `data` is one line of JSON."""
    return f"event: {name}\ndata: {data}\n\n".encode() if name else f"data: {data}\n\n".encode()


def events(items: Iterable[str]) -> bytes:
    return b"".join(event(item) for item in items)
