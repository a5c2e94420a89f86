"""Reading the body of a request: JSON only, not too long, not too slow, checked field by field.

Bodies are read by hand and not by FastAPI, so that their length is bounded while they arrive, and
parsing does not block the event loop. Hence their part of the OpenAPI document is made here too.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import anyio
from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from kvboost.server.connection import ClientGoneError
from kvboost.server.errors import ApiError, of_validation
from kvboost.server.readers import Reading, too_slow
from kvboost.server.schemas import Body
from kvboost.server.settings import MAX_MESSAGES

B = TypeVar("B", bound=Body)


async def read_body(request: Request, max_bytes: int, reading: Reading) -> bytes:
    """The bytes of the body; ends when the time of `reading` is up."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a browser sends this for a foreign page only after a preflight request
        raise ApiError(415, "send JSON, with the header Content-Type: application/json", code="not_json")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_long(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        with anyio.fail_after(max(0.0, reading.until - time.monotonic())):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    raise _too_long(max_bytes)
                await reading.hold(len(part))
    except ClientDisconnect as error:
        raise ClientGoneError from error
    except TimeoutError as error:
        raise too_slow() from error
    return b"".join(parts)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"a request may have at most {max_bytes} bytes", code="request_too_large")


def parse(kind: type[B], raw: bytes, max_messages: int = MAX_MESSAGES) -> B:
    """The body as `kind`; errors name the field."""
    try:
        return kind.model_validate_json(raw, context={"max_messages": max_messages})
    except ValidationError as error:
        raise of_validation(error) from None


def described(kind: type[Body]) -> dict[str, Any]:
    """What a route says of its body in the OpenAPI document."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
