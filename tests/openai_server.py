"""An OpenAI-compatible server for tests, in a thread of this process. What it says is the test's own function."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Served:
    url: str
    """Ends with /v1."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """The requests' bodies, each with the `key` that came with it."""


@contextlib.contextmanager
def serving(say: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[Served]:
    """`say` is called with each request of a chat completion, and gives the assistant's message without its role."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request["key"] = self.headers.get("Authorization", "").removeprefix("Bearer ")
            served.asked.append(request)
            message = {"role": "assistant", "content": None, **say(request)}
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({
                "id": "1", "object": "chat.completion", "created": 0, "model": request["model"],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                "choices": [{"index": 0, "finish_reason": reason, "message": message}]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Served(f"http://127.0.0.1:{server.server_port}/v1")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
