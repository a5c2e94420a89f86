"""Free slots of an arena, as ranges that are taken and given back.

Knows slots, not what lies in them.
"""

from __future__ import annotations

import bisect
import heapq


class SlotPool:
    """The free ones of slots `[start, end)`."""

    def __init__(self, start: int, end: int) -> None:
        self._ranges = [(start, end)] if end > start else []
        self.free = end - start

    def has_room(self, count: int, most_ranges: int) -> bool:
        """Whether `count` slots are free in at most so many ranges."""
        return sum(heapq.nlargest(most_ranges, (end - start for start, end in self._ranges))) >= count

    def take(self, count: int) -> list[tuple[int, int]]:
        """Ranges of `count` slots in all: one if there is one, otherwise the largest first."""
        if count > self.free:
            raise ValueError(f"{count} slots are wanted, {self.free} are free")
        self.free -= count
        fitting = [each for each in self._ranges if each[1] - each[0] >= count]
        taken = []
        while count:
            start, end = (
                min(fitting, key=lambda each: each[1] - each[0])
                if fitting
                else max(self._ranges, key=lambda each: each[1] - each[0])
            )
            used = min(count, end - start)
            self._ranges.remove((start, end))
            if start + used < end:
                bisect.insort(self._ranges, (start + used, end))
            taken.append((start, start + used))
            count -= used
        return taken

    def give(self, start: int, end: int) -> None:
        """Give slots `[start, end)` back."""
        if start == end:
            return
        self.free += end - start
        at = bisect.bisect(self._ranges, (start, end))
        if at < len(self._ranges) and self._ranges[at][0] == end:
            end = self._ranges.pop(at)[1]
        if at and self._ranges[at - 1][1] == start:
            at -= 1
            start = self._ranges.pop(at)[0]
        self._ranges.insert(at, (start, end))
