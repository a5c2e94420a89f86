"""Which waiting request may run next, so that no tenant can fill the batch alone.

With several tenants, a part of the batch is kept for those that have nothing in it. Called under the worker's
lock. Knows the queue and how much room the batch has, and starts nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvboost.batching.scheduler import Scheduler
from kvboost.requests.request import Request
from kvboost.server.fair_queue import FairQueue
from kvboost.server.ticket import Ticket

_SPARE_SHARE = 8  # one part in so many of the batch is for tenants that have nothing in it
_PATIENCE_S = 1.0  # after this time, requests that pass a blocked one may use no more than that part
_LOOK_EVERY = 8  # steps between two looks for room while nobody came or went


class Admission:
    """Chooses among the first requests of all tenants.

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

    def next(self, running: Sequence[Ticket]) -> Ticket | None:
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

    def _may_pass(self, ticket: Ticket, blocked: Ticket, running: Sequence[Ticket]) -> bool:
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
