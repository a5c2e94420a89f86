"""The RAM tier's books: how much is held, how much may be, and who goes next.

Eviction is by frequency, then age: the entry used least goes first, among equals the one used
longest ago. Uses count from the level that eviction has reached, and that rises by one whenever all
that was new at the level before is gone: a use outlasts `_TURNOVERS_PER_USE` such rounds, so an entry
that was popular long ago does not stay for ever. Knows entries by name, no tokens and no tensors.
"""

from __future__ import annotations

import heapq

_TURNOVERS_PER_USE = 8  # measured with `kvboost bench eviction`; see docs/log.md


class MemoryTier:
    """Byte and entry accounting with an eviction order. Not thread-safe by itself."""

    def __init__(self, max_entries: int | None, max_bytes: int | None) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.used_entries = 0
        self.kept_bytes = 0  # of what is used: must not be evicted now
        self.kept_entries = 0
        self._level = 0
        self._clock = 0
        self._ranks: dict[str, tuple[int, int]] = {}  # every entry: (level + worth, last use)
        self._evictable: set[str] = set()
        self._heap: list[tuple[int, int, str]] = []  # evictable ones by rank, with outdated leftovers

    def fits(self, size_bytes: int, entries: int = 1) -> bool:
        """Whether that much more fits now, without evicting."""
        if self.max_bytes is not None and self.used_bytes + size_bytes > self.max_bytes:
            return False
        return self.max_entries is None or self.used_entries + entries <= self.max_entries

    def could_fit(self, size_bytes: int, entries: int = 1) -> bool:
        """Whether it would fit if all that may go were evicted."""
        if self.max_bytes is not None and self.kept_bytes + size_bytes > self.max_bytes:
            return False
        return self.max_entries is None or self.kept_entries + entries <= self.max_entries

    def could_ever_fit(self, size_bytes: int) -> bool:
        """Whether it would fit into an empty tier."""
        if self.max_bytes is not None and size_bytes > self.max_bytes:
            return False
        return self.max_entries is None or self.max_entries >= 1

    def charge(self, size_bytes: int, entries: int = 1) -> None:
        """Count bytes as used; they must fit."""
        if not self.fits(size_bytes, entries):
            raise ValueError(f"{size_bytes} bytes do not fit into the budget")
        self.used_bytes += size_bytes
        self.used_entries += entries

    def refund(self, size_bytes: int, entries: int = 1) -> None:
        """Give back what was charged."""
        self.used_bytes -= size_bytes
        self.used_entries -= entries

    def keep(self, size_bytes: int, entries: int = 1) -> None:
        """Count used bytes as such that must stay for now; negative numbers let them go again."""
        self.kept_bytes += size_bytes
        self.kept_entries += entries

    def touch(self, entry: str, uses: int) -> None:
        """Rank `entry`, used `uses` times by now, as used just now."""
        self._clock += 1
        self._ranks[entry] = (self._level + 1 + _TURNOVERS_PER_USE * uses, self._clock)
        if entry in self._evictable:
            self._push(entry)

    def set_evictable(self, entry: str, evictable: bool) -> None:
        """Say whether `entry` may be evicted."""
        if not evictable:
            self._evictable.discard(entry)
        elif entry not in self._evictable:
            self._evictable.add(entry)
            self._push(entry)

    def forget(self, entry: str) -> None:
        """Drop `entry` from the eviction order."""
        self._evictable.discard(entry)
        self._ranks.pop(entry, None)

    def next_victim(self) -> str | None:
        """The evictable entry that goes next, or None. It stays until it is forgotten."""
        while self._heap:
            level, clock, entry = self._heap[0]
            if entry in self._evictable and self._ranks[entry] == (level, clock):
                self._level = max(self._level, level)
                return entry
            heapq.heappop(self._heap)
        return None

    def evictable(self) -> frozenset[str]:
        """The entries that may be evicted now."""
        return frozenset(self._evictable)

    def _push(self, entry: str) -> None:
        heapq.heappush(self._heap, (*self._ranks[entry], entry))
        if len(self._heap) > 4 * len(self._evictable) + 64:
            self._heap = [(*self._ranks[name], name) for name in self._evictable]
            heapq.heapify(self._heap)
