"""Between the web server and the routes: the log, which web pages may call, and the client's connection.

Every request gets one line in the log, one count, and an answer even where the server fails. Knows ASGI,
headers and statuses; no route, and nothing of what is sent. It knows only numbers of a request, from the note
that is filled in while the request is served; prompts are logged elsewhere, and only on demand.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import anyio
from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.server.answers import Usage
from kvboost.server.errors import ApiError, as_api_error
from kvboost.server.metrics import Metrics
from kvboost.server.settings import ServerSettings

T = TypeVar("T")
ABORT = "kvboost_abort"  # in a request's state, where the server gives it: drops the connection
COMMENT = b": waiting\n\n"
CLIENT_GONE = 499  # what logs and counters say of a request whose client went away
_access = logging.getLogger("kvboost.server.access")
_logger = logging.getLogger("kvboost.server")
_LONGEST_LABEL = 64
_HARMLESS = ("GET", "HEAD")  # change nothing, and the page cannot read the answer
_LOCAL_ENDINGS = (".localhost", ".local", ".internal", ".home.arpa")  # nobody can register these
_LONGEST_NAME = 100


@dataclass
class Note:
    """What the log line of a request says beside its route."""

    status: int = 0
    usage: Usage | None = None
    caller: str = ""
    user: str | None = None
    error: str = ""  # one that came after the response had begun


async def note_of(request: Request) -> Note:
    """What the log will say of this request. Async: FastAPI would run a plain function in a thread."""
    note: Note = request.state.note
    return note


TheNote = Annotated[Note, Depends(note_of)]


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
            await self._app(scope, receive, noting)
        except ClientGoneError:
            note.status = CLIENT_GONE
            await send({"type": "http.response.start", "status": CLIENT_GONE, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        except Exception as error:
            _logger.exception("a request to %s failed", _route_of(scope))
            if note.status:
                raise  # the response has begun, and can only be cut off
            await as_api_error(error).response()(scope, receive, noting)
        finally:
            route = _route_of(scope)
            self._metrics.count_request(route, note.status or CLIENT_GONE)
            _access.info("%s", _line(scope["method"], route, note, (time.perf_counter() - started) * 1e3))


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


# --- pages of other origins --------------------------------------------------------------------


class SiteGuard:
    """Refuses requests of foreign pages, and without keys those for a foreign host name.

    A page can make its visitor's browser send requests to this machine, and a host name of its own point
    here. Programs other than browsers are not affected.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._origins = settings.cors_origins
        self._needs_known_host = not settings.api_keys
        self._hosts = {name.lower() for name in (*settings.allowed_hosts, socket.gethostname())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope["method"], Headers(scope=scope))):
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> ApiError | None:
        if method not in _HARMLESS and is_foreign(headers, self._origins):
            return ApiError(
                403,
                "this web page may not call the server; start it with --cors ORIGIN to let it",
                code="origin_not_allowed",
            )
        name = host_name(headers.get("host", ""))
        if self._needs_known_host and "*" not in self._hosts and not self._is_known(name):
            return ApiError(
                403,
                f"{name[:_LONGEST_NAME]!a} is not a name of this server; start it with --allowed-host NAME, "
                "or with --api-key",
                code="host_not_allowed",
            )
        return None

    def _is_known(self, name: str) -> bool:
        """Whether no outsider can have made `name` point here."""
        if name in self._hosts or "." not in name or name.endswith(_LOCAL_ENDINGS):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def is_foreign(headers: Headers, let_in: Sequence[str]) -> bool:
    """Whether a browser sends this for a page of an origin that is not allowed."""
    origin = headers.get("origin")
    if "*" in let_in or (origin is not None and origin in let_in):
        return False
    if (site := headers.get("sec-fetch-site")) is not None:
        return site in ("cross-site", "same-site")
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


# --- the client's end of the connection ------------------------------------------------------------


class ClientGoneError(Exception):
    """The client went away, so there is nobody to answer."""


async def until_gone(receive: Receive) -> None:
    """Wait until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; where the client goes away before, it is cancelled."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def event_of(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


async def kept_alive(events: AsyncGenerator[bytes, None], every_s: float) -> AsyncGenerator[bytes, None]:
    """Events, and a comment where none came for `every_s`: proxies cut silent streams."""
    async with aclosing(events):
        coming = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=every_s)
                if not done:
                    yield COMMENT
                    continue
                data = coming.result()
                if data is None:
                    return
                coming = asyncio.ensure_future(anext(events, None))
                yield event_of(data)
        finally:
            coming.cancel()
            with anyio.CancelScope(shield=True):  # a generator that is running cannot be closed
                await asyncio.gather(coming, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, until `until` (of time.monotonic()) at most.

    When the client goes away, the generator is closed at once. One that does not read until then is cut off.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], until: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._until = until
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await until_gone(receive)
                if not self._is_over:
                    scope["state"]["note"].status = CLIENT_GONE
                    group.cancel_scope.cancel()

            group.start_soon(watch)
            with anyio.move_on_after(max(0.0, self._until - time.monotonic())) as limit:
                await self._send_all(send)
            if limit.cancelled_caught:  # drop what is still to be sent: the client does not read it
                note = scope["state"]["note"]
                note.error = "a client that does not read"
                note.status = CLIENT_GONE
                if (abort := scope["state"].get(ABORT)) is not None:
                    abort()
                await asyncio.sleep(0)  # so that the connection hears of it
            group.cancel_scope.cancel()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        self._is_over = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})
