"""Reading requests: a few threads that tenants share, and an end for all that takes too long.

From the first byte of its body until it is queued for the model a request is being read. A tenant has a
share of the threads, of the bytes that are held meanwhile, and of the places; one that goes beyond it is told
to come back later, and the others notice nothing. Work whose client has gone or whose time is up ends at its
next step. Used from one event loop. Knows tenants and bytes, no request and no model.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvboost.errors import KVBoostError
from kvboost.server.errors import ApiError

T = TypeVar("T")
THREADS = 4  # tokenizing holds no lock for long, and every thread more has memory of its own
_SHARE = 2  # a tenant may have one part in so many of what there is
_MOST_BYTES = 64_000_000  # of bodies that are held at once, or so many of the largest
_LEAST_BODIES = 4
_RETRY_S = "1"


class _StoppedError(KVBoostError):
    """Nobody waits for this work any more."""


class Reading:
    """One request that is being read; `go_on` raises when that is to end."""

    def __init__(self, readers: Readers, tenant: str, until: float) -> None:
        self.tenant = tenant
        self.until = until  # of time.monotonic()
        self._readers = readers
        self._held_bytes = 0
        self._is_over = threading.Event()

    def go_on(self) -> None:
        """Called between the parts of the work, in its thread."""
        if self._is_over.is_set():
            raise _StoppedError("the request is read no more")
        if time.monotonic() > self.until:
            raise too_slow()

    def hold(self, count: int) -> None:
        """So many more bytes of its body are there."""
        self._readers.hold(self.tenant, count)
        self._held_bytes += count

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, done in a thread when it is the tenant's turn."""
        return await self._readers.run(self, work)

    def end(self) -> None:
        """Let go of all that it holds."""
        self._is_over.set()
        self._readers.hold(self.tenant, -self._held_bytes)
        self._held_bytes = 0


@dataclass
class _Job:
    reading: Reading
    work: Callable[[], Any]
    answer: asyncio.Future[Any]


class Readers:
    """The threads, and who may use them."""

    def __init__(self, max_reading: int, max_body_bytes: int) -> None:
        """A tenant may have `max_reading` requests being read, of `max_body_bytes` each at most."""
        self._max_reading = max_reading
        self._max_bytes = max(_MOST_BYTES, _SHARE * _LEAST_BODIES * max_body_bytes)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvboost-read")
        self._reading: Counter[str] = Counter()  # requests, by tenant
        self._bytes: Counter[str] = Counter()
        self._running: Counter[str] = Counter()  # threads
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # tenants take turns

    @contextmanager
    def reading(self, tenant: str, timeout_s: float) -> Iterator[Reading]:
        """A place for one request; refused where the tenant has too many."""
        if self._reading[tenant] >= self._max_reading:
            raise _refusal("requests")
        reading = Reading(self, tenant, time.monotonic() + timeout_s)
        self._reading[tenant] += 1
        try:
            yield reading
        finally:
            reading.end()
            _take(self._reading, tenant, 1)

    def hold(self, tenant: str, count: int) -> None:
        """Book bytes; refused where the tenant, or all together, would have too many."""
        mine, all_of_them = self._bytes[tenant] + count, self._bytes.total() + count
        if count > 0 and (mine > self._max_bytes // _SHARE or all_of_them > self._max_bytes):
            raise _refusal("bytes of requests")
        _take(self._bytes, tenant, -count)

    async def run(self, reading: Reading, work: Callable[[], T]) -> T:
        """What `work` gives. Whoever waits for it may be cancelled: then it ends at its next step."""
        loop = asyncio.get_running_loop()
        job = _Job(reading, work, loop.create_future())
        self._waiting.setdefault(reading.tenant, deque()).append(job)
        late = loop.call_later(max(0.0, reading.until - time.monotonic()), _fail, job.answer, too_slow())
        try:
            self._dispatch()
            answer: T = await job.answer
            return answer
        finally:
            late.cancel()
            if not _has_result(job.answer):
                reading.end()

    def _dispatch(self) -> None:
        """Give free threads to the tenants whose turn it is."""
        while self._running.total() < THREADS and (job := self._next()) is not None:
            tenant = job.reading.tenant
            self._running[tenant] += 1
            loop = asyncio.get_running_loop()
            self._pool.submit(_work, job, loop, lambda tenant=tenant: self._finished(tenant))  # type: ignore[misc]

    def _next(self) -> _Job | None:
        for tenant, jobs in list(self._waiting.items()):
            if self._running[tenant] >= THREADS // _SHARE:
                continue
            job: _Job | None = None
            while jobs and job is None:
                first = jobs.popleft()
                job = None if first.answer.done() else first
            del self._waiting[tenant]
            if jobs:
                self._waiting[tenant] = jobs  # to the end of the line
            if job is not None:
                return job
        return None

    def _finished(self, tenant: str) -> None:
        _take(self._running, tenant, 1)
        self._dispatch()

    def close(self) -> None:
        """Take no more work; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _work(job: _Job, loop: asyncio.AbstractEventLoop, finished: Callable[[], None]) -> None:
    """In a thread."""
    found: Any = None
    error: BaseException | None = None
    try:
        job.reading.go_on()
        found = job.work()
    except BaseException as raised:  # whatever it is, whoever waits is to know
        error = raised
    try:
        loop.call_soon_threadsafe(_settle, job.answer, found, error, finished)
    except RuntimeError:
        return  # the loop is closed, and nobody waits


def _settle(
    answer: asyncio.Future[Any], found: Any, error: BaseException | None, finished: Callable[[], None]
) -> None:
    if error is not None:
        _fail(answer, error)
    elif not answer.done():
        answer.set_result(found)
    finished()


def _has_result(answer: asyncio.Future[Any]) -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)


def _take(counts: Counter[str], name: str, count: int) -> None:
    """Count less, and forget names that have nothing."""
    counts[name] -= count
    if counts[name] <= 0:
        del counts[name]


def _refusal(what: str) -> ApiError:
    return ApiError(
        429,
        f"too many {what} at once; try again in {_RETRY_S} s",
        code="too_many_requests",
        headers={"Retry-After": _RETRY_S},
    )


def too_slow() -> ApiError:
    """It took too long to read a request."""
    return ApiError(408, "reading the request took too long: send less, or send it faster", code="timeout")
