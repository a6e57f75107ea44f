"""Errors of the proxy, in the shape that each vendor's SDK expects."""

import json

from openai.types.shared import ErrorObject


class ProxyError(Exception):
    """Something the harness is told. `status` is HTTP's, `kind` OpenAI's error type, `code` OpenAI's error code."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(ProxyError):
    status = 400
    kind = "invalid_request_error"


class ContextLength(BadRequest):
    """The prompt leaves no room for an answer."""

    code = "context_length_exceeded"

    def __init__(self, limit: int, prompt_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
        )
        self.limit = limit
        self.prompt_tokens = prompt_tokens


class NotFound(ProxyError):
    status = 404
    kind = "invalid_request_error"
    code = "not_found"


class RolloutEnded(ProxyError):
    """The rollout has used up its calls. No SDK retries a 403."""

    status = 403
    kind = "permission_error"
    code = "rollout_limit"


class TooLarge(ProxyError):
    status = 413
    kind = "invalid_request_error"
    code = "request_too_large"


class TooMany(ProxyError):
    """More requests open at once than one rollout may have, those that wait included."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"


def openai_error(error: ProxyError) -> dict[str, str | None]:
    """The error object of OpenAI's API."""
    return ErrorObject(message=error.message, type=error.kind, param=error.param, code=error.code).model_dump()


def openai_body(error: ProxyError) -> bytes:
    """`{"error": {...}}` as OpenAI's API writes it."""
    return json.dumps({"error": openai_error(error)}).encode()
