"""Reading requests: their bodies, a few threads that tenants share, and a deadline for each request.

Bodies are JSON only, not too long, not too slow, and checked field by field. They are read by hand and not by
FastAPI, so that their length is bounded while they arrive, and parsing does not block the event loop. Hence
their part of the OpenAPI document is made here too.

A request is being read from the first byte of its body until it is queued for the model. A tenant has a
share of the threads, of their time, of the bytes that are held meanwhile, and of the places; one that goes
beyond it waits, or gets a 429, and the others are not affected. Time matters most: while one thread runs
Python, the model's thread hardly gets the interpreter. Work whose client has gone or whose time is up ends
at its next step. Used from one event loop. Knows tenants and bytes, no route and no model.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from kvboost.errors import KVBoostError
from kvboost.server.asgi import ClientGoneError
from kvboost.server.errors import ApiError, of_validation
from kvboost.server.schemas import Body
from kvboost.server.settings import MAX_MESSAGES
from kvboost.server.tickets import ShuttingDownError

T = TypeVar("T")
B = TypeVar("B", bound=Body)
THREADS = 4
_SHARE = 2  # a tenant may use one part in so many of threads and bytes
_MOST_BYTES = 64_000_000  # of bodies that are held at once; more where the largest allowed body needs it
_LEAST_BODIES = 4
_SMALL_BODY = 262_144  # bytes that a tenant may always have
_RETRY_S = "1"
_PACE = 0.2  # seconds of reading in every second that all tenants get together while others are served
_AT_ONCE_S = 0.3  # seconds that a tenant can save up
_MOST_DEBT_S = 3.0  # seconds that a tenant can owe
_LOOK_S = 0.02  # how often waiting tenants are checked
_MOST_PAUSED = 16  # requests that are read at once of a tenant that has spent its time
_LONGEST_PAUSE_S = 0.25  # after which it is checked again whether others are served
_BYTE_S = 5e-9  # time that the event loop spends on a byte of a body


class _StoppedError(KVBoostError):
    """The result of this work is not wanted any more."""


class Reading:
    """One request that is being read; `go_on` raises when it must end."""

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

    async def hold(self, count: int) -> None:
        """Count more bytes of its body, then wait until the tenant may go on."""
        self._readers.hold(self.tenant, count)
        self._held_bytes += count
        await self._readers.pause(self.tenant)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, done in a thread when it is the tenant's turn."""
        return await self._readers.run(self, work)

    def end(self) -> None:
        """Give back all that it holds."""
        self._is_over.set()
        self._readers.hold(self.tenant, -self._held_bytes)
        self._held_bytes = 0


@dataclass(eq=False)
class _Job:
    reading: Reading
    work: Callable[[], Any]
    answer: asyncio.Future[Any]


class Allowance:
    """Seconds that tenants may spend: shares of `_PACE` in every second, and some that were saved up."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # by tenant: seconds left, and when that was
        self._looked_at = 0.0

    @property
    def pace(self) -> float:
        """Seconds that each spending tenant gets in a second."""
        return _PACE / max(1, len(self._left))

    def left(self, tenant: str) -> float:
        seconds, then = self._left.get(tenant, (_AT_ONCE_S, 0.0))
        return min(_AT_ONCE_S, seconds + self.pace * (time.monotonic() - then))

    def spend(self, tenant: str, seconds: float, *, is_alone: bool) -> None:
        """Count what was spent; free where no other tenant is served."""
        now, left = time.monotonic(), self.left(tenant)
        least = min(left, 0.0) if is_alone else -_MOST_DEBT_S
        self._left[tenant] = max(least, left - seconds), now
        if now - self._looked_at > 1.0:
            self._looked_at = now
            for other in [name for name in self._left if self.left(name) >= _AT_ONCE_S]:
                del self._left[other]


class Readers:
    """The threads, and which tenant may use them."""

    def __init__(
        self, max_reading: int, max_body_bytes: int, served: Callable[[], set[str]] = lambda: set()
    ) -> None:
        """A tenant may have `max_reading` requests being read, of `max_body_bytes` each at most.

        `served` are the tenants whose requests were read and are not answered yet.
        """
        self._max_reading = max_reading
        self._max_bytes = max(_MOST_BYTES, _SHARE * _LEAST_BODIES * max_body_bytes)
        self._served = served
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvboost-read")
        self._reading: Counter[str] = Counter()  # requests, by tenant
        self._bytes: Counter[str] = Counter()
        self._running: Counter[str] = Counter()  # threads
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # tenants take turns
        self._allowance = Allowance()
        self._look_again: asyncio.TimerHandle | None = None
        self._is_closed = threading.Event()

    @contextmanager
    def reading(self, tenant: str, timeout_s: float) -> Iterator[Reading]:
        """A place for one request; refused where the tenant has too many."""
        most = self._max_reading if self._has_time(tenant) else min(_MOST_PAUSED, self._max_reading)
        if self._reading[tenant] >= most:
            raise _refusal("requests")
        reading = Reading(self, tenant, time.monotonic() + timeout_s)
        self._reading[tenant] += 1
        try:
            yield reading
        finally:
            reading.end()
            _take(self._reading, tenant, 1)

    def hold(self, tenant: str, count: int) -> None:
        """Count bytes; refused where the tenant, or all together, would hold too many."""
        mine, all_of_them = self._bytes[tenant] + count, self._bytes.total() + count
        is_over = mine > self._max_bytes // _SHARE or all_of_them > self._max_bytes
        if count > 0 and is_over and mine > _SMALL_BODY:
            raise _refusal("bytes of requests")
        _take(self._bytes, tenant, -count)
        if count > 0:
            self._allowance.spend(tenant, count * _BYTE_S, is_alone=self._is_alone(tenant))

    async def pause(self, tenant: str) -> None:
        """Wait until a tenant may go on."""
        while not self._has_time(tenant):
            owed_s = -self._allowance.left(tenant) / self._allowance.pace
            await asyncio.sleep(min(max(owed_s, _LOOK_S), _LONGEST_PAUSE_S))

    async def run(self, reading: Reading, work: Callable[[], T]) -> T:
        """The result of `work`. Where the waiting task is cancelled, the work ends at its next step."""
        loop = asyncio.get_running_loop()
        job = _Job(reading, work, loop.create_future())
        self._waiting.setdefault(reading.tenant, deque()).append(job)
        left_s = max(0.0, reading.until - time.monotonic())
        late = loop.call_later(left_s, lambda: _fail(job.answer, too_slow()))
        try:
            self._dispatch()
            answer: T = await job.answer
            return answer
        finally:
            late.cancel()
            answer_is_there = job.answer.done() and not job.answer.cancelled()
            if not answer_is_there or job.answer.exception() is not None:
                self._drop(job)
                reading.end()

    def _drop(self, job: _Job) -> None:
        """Take a job out of the queue, with the body that it holds."""
        jobs = self._waiting.get(job.reading.tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.reading.tenant]

    def _dispatch(self) -> None:
        """Give free threads to the tenants whose turn it is."""
        loop = asyncio.get_running_loop()
        if self._is_closed.is_set():
            for waiting in itertools.chain.from_iterable(self._waiting.values()):
                _fail(waiting.answer, ShuttingDownError("the server is shutting down"))
            self._waiting.clear()
        while self._running.total() < THREADS and (job := self._next()) is not None:
            self._start(job, loop)
        if self._look_again is not None:
            self._look_again.cancel()
        self._look_again = loop.call_later(_LOOK_S, self._dispatch) if self._waiting else None

    def _start(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._pool.submit(_work, job, loop, self._finished)
            self._running[job.reading.tenant] += 1
        except RuntimeError:  # it was closed in between
            _fail(job.answer, ShuttingDownError("the server is shutting down"))

    def _next(self) -> _Job | None:
        """The job whose turn it is; jobs whose result is not wanted are dropped."""
        for tenant, jobs in list(self._waiting.items()):
            while jobs and jobs[0].answer.done():
                jobs.popleft()
            has_threads = self._running[tenant] < THREADS // _SHARE
            if jobs and not (has_threads and self._has_time(tenant)):
                continue
            del self._waiting[tenant]
            if jobs:
                job = jobs.popleft()
                if jobs:
                    self._waiting[tenant] = jobs  # to the end of the queue
                return job
        return None

    def _has_time(self, tenant: str) -> bool:
        """Whether a tenant may go on reading; always where no other tenant is served."""
        return self._allowance.left(tenant) > 0 or self._is_alone(tenant)

    def _is_alone(self, tenant: str) -> bool:
        """Whether no other tenant has a request that is being read, waits for the model, or runs."""
        return self._served() | self._waiting.keys() | self._running.keys() <= {tenant}

    def _finished(self, tenant: str, seconds: float) -> None:
        self._allowance.spend(tenant, seconds, is_alone=self._is_alone(tenant))
        _take(self._running, tenant, 1)
        self._dispatch()

    def close(self) -> None:
        """Take no more work; what runs ends by itself, what waits fails. From any thread."""
        self._is_closed.set()
        self._pool.shutdown(wait=False)


def _work(job: _Job, loop: asyncio.AbstractEventLoop, finished: Callable[[str, float], None]) -> None:
    """Do a job, in a thread."""
    started = time.thread_time()
    found: Any = None
    error: BaseException | None = None
    try:
        job.reading.go_on()
        found = job.work()
    except BaseException as raised:  # whatever it is, the waiting task must get it
        error = raised

    def settle(seconds: float) -> None:
        try:
            if error is not None:
                _fail(job.answer, error)
            elif not job.answer.done():
                job.answer.set_result(found)
        finally:
            finished(job.reading.tenant, seconds)

    try:
        loop.call_soon_threadsafe(settle, time.thread_time() - started)
    except RuntimeError:
        return  # the event loop is closed, so nothing waits


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        is_odd = isinstance(error, StopIteration)  # a future cannot hold it
        answer.set_exception(RuntimeError(str(error)) if is_odd else error)


def _take(counts: Counter[str], name: str, count: int) -> None:
    """Subtract from a counter, and drop names that reach zero."""
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
    """The error where reading a request took too long."""
    return ApiError(408, "reading the request took too long: send less, or try again later", code="timeout")


# --- bodies --------------------------------------------------------------------------------------


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
