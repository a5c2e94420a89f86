"""Errors, in the form that OpenAI's clients read: a status, and {"error": {...}}.

The one place that knows which error is which status. Knows no route.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from kvboost.errors import InvalidRequestError, PromptTooLongError
from kvboost.server.schemas import TOO_MANY, UNSUPPORTED
from kvboost.server.tickets import QueueFullError, RequestTimeoutError, ShuttingDownError

_LONGEST_NAME = 100  # of a client's own field names in messages
_LONGEST_VALUE = 40  # of a client's own values in messages
_PLACE = re.compile(r"line (\d+) column (\d+)")
_IN_WORDS = {  # by the validator's error type; braces are filled from the error's context
    "expected": "must be {expected}",
    "literal_error": "must be one of {expected}",
    "string_type": "must be text",
    "string_too_long": "must have at most {max_length} characters",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "too_short": "must have at least {min_length} item",
    "model_type": "must be an object",
}
_KINDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ErrorDetails(BaseModel):
    """What is wrong; `param` names the field, `code` is a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorDetails


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


def bad_field(param: str, message: object, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def as_api_error(error: Exception, param: str | None = None) -> ApiError:
    """What a client is told of `error`; `param` is the field that was being read."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_value"
        return ApiError(400, str(error), code=code) if param is None else bad_field(param, error, code)
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
    """Errors of the framework: no such route, or a method that it does not take."""
    message = f"{error.detail}".strip().lower() or HTTPStatus(error.status_code).phrase.lower()
    if error.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        message += "; there are POST /v1/chat/completions and /v1/completions, and others in /openapi.json"
    code = HTTPStatus(error.status_code).name.lower()
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def of_validation(error: ValidationError | RequestValidationError) -> ApiError:
    """What is wrong with a body or with a route's parameters, naming one field, in our own words."""
    errors: Sequence[Any] = error.errors()
    found = next((each for each in errors if each["type"] == UNSUPPORTED), errors[0])
    kind, context = found["type"], found.get("ctx", {})
    if kind == "json_invalid":
        return ApiError(400, _bad_json(context["error"]), code="invalid_json")
    if (given := context.get("param")) is not None:  # between fields
        return bad_field(given, found["msg"])
    path = found["loc"][1:] if isinstance(error, RequestValidationError) else found["loc"]
    if not path:
        return ApiError(400, f"the body must be a JSON object{_got(found)}", code="invalid_type")
    param = _spelled(path)
    if kind == UNSUPPORTED:
        return bad_field(param, context["reason"], "unsupported_parameter")
    if kind == "extra_forbidden":
        return ApiError(400, f"{param} is not a known field", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param} is required", param=param, code="missing_required_parameter")
    if kind == TOO_MANY:
        message = (
            f"{context['count']} messages and parts are more than the {context['most']} that this server "
            "takes; leave out or join the oldest"
        )
        return bad_field(param, message, "too_many_messages")
    words = _IN_WORDS.get(kind, "is not valid").format(**context)
    return ApiError(400, f"{param} {words}{_got(found)}", param=param, code="invalid_value")


def _bad_json(reason: str) -> str:
    if "recursion" in reason:
        return "the body is nested too deeply"
    place = _PLACE.search(reason)
    return "the body is not valid JSON" + (f" at line {place[1]}, column {place[2]}" if place else "")


def _got(found: Mapping[str, Any]) -> str:
    """The value that came instead, as JSON, shortened."""
    value = found["input"]
    if isinstance(value, (str, list)) and found["type"] in ("string_too_long", "too_short"):
        return f", got {len(value)}"
    if isinstance(value, (list, dict)):
        return ", got a list" if isinstance(value, list) else ", got an object"
    if isinstance(value, str) and len(value) > _LONGEST_VALUE:
        return f", got {_printable(json.dumps(value[:_LONGEST_VALUE], ensure_ascii=False))}..."
    return f", got {_printable(json.dumps(value, ensure_ascii=False))[:_LONGEST_NAME]}"


def _spelled(path: Sequence[Any]) -> str:
    """`["messages", 0, "role"]` as `messages[0].role`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{_printable(str(step)[:_LONGEST_NAME])}"
    return text.removeprefix(".")


def _printable(text: str) -> str:
    """`text` with an escape for every character that could not be seen, or that could change the line."""
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in text)
