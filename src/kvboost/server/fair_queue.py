"""Waiting requests: tenants take turns, each of them FIFO, and each has a bounded share.

Not thread-safe: its owner holds a lock. Knows tickets, not what runs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from kvboost.server.ticket import Ticket


class FairQueue:
    """At most `limit` requests, at most `share` of them of one tenant."""

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
        """Tenants that have waiting requests."""
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
