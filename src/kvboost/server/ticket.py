"""An answer on its way from the model's thread to the event loop, and why there may be none.

Knows requests and asyncio, no HTTP and no queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TypeAlias

from kvboost.batching.sequence import Sequence
from kvboost.errors import KVBoostError
from kvboost.models import GenerationResult
from kvboost.requests.request import Request


class QueueFullError(KVBoostError):
    """Too many requests wait; `retry_after_s` is a guess at when there is room."""

    def __init__(self, waiting: int, retry_after_s: int, *, own: bool = False) -> None:
        whose = "of your requests" if own else "requests"
        super().__init__(f"{waiting} {whose} wait already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class RequestTimeoutError(KVBoostError):
    """A request took longer than it may."""


class ShuttingDownError(KVBoostError):
    """The server shuts down, and this request was not answered."""


TokenQueue: TypeAlias = "asyncio.Queue[tuple[Ticket | None, int | None]]"


class Ticket:
    """An answer on its way: iterate for its tokens, then read `result`. `cancel` frees its place.

    Made in the event loop that reads it. Several may share a `queue`, which gets each of them with its next
    token, or None at its end; whoever reads that does not iterate.
    """

    def __init__(
        self,
        request: Request,
        tenant: str,
        deadline: float | None,
        answers: bool,
        queue: TokenQueue | None = None,
    ) -> None:
        self.request = request
        self.has_enough = False  # the client has enough of it, and it counts as answered
        self.tenant = tenant
        self.deadline = deadline  # of time.monotonic()
        self.answers = answers
        self.submitted_at = time.monotonic()
        self.sequence: Sequence | None = None
        self.blocked_at: float | None = None  # since when it is first in turn, without room for it
        self.has_passed = False
        self._loop = asyncio.get_running_loop()
        self._tokens: TokenQueue = asyncio.Queue() if queue is None else queue
        self._result: GenerationResult | None = None
        self.error: Exception | None = None
        self.is_over = False

    def cancel(self) -> None:
        """Stop: the answer is not wanted any more. It can be called twice, from any thread, and too late."""
        if not self.is_over:
            self.request.watch.cancelled.set()

    def end(self) -> None:
        """End the answer here: the client has all that it wants."""
        self.has_enough = True
        self.cancel()

    @property
    def is_cancelled(self) -> bool:
        return self.request.watch.cancelled.is_set()

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    async def __aiter__(self) -> AsyncIterator[int]:
        while (token := (await self._tokens.get())[1]) is not None:
            yield token
        if self.error is not None:
            raise self.error

    @property
    def result(self) -> GenerationResult:
        """The whole answer, after its last token."""
        assert self._result is not None
        return self._result

    # --- the worker's side -------------------------------------------------------------------

    def token(self, token_id: int) -> None:
        if not self.is_over:
            self._send(token_id)

    def done(self, result: GenerationResult) -> None:
        self._result = result
        self._end()

    def failed(self, error: Exception) -> None:
        if self.is_over:
            return
        if self.has_enough and self.sequence is not None:  # all that the client wants was sent
            self._result = self.request.result(self.sequence.sampler.decoded(), self.sequence.spans, "")
        else:
            self.error = error
        self._end()

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._send(None)

    def _send(self, item: int | None) -> None:
        with contextlib.suppress(RuntimeError):  # the reader's event loop is gone, and so is the reader
            self._loop.call_soon_threadsafe(self._tokens.put_nowait, (self, item))
