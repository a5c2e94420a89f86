"""Around every request: one line in the log, one count, and an answer even where the server fails.

Knows ASGI and statuses. It knows only numbers of a request, from the note that is filled in while
the request is served; prompts are logged elsewhere, and only on demand.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.server.answers import Usage
from kvboost.server.connection import CLIENT_GONE, ClientGoneError
from kvboost.server.errors import ApiError, as_api_error
from kvboost.server.metrics import Metrics

_access = logging.getLogger("kvboost.server.access")
_logger = logging.getLogger("kvboost.server")
_LONGEST_LABEL = 64


@dataclass
class Note:
    """What the log line of a request says beside its route."""

    status: int = 0
    usage: Usage | None = None
    caller: str = ""
    user: str | None = None
    error: str = ""  # one that came after the response had begun


class AccessLog:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = Note()
        scope.setdefault("state", {})["note"] = note
        started = time.perf_counter()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and not note.status:
                note.status = message["status"]
            await send(message)

        try:
            await self._serve(scope, receive, noting, note)
        finally:
            route = _route_of(scope)
            self._metrics.count_request(route, note.status or CLIENT_GONE)
            _access.info("%s", _line(scope["method"], route, note, (time.perf_counter() - started) * 1e3))

    async def _serve(self, scope: Scope, receive: Receive, send: Send, note: Note) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientGoneError:
            note.status = CLIENT_GONE
            await send({"type": "http.response.start", "status": CLIENT_GONE, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        except Exception as error:
            _logger.exception("a request to %s failed", _route_of(scope))
            if note.status:
                raise  # the response has begun, and can only be cut off
            await as_api_error(error).response()(scope, receive, send)


def note_failure(told: ApiError, error: Exception) -> None:
    """Log why a request failed, where that is the server's fault."""
    if told.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _logger.error("a request failed", exc_info=error)


def _route_of(scope: Scope) -> str:
    """The route, without what a client puts into its path."""
    return str(getattr(scope.get("route"), "path", "other"))


def _line(method: str, route: str, note: Note, ms: float) -> str:
    parts = [f"{method} {route} {note.status or CLIENT_GONE} {ms:.0f} ms"]
    if note.usage is not None:
        usage = note.usage
        parts.append(
            f"{usage.prompt_tokens} prompt tokens, {usage.prompt_tokens_details.cached_tokens} cached, "
            f"{usage.completion_tokens} new"
        )
    if note.caller:
        parts.append(note.caller)
    if note.user is not None:
        parts.append(f"user {note.user[:_LONGEST_LABEL]!a}")
    if note.error:
        parts.append(f"ended by {note.error}")
    return ", ".join(parts)
