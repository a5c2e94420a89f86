"""The thread that runs the model for a server: it takes requests from the queue and drives the scheduler.

Requests wait in a queue, join the running batch when there is room (both in `tickets`), and leave it at any
step. What cannot run beside others runs alone, between two steps. Knows the engine, no HTTP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from transformers.generation.streamers import BaseStreamer

from kvboost.batching.scheduler import Scheduler
from kvboost.batching.sequence import Sequence
from kvboost.engine import InferenceEngine
from kvboost.errors import KVBoostError
from kvboost.requests.request import Request
from kvboost.server.tickets import (
    Admission,
    FairQueue,
    QueueFullError,
    RequestTimeoutError,
    ShuttingDownError,
    Ticket,
    TokenQueue,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)
_NOT_ANSWERED = "the server was shut down before this request was answered"
_TOO_LONG = "the request took longer than the server allows"
_IDLE_S = 0.5  # how often deadlines of waiting requests are looked at while nothing runs


@dataclasses.dataclass
class WorkerStats:
    """Requests by how they ended, and those that wait and run now."""

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
        core = engine.core
        self.engine = engine
        self.scheduler = core.scheduler(max_sequences, batch_tokens) if batching else None
        self._queue = FairQueue(max_waiting, max_waiting_per_tenant)
        self._admission = Admission(
            self._queue, self.scheduler, core.parts.why_alone, has_tenants=has_tenants
        )
        self._has_tenants = has_tenants
        self._running: list[Ticket] = []
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False  # nothing new is taken
        self._stopping = False  # running requests are given up
        self._stats = WorkerStats()
        self._answer_s = 1.0  # running mean of how long an answer takes
        self._thread = threading.Thread(target=self._run, name="kvboost-worker", daemon=True)
        self._thread.start()

    # --- from the event loop -----------------------------------------------------------------

    def submit(
        self,
        request: Request,
        *,
        tenant: str = "",
        timeout_s: float | None = None,
        answers: bool = True,
        queue: TokenQueue | None = None,
    ) -> Ticket:
        """Queue a request that `EngineCore.read` gave. Raises where it cannot be taken.

        `answers=False` only reads the prompt and stores it. `queue` gets the tokens in place of the ticket.
        """
        if self.scheduler is not None and not self.engine.core.parts.why_alone(request):
            self.scheduler.check(request, answers=answers)
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        ticket = Ticket(request, tenant, deadline, answers, queue)
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
            at_once = self.scheduler.max_sequences if self.scheduler is not None else 1
            retry_after_s = max(1, min(60, round(self._answer_s * len(self._queue) / at_once)))
            raise QueueFullError(own if is_own else len(self._queue), retry_after_s, own=is_own)

    def _may_wait(self, tenant: str) -> bool:
        """Whether a tenant may queue a request; of several tenants, one that has none waiting always may."""
        own = self._queue.waiting(tenant)
        has_room = len(self._queue) < self._queue.limit or (self._has_tenants and not own)
        return own < self._queue.share and has_room

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
            now = {"waiting": len(self._queue), "running": len(self._running)}
            return dataclasses.replace(self._stats, **now)

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
                    ticket.cancel()  # the only thing that one that runs alone looks at
                self._wake.notify()
            self._thread.join()

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._take_turns()
        finally:  # even where telling of a failure has failed: nobody may wait for a thread that is gone
            with self._wake:
                self._stopping = self._closing = True
                self._is_through()

    def _take_turns(self) -> None:
        while True:
            with self._wake:
                is_idle = not self._wake.wait_for(self._has_work, timeout=_IDLE_S)
                if self._is_through():
                    break
                calls = list(self._calls)
                self._calls.clear()
            for function, future in calls:
                _call(function, future)
            try:
                self._turn()
                if is_idle and self.scheduler is not None:
                    self.scheduler.capture()
            except Exception as error:  # whatever it was, later requests must be served
                _log.exception("requests failed together")
                self._fail_all(error)
        if self.scheduler is not None:
            for sequence in self.scheduler.sequences:
                _leave(self.scheduler, sequence)

    def _turn(self) -> None:
        """Drop what nobody wants, admit what has room, and run one step."""
        self._drop_unwanted()
        self._admit()
        if self.scheduler is not None and self.scheduler.sequences:
            self.scheduler.step()
            self._collect()

    def _fail_all(self, error: Exception) -> None:
        try:
            if self.scheduler is not None:
                self.scheduler.fail_all(error)
        finally:
            for ticket in self._running:
                ticket.failed(error)
            self._collect()

    def _has_work(self) -> bool:
        return bool(self._running or self._calls or len(self._queue) or self._closing)

    def _is_through(self) -> bool:
        """Whether the thread may end; then the requests that are left fail."""
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
        """Drop requests whose client has gone or whose time is up, waiting or running."""
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
        if ticket.sequence is not None and self.scheduler is not None:
            self.scheduler.leave(ticket.sequence)  # what it has computed is stored all the same
            self._log_reuse(ticket)
        elif not late:
            ticket.failed(KVBoostError("the request was cancelled"))

    def _admit(self) -> None:
        """Start requests as long as there is room."""
        while True:
            with self._wake:
                ticket = None if self._stopping else self._admission.next(self._running)
                if ticket is None:
                    return
                self._queue.pop(ticket.tenant)
                self._running.append(ticket)
            alone = self._admission.runs_alone(ticket)
            try:
                if alone:
                    self._serve_alone(ticket)
                else:
                    assert self.scheduler is not None
                    ticket.sequence = self.scheduler.join(
                        ticket.request, ticket, answers=ticket.answers, tenant=ticket.tenant
                    )
            except Exception as error:
                ticket.failed(error)
            if ticket.is_over:
                self._collect()
            if alone:
                return  # a step for the others comes first

    def _serve_alone(self, ticket: Ticket) -> None:
        request = ticket.request
        if ticket.answers:
            request.options = request.options.with_streamer(_Streamer(ticket))
        with _ending_at(ticket.deadline, request.watch.cancelled):
            result = self.engine.core.alone.serve(request)  # costs one token even where no answer is wanted
        if self._stopping:
            ticket.failed(ShuttingDownError(_NOT_ANSWERED))
        elif ticket.is_late and result.finish_reason == "cancelled":
            ticket.failed(RequestTimeoutError(_TOO_LONG))
        else:
            ticket.done(result)

    def _collect(self) -> None:
        """Count the requests that are over."""
        for ticket in [each for each in self._running if each.is_over]:
            with self._wake:
                self._running.remove(ticket)
            self._log_reuse(ticket)
            if isinstance(ticket.error, RequestTimeoutError):
                self._stats.timed_out += 1
            elif ticket.error is not None:
                self._stats.failed += 1
            elif ticket.is_cancelled and not ticket.has_enough:
                self._stats.cancelled += 1
            else:
                self._count_answer(ticket)

    def _log_reuse(self, ticket: Ticket) -> None:
        """Say once that answers are approximate; in this thread no warning may become an error."""
        if ticket.is_over and ticket.error is None:
            self.engine.core.notice.log([ticket.result])

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


def _leave(scheduler: Scheduler, sequence: Sequence) -> None:
    """Store what a sequence has computed, if possible."""
    try:
        scheduler.leave(sequence)
    except Exception:  # whatever it was, the other sequences must be stored, and the thread must end
        _log.exception("what a request had computed was not stored")


def _call(function: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
