"""What goes wrong, in the form that OpenAI's clients read: a status, and {"error": {...}}.

The one place that knows which error is which status. Knows no route.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from kvboost.errors import InvalidRequestError
from kvboost.server.schemas import UNSUPPORTED, ErrorBody, ErrorDetails
from kvboost.server.worker import QueueFullError, RequestTimeoutError, ShuttingDownError

_LONGEST_NAME = 100  # of a client's own field names in messages
_IN_WORDS = {  # of fields that take several kinds of values
    "prompt": "must be text, token ids, or a list of one of them, and not empty",
    "content": 'must be text, or a list of {"type": "text", "text": ...} parts',
    "stop": "must be a text of 1 to 1000 characters, or a list of at most 4 of them",
}
_KINDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is an error. `param` is the field that is wrong, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        kind = "server_error" if self.status >= 500 else _KINDS.get(self.status)
        message = str(self).encode(errors="replace").decode()
        details = ErrorDetails(
            message=message, type=kind or "invalid_request_error", param=self.param, code=self.code
        )
        return ErrorBody(error=details)

    def response(self) -> JSONResponse:
        return JSONResponse(self.body.model_dump(), self.status, self.headers)


def as_api_error(error: Exception, param: str | None = None) -> ApiError:
    """What a client is told of `error`; `param` is the field that was read when it came up."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        message = str(error) if param is None else f"{param}: {error}"
        return ApiError(400, message, param=param, code="invalid_value")
    if isinstance(error, QueueFullError):
        retry = {"Retry-After": str(error.retry_after_s)}
        return ApiError(429, str(error), code="queue_full", headers=retry)
    if isinstance(error, RequestTimeoutError):
        return ApiError(408, str(error), code="timeout")
    if isinstance(error, ShuttingDownError):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, HTTPException):
        return _of_http(error)
    return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error")


def _of_http(error: HTTPException) -> ApiError:
    """Errors of the framework: no such route, or not by this method."""
    message = f"{error.detail}".strip().lower() or HTTPStatus(error.status_code).phrase.lower()
    code = HTTPStatus(error.status_code).name.lower()
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def of_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, naming the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    kind = first["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    if (given := first.get("ctx", {}).get("param")) is not None:  # between fields
        return ApiError(400, f"{given}: {first['msg']}", param=given, code="invalid_value")
    path = _cut_at_choice(first["loc"])
    param = _spelled(path)
    if not path:
        return ApiError(400, f"the body must be a JSON object: {first['msg']}", code="invalid_type")
    if kind == "extra_forbidden" and path == list(first["loc"]):
        return _unknown_field(param, str(path[-1]))
    if path != list(first["loc"]) or (path[-1] in _IN_WORDS and kind != "missing"):
        return ApiError(400, f"{param} {_IN_WORDS[str(path[-1])]}", param=param, code="invalid_value")
    if kind == "missing":
        return ApiError(400, f"{param} is required", param=param, code="missing_required_parameter")
    return ApiError(400, f"{param}: {_lower(first['msg'])}", param=param, code="invalid_value")


def _unknown_field(param: str, name: str) -> ApiError:
    if reason := UNSUPPORTED.get(name):
        return ApiError(400, f"{param} is not supported: {reason}", param=param, code="unsupported_parameter")
    return ApiError(400, f"{param} is not a known field", param=param, code="unknown_parameter")


def _cut_at_choice(path: Sequence[Any]) -> list[Any]:
    """The path up to a field that takes several kinds of values: behind it stand the kinds."""
    for number, step in enumerate(path):
        if step in _IN_WORDS:
            return list(path[: number + 1])
    return list(path)


def _spelled(path: Sequence[Any]) -> str:
    """`["messages", 0, "role"]` as `messages[0].role`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{str(step)[:_LONGEST_NAME]}"
    return text.removeprefix(".")


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
