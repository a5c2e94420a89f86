"""Requests on their way to the model and back: tickets, the queue they wait in, and who may run next.

Tenants take turns, each of them FIFO and with a bounded share of the queue; with several tenants, a part of
the batch is kept for those that have nothing in it. Knows requests, asyncio and how much room the batch has;
knows no HTTP, and starts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeAlias

from kvboost.batching.scheduler import Scheduler
from kvboost.batching.sequence import Sequence
from kvboost.errors import KVBoostError
from kvboost.models import GenerationResult
from kvboost.requests.request import Request

_SPARE_SHARE = 8  # one part in so many of the batch is for tenants that have nothing in it
_PATIENCE_S = 1.0  # after this time, requests that pass a blocked one may use no more than that part
_LOOK_EVERY = 8  # steps between two looks for room while nobody came or went


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


class FairQueue:
    """At most `limit` requests, at most `share` of them of one tenant. Its owner holds a lock."""

    def __init__(self, limit: int, share: int | None = None) -> None:
        self.limit = limit
        self.share = limit if share is None else min(limit, share)
        self._tenants: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self._count = 0
        self.changes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def tenants(self) -> Iterable[str]:
        """Tenants that have waiting requests."""
        return self._tenants.keys()

    def waiting(self, tenant: str) -> int:
        """How many of a tenant's requests wait."""
        return len(self._tenants.get(tenant, ()))

    def add(self, ticket: Ticket) -> None:
        self._tenants.setdefault(ticket.tenant, deque()).append(ticket)
        self._count += 1
        self.changes += 1

    def firsts(self) -> list[Ticket]:
        """The first request of every tenant, in the order of their turns."""
        return [tickets[0] for tickets in self._tenants.values()]

    def pop(self, tenant: str) -> Ticket:
        """Take the first request of a tenant; its next turn comes after all others."""
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


class Admission:
    """Chooses among the first requests of all tenants. Called under the worker's lock.

    `scheduler` is None where requests run one by one. `why_alone` says why a request cannot join the batch;
    empty where it can.
    """

    def __init__(
        self,
        queue: FairQueue,
        scheduler: Scheduler | None,
        why_alone: Callable[[Request], str],
        *,
        has_tenants: bool,
    ) -> None:
        self._queue = queue
        self._scheduler = scheduler
        self._why_alone = why_alone
        self._full_at: tuple[int, int] | None = None  # changes and running requests when nobody had room
        self._looks_skipped = 0
        self._spare_sequences = self._spare_tokens = 0
        if scheduler is not None and has_tenants:
            most = scheduler.max_sequences
            self._spare_sequences = min(max(1, most // _SPARE_SHARE), most - 1)
            self._spare_tokens = scheduler.max_tokens // _SPARE_SHARE

    def runs_alone(self, ticket: Ticket) -> bool:
        """Whether a request cannot run beside others."""
        return self._scheduler is None or bool(self._why_alone(ticket.request))

    def next(self, running: list[Ticket]) -> Ticket | None:
        """The request that may start: that of the tenant whose turn it is, or else one of a new tenant.

        A tenant is new where none of its requests are `running`.
        """
        now = self._queue.changes, len(running)
        self._looks_skipped += 1
        if now == self._full_at and self._looks_skipped < _LOOK_EVERY:
            return None
        self._full_at, self._looks_skipped = None, 0
        counts = Counter(ticket.tenant for ticket in running)
        blocked: Ticket | None = None  # the first in turn, where there is no room for it
        for ticket in self._queue.firsts():
            is_new = not counts[ticket.tenant]
            if blocked is not None and not (is_new and self._may_pass(ticket, blocked, running)):
                continue
            if self.runs_alone(ticket) or self._has_room(ticket, is_new):
                ticket.has_passed = blocked is not None
                return ticket
            if blocked is None:
                blocked = ticket
                ticket.blocked_at = ticket.blocked_at or time.monotonic()
        self._full_at = now
        return None

    def _may_pass(self, ticket: Ticket, blocked: Ticket, running: list[Ticket]) -> bool:
        """Whether a new tenant's request may start before one that waits for room.

        After a while only as long as all that passed fit into the spare part: otherwise one request after the
        other could pass, and there would never be room.
        """
        if self._scheduler is None or not self._spare_sequences or blocked.blocked_at is None:
            return False
        if time.monotonic() - blocked.blocked_at < _PATIENCE_S:
            return True
        passed = [*(each for each in running if each.has_passed), ticket]
        tokens = sum(self._scheduler.needed(each.request, answers=each.answers) for each in passed)
        return len(passed) <= self._spare_sequences and tokens <= self._spare_tokens

    def _has_room(self, ticket: Ticket, is_new: bool) -> bool:
        assert self._scheduler is not None
        if not self._scheduler.sequences:
            return True
        return self._scheduler.has_room(
            ticket.request,
            answers=ticket.answers,
            spare_sequences=0 if is_new else self._spare_sequences,
            spare_tokens=0 if is_new else self._spare_tokens,
        )
