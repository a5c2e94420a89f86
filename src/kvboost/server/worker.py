"""The thread that runs the model for a server: a queue, a running batch, and answers on their way.

Requests wait in a queue that serves its tenants in turns, join the running batch when there is room, and
leave it at any step. No tenant can fill queue or batch alone: each has a share of the queue, and a part of
the batch is kept for tenants that have nothing in it. What cannot run beside others runs alone, between two
steps. Knows the engine and asyncio, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers.generation.streamers import BaseStreamer

from kvboost.batching.scheduler import Row, Scheduler
from kvboost.engine import InferenceEngine
from kvboost.errors import KVBoostError
from kvboost.models import GenerationResult
from kvboost.requests.request import Request

T = TypeVar("T")
_log = logging.getLogger(__name__)
_NOT_ANSWERED = "the server was shut down before this request was answered"
_TOO_LONG = "the request took longer than the server allows"
_IDLE_S = 0.5  # how often deadlines of waiting requests are looked at while nothing runs
_SPARE_SHARE = 8  # of the batch, one part in so many is for tenants that have nothing in it
_PATIENCE_S = 1.0  # after which those who pass somebody may use no more than that part
_LOOK_EVERY = 8  # steps, to see whether somebody can be let in, where nobody came or went


class QueueFullError(KVBoostError):
    """Too many requests wait; `retry_after_s` is a guess at when there is room."""

    def __init__(self, waiting: int, retry_after_s: int, *, own: bool = False) -> None:
        whose = "of your requests" if own else "requests"
        super().__init__(f"{waiting} {whose} wait already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class RequestTimeoutError(KVBoostError):
    """A request took longer than it may."""


class ShuttingDownError(KVBoostError):
    """The server ends, and this request was not answered."""


class Ticket:
    """An answer on its way: iterate for its tokens; then `result` is there. `cancel` frees its place.

    Made in the event loop that reads it.
    """

    def __init__(self, request: Request, tenant: str, deadline: float | None, answers: bool) -> None:
        self.request = request
        self.has_enough = False  # the reader wants no more of it, and it counts as answered
        self.tenant = tenant
        self.deadline = deadline  # of time.monotonic()
        self.answers = answers
        self.submitted_at = time.monotonic()
        self.row: Row | None = None
        self.blocked_at: float | None = None  # since when it is its turn, and there is no room
        self.has_passed = False
        self._loop = asyncio.get_running_loop()
        self._tokens: asyncio.Queue[int | None] = asyncio.Queue()
        self._result: GenerationResult | None = None
        self.error: Exception | None = None
        self.is_over = False

    def cancel(self) -> None:
        """Nobody wants the answer any more. It can be called twice, from any thread, and too late."""
        if not self.is_over:
            self.request.watch.cancelled.set()

    def end(self) -> None:
        """The reader has all that it wants: the answer ends here."""
        self.has_enough = True
        self.cancel()

    @property
    def is_cancelled(self) -> bool:
        return self.request.watch.cancelled.is_set()

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    async def __aiter__(self) -> AsyncIterator[int]:
        while (token := await self._tokens.get()) is not None:
            yield token
        if self.error is not None:
            raise self.error

    @property
    def result(self) -> GenerationResult:
        """The whole answer, once the tokens are through."""
        assert self._result is not None
        return self._result

    # --- the worker's side -------------------------------------------------------------------

    def token(self, token_id: int) -> None:
        self._send(token_id)

    def done(self, result: GenerationResult) -> None:
        self._result = result
        self._end()

    def failed(self, error: Exception) -> None:
        if not self.is_over:
            self.error = error
            self._end()

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._send(None)

    def _send(self, item: int | None) -> None:
        with contextlib.suppress(RuntimeError):  # the reader's event loop is gone, and so is the reader
            self._loop.call_soon_threadsafe(self._tokens.put_nowait, item)


class FairQueue:
    """Waiting requests; tenants take turns, each with its own in order, and none has more than `share`."""

    def __init__(self, limit: int, share: int | None = None) -> None:
        self._limit = limit
        self.share = limit if share is None else min(limit, share)
        self._tenants: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self._count = 0
        self.changes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def tenants(self) -> Iterable[str]:
        """Those who wait."""
        return self._tenants.keys()

    def waiting(self, tenant: str) -> int:
        """How many of a tenant's requests wait."""
        return len(self._tenants.get(tenant, ()))

    @property
    def is_full(self) -> bool:
        return self._count >= self._limit

    def add(self, ticket: Ticket) -> None:
        self._tenants.setdefault(ticket.tenant, deque()).append(ticket)
        self._count += 1
        self.changes += 1

    def firsts(self) -> list[Ticket]:
        """The first request of every tenant, in the order of their turns."""
        return [tickets[0] for tickets in self._tenants.values()]

    def pop(self, tenant: str) -> Ticket:
        """Take the first request of a tenant, who goes to the end of the line."""
        tickets = self._tenants.pop(tenant)
        ticket = tickets.popleft()
        self._count -= 1
        self.changes += 1
        if tickets:
            self._tenants[tenant] = tickets
        return ticket

    def remove_if(self, unwanted: Callable[[Ticket], bool]) -> list[Ticket]:
        """Take out all that are `unwanted`."""
        removed: list[Ticket] = []
        for tenant, tickets in list(self._tenants.items()):
            kept: deque[Ticket] = deque()
            for ticket in tickets:
                (removed if unwanted(ticket) else kept).append(ticket)
            if kept:
                self._tenants[tenant] = kept
            else:
                del self._tenants[tenant]
        self._count -= len(removed)
        self.changes += bool(removed)
        return removed


@dataclass
class WorkerStats:
    """What the worker has done, and what it is doing."""

    waiting: int = 0
    running: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    timed_out: int = 0


class Worker:
    """Runs requests in a thread of its own. With `batching=False`, one after the other."""

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        batching: bool = True,
        max_sequences: int | None = None,
        batch_tokens: int | None = None,
        max_waiting: int = 256,
        max_waiting_per_tenant: int | None = None,
        has_tenants: bool = False,
    ) -> None:
        """With `has_tenants`, a part of the batch is kept for tenants that have nothing in it."""
        self.engine = engine
        self.batch = engine.core.scheduler(max_sequences, batch_tokens) if batching else None
        self._queue = FairQueue(max_waiting, max_waiting_per_tenant)
        self._has_tenants = has_tenants
        self._looked_at: tuple[int, int] | None = None  # what there was when nobody could be let in
        self._turns_since = 0
        self._spare_rows = self._spare_tokens = 0
        if self.batch is not None and has_tenants:
            self._spare_rows = min(
                max(1, self.batch.max_sequences // _SPARE_SHARE), self.batch.max_sequences - 1
            )
            self._spare_tokens = self.batch.max_tokens // _SPARE_SHARE
        self._running: list[Ticket] = []
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False  # nothing new is taken
        self._stopping = False  # what is there is given up
        self._stats = WorkerStats()
        self._answer_s = 1.0  # running mean of how long an answer takes
        self._thread = threading.Thread(target=self._run, name="kvboost-worker", daemon=True)
        self._thread.start()

    # --- from the event loop -----------------------------------------------------------------

    def submit(
        self, request: Request, *, tenant: str = "", timeout_s: float | None = None, answers: bool = True
    ) -> Ticket:
        """Queue a request that `EngineCore.read` gave. Raises where it cannot be taken.

        `answers=False` only reads the prompt and stores it.
        """
        if self.batch is not None and not self.engine.core.parts.why_alone(request):
            self.batch.check(request, answers=answers)
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        ticket = Ticket(request, tenant, deadline, answers)
        with self._wake:
            if self._closing:
                raise ShuttingDownError("the server is shutting down")
            self._check_room(tenant)
            self._queue.add(ticket)
            self._wake.notify()
        return ticket

    def check_room(self, tenant: str) -> None:
        """Refuse a tenant's next request where it could not wait, before it is read."""
        with self._wake:
            self._check_room(tenant)

    def _check_room(self, tenant: str) -> None:
        if not self._may_wait(tenant):
            for ticket in self._queue.remove_if(lambda each: each.is_cancelled or each.is_late):
                self._give_up(ticket)
        if not self._may_wait(tenant):
            own = self._queue.waiting(tenant)
            self._stats.refused += 1
            is_own = own >= self._queue.share
            raise QueueFullError(own if is_own else len(self._queue), self._retry_after_s(), own=is_own)

    def _may_wait(self, tenant: str) -> bool:
        """Whether a tenant has room in the queue; one of several that has nothing there always has."""
        own = self._queue.waiting(tenant)
        return own < self._queue.share and (not self._queue.is_full or (self._has_tenants and not own))

    @property
    def tenants(self) -> set[str]:
        """Tenants whose requests wait or run."""
        with self._wake:
            return {*self._queue.tenants, *(ticket.tenant for ticket in self._running)}

    @property
    def max_choices(self) -> int:
        """How many requests one tenant may have waiting."""
        return self._queue.share

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the worker's thread, between two steps."""
        future: Future[T] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(ShuttingDownError("the server is shutting down"))
                return future
            self._calls.append((function, future))
            self._wake.notify()
        return future

    @property
    def stats(self) -> WorkerStats:
        """Counts at this moment."""
        with self._wake:
            return WorkerStats(
                **{**vars(self._stats), "waiting": len(self._queue), "running": len(self._running)}
            )

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Take nothing new, finish what is there within `timeout_s`, and fail the rest clearly."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._wake:
                self._stopping = True
                for ticket in self._running:
                    ticket.cancel()  # one that runs alone looks at this only
                self._wake.notify()
            self._thread.join()

    def _retry_after_s(self) -> int:
        rows = self.batch.max_sequences if self.batch is not None else 1
        return max(1, min(60, round(self._answer_s * len(self._queue) / rows)))

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._take_turns()
        finally:  # also where even failing has failed, so that nobody waits for a thread that is gone
            with self._wake:
                self._stopping = self._closing = True
                self._is_through()

    def _take_turns(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work, timeout=_IDLE_S)
                if self._is_through():
                    break
                calls = list(self._calls)
                self._calls.clear()
            for function, future in calls:
                _call(function, future)
            try:
                self._turn()
            except Exception as error:  # whatever it was, those who come later are to be served
                _log.exception("requests failed together")
                self._fail_all(error)
        if self.batch is not None:
            for row in self.batch.rows:
                _leave(self.batch, row)

    def _turn(self) -> None:
        """Let go, let in, one step."""
        self._drop_unwanted()
        self._admit()
        if self.batch is not None and self.batch.rows:
            self.batch.step()
            self._collect()

    def _fail_all(self, error: Exception) -> None:
        try:
            if self.batch is not None:
                self.batch.fail_all(error)
        finally:
            for ticket in self._running:
                ticket.failed(error)
            self._collect()

    def _has_work(self) -> bool:
        return bool(self._running or self._calls or len(self._queue) or self._closing)

    def _is_through(self) -> bool:
        """Whether the thread may end; whoever is left then is told so."""
        if self._stopping or (self._closing and not self._running and not len(self._queue)):
            self._stopping = True
            error = ShuttingDownError(_NOT_ANSWERED)
            for ticket in [*self._queue.remove_if(lambda _: True), *self._running]:
                ticket.failed(error)
            self._running = []
            for _, future in self._calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            self._calls.clear()
            return True
        return False

    def _drop_unwanted(self) -> None:
        """Let those go whose client has gone or whose time is up, waiting or running."""
        with self._wake:
            unwanted = self._queue.remove_if(lambda ticket: ticket.is_cancelled or ticket.is_late)
        for ticket in unwanted:
            self._give_up(ticket)
        for ticket in [each for each in self._running if each.is_cancelled or each.is_late]:
            with self._wake:
                self._running.remove(ticket)
            self._give_up(ticket)

    def _give_up(self, ticket: Ticket) -> None:
        late = not ticket.is_cancelled
        if late:
            self._stats.timed_out += 1
            ticket.failed(RequestTimeoutError(_TOO_LONG))
        elif ticket.has_enough:
            self._count_answer(ticket)
        else:
            self._stats.cancelled += 1
        if ticket.row is not None and self.batch is not None:
            self.batch.leave(ticket.row)  # what it has computed is stored all the same
        elif not late:
            ticket.failed(KVBoostError("the request was cancelled"))

    def _admit(self) -> None:
        """Let in who is next as long as there is room."""
        while True:
            with self._wake:
                ticket = None if self._stopping else self._next()
                if ticket is None:
                    return
                self._queue.pop(ticket.tenant)
                self._running.append(ticket)
            alone = self._runs_alone(ticket)
            try:
                if alone:
                    self._serve_alone(ticket)
                else:
                    assert self.batch is not None
                    ticket.row = self.batch.join(
                        ticket.request, ticket, answers=ticket.answers, tenant=ticket.tenant
                    )
            except Exception as error:
                ticket.failed(error)
            if ticket.is_over:
                self._collect()
            if alone:
                return  # a step for the others comes first

    def _next(self) -> Ticket | None:
        """Who can be let in: whose turn it is, or else a tenant that has nothing running."""
        seen = self._queue.changes, len(self._running)
        self._turns_since += 1
        if seen == self._looked_at and self._turns_since < _LOOK_EVERY:
            return None
        self._looked_at, self._turns_since = None, 0
        running = Counter(ticket.tenant for ticket in self._running)
        blocked: Ticket | None = None  # whose turn it is, and who has to wait
        for ticket in self._queue.firsts():
            is_new = not running[ticket.tenant]
            if blocked is not None and not (is_new and self._may_pass(ticket, blocked)):
                continue
            if self._runs_alone(ticket) or self._has_room(ticket, is_new):
                ticket.has_passed = blocked is not None
                return ticket
            if blocked is None:
                blocked = ticket
                ticket.blocked_at = ticket.blocked_at or time.monotonic()
        self._looked_at = seen
        return None

    def _may_pass(self, ticket: Ticket, blocked: Ticket) -> bool:
        """Whether one that has nothing running may go before one that has to wait for room.

        After a while only as long as all who passed take no more than the spare part: else one request after
        the other could pass, and there would never be room.
        """
        if self.batch is None or not self._spare_rows or blocked.blocked_at is None:
            return False
        if time.monotonic() - blocked.blocked_at < _PATIENCE_S:
            return True
        passed = [*(each for each in self._running if each.has_passed), ticket]
        tokens = sum(self.batch.needed(each.request, answers=each.answers) for each in passed)
        return len(passed) <= self._spare_rows and tokens <= self._spare_tokens

    def _runs_alone(self, ticket: Ticket) -> bool:
        return self.batch is None or bool(self.engine.core.parts.why_alone(ticket.request))

    def _has_room(self, ticket: Ticket, is_new: bool) -> bool:
        assert self.batch is not None
        if not self.batch.rows:
            return True
        return self.batch.has_room(
            ticket.request,
            answers=ticket.answers,
            spare_rows=0 if is_new else self._spare_rows,
            spare_tokens=0 if is_new else self._spare_tokens,
        )

    def _serve_alone(self, ticket: Ticket) -> None:
        request = ticket.request
        if ticket.answers:
            request.options = request.options.with_streamer(_Streamer(ticket))
        with _ending_at(ticket.deadline, request.watch.cancelled):
            result = self.engine.core.alone.serve(
                request
            )  # to read a prompt costs one token of an answer here
        if self._stopping:
            ticket.failed(ShuttingDownError(_NOT_ANSWERED))
        elif ticket.is_late and result.finish_reason == "cancelled":
            ticket.failed(RequestTimeoutError(_TOO_LONG))
        else:
            ticket.done(result)

    def _collect(self) -> None:
        """Count those that are through."""
        for ticket in [each for each in self._running if each.is_over]:
            with self._wake:
                self._running.remove(ticket)
            if isinstance(ticket.error, RequestTimeoutError):
                self._stats.timed_out += 1
            elif ticket.error is not None:
                self._stats.failed += 1
            elif ticket.is_cancelled and not ticket.has_enough:
                self._stats.cancelled += 1
            else:
                self._count_answer(ticket)

    def _count_answer(self, ticket: Ticket) -> None:
        self._stats.answered += 1
        self._answer_s = 0.8 * self._answer_s + 0.2 * (time.monotonic() - ticket.submitted_at)


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Hands the tokens of transformers' own loop to a ticket."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            self._ticket.token(token)

    def end(self) -> None:
        """The result says that it is over."""


@contextlib.contextmanager
def _ending_at(deadline: float | None, cancelled: threading.Event) -> Iterator[None]:
    """Set `cancelled` when the time is up, unless the block ends before."""
    if deadline is None:
        yield
        return
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), cancelled.set)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave(batch: Scheduler, row: Row) -> None:
    """Store what a request has computed, if that can be done."""
    try:
        batch.leave(row)
    except Exception:  # whatever it was: the others' text is to be stored, and the thread to end
        _log.exception("what a request had computed was not stored")


def _call(function: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
