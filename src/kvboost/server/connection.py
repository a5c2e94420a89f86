"""The client's end of a connection: is it still there, and events that are sent to it as they come.

Knows ASGI, nothing of what is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
ABORT = "kvboost_abort"  # in a request's state, where the server gives it: drops the connection
COMMENT = b": waiting\n\n"
CLIENT_GONE = 499  # what logs and counters say of a request whose client went away


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
            if limit.cancelled_caught:
                self._cut_off(scope)
                await asyncio.sleep(0)  # so that the connection hears of it
            group.cancel_scope.cancel()

    @staticmethod
    def _cut_off(scope: Scope) -> None:
        """Drop the connection and what is still to be sent: the client does not read it."""
        note = scope["state"]["note"]
        note.error = "a client that does not read"
        note.status = CLIENT_GONE
        if (abort := scope["state"].get(ABORT)) is not None:
            abort()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        self._is_over = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})
