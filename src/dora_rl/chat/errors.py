"""Errors as the OpenAI API gives them: a status code and `{"error": {...}}`.

Invariant: whatever goes wrong, the client gets one of these bodies, and its message says what to
change. Never carries a traceback or the content of a prompt.
"""

from __future__ import annotations

from typing import Any

INVALID = "invalid_request_error"


class ApiError(Exception):
    """`ApiError(404, "the model 'x' does not exist", param="model", code="model_not_found")`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.kind = param, code, kind
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind}
        return {"error": error | {"param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unauthorized(given: bool) -> ApiError:
    what = "Incorrect API key" if given else "No API key"
    message = f"{what} provided; send the header 'Authorization: Bearer KEY'"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def model_not_found(model: str, known: str) -> ApiError:
    message = f"The model {model!r} does not exist; this server has {known!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def session_not_found(session_id: str) -> ApiError:
    message = f"No session {session_id!r}; it ended, expired or never began"
    return ApiError(404, message, code="session_not_found")


def session_busy(session_id: str) -> ApiError:
    message = f"Session {session_id!r} is answering another request; a session has one at a time"
    return ApiError(409, message, code="session_busy", kind="conflict_error")


def server_full(limit: int) -> ApiError:
    message = f"The server is full: {limit} responses are being generated; try again"
    return ApiError(
        429,
        message,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        headers={"Retry-After": "1"},
    )


def server_error(message: str) -> ApiError:
    return ApiError(500, message, code="internal_error", kind="server_error")


def context_too_long(num_prompt: int, num_wanted: int, context_max: int) -> ApiError:
    message = (
        f"This model's maximum context length is {context_max} tokens, but you asked for "
        f"{num_prompt + num_wanted} ({num_prompt} in the messages, {num_wanted} in the completion)"
    )
    return bad_request(message, "messages", "context_length_exceeded")
