"""Copies of hot chunks on a GPU, in front of a store whose home is the host's memory.

What was read or written lately lies on the device too, as far as its own budget reaches; the least recently
used goes first. A copy goes with the chunk that it is of. Knows stored tensors, no store and no tokens.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvboost.kv.layout import Packed
from kvboost.locks import fork_safe_lock

_AUTO_SHARE = 8  # of the free memory, one part


@dataclass
class TierCounts:
    """Chunks that were found on the device, those that were not, and copies that had to go."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0


@dataclass
class _Copy:
    owner: weakref.ref[Any]
    tensors: Packed
    nbytes: int
    used_in: int  # the round in which it was used last


class DeviceTier:
    """At most `budget` bytes of copies on `device`, at every moment."""

    def __init__(self, device: torch.device, budget: int) -> None:
        self.device = device
        self.budget = budget
        self.nbytes = 0
        self.counts = TierCounts()
        self._copies: OrderedDict[int, _Copy] = OrderedDict()  # by the id of the owner; oldest first
        self._gone: deque[int] = deque()  # owners that are no more: noted wherever garbage is collected
        self._lock = fork_safe_lock(around_data=True)
        self._round = 0

    @classmethod
    def of(cls, device: torch.device, budget: int | None) -> DeviceTier | None:
        """One for `device`; None as budget: a share of the memory that is free. None where there is none."""
        if device.type != "cuda" or budget == 0:
            return None
        return cls(device, torch.cuda.mem_get_info(device)[0] // _AUTO_SHARE if budget is None else budget)

    def stats(self) -> dict[str, Any]:
        """Budget, what is used of it, and counters."""
        self.sweep()
        return {
            "budget": self.budget,
            "bytes": self.nbytes,
            "chunks": len(self._copies),
            **asdict(self.counts),
        }

    def begin_round(self) -> None:
        """What is found and kept from now on stays until the next round: it may be read together."""
        self._round += 1

    def found(self, owner: Any) -> Packed | None:
        """The copy of what `owner` keeps, if there is one."""
        with self._lock:
            self._sweep()
            copy = self._copies.get(id(owner))
            self.counts.hits += copy is not None
            self.counts.misses += copy is None
            if copy is None:
                return None
            self._copies.move_to_end(id(owner))
            copy.used_in = self._round
            return copy.tensors

    def keep(self, owner: Any, kept: Sequence[torch.Tensor]) -> Packed | None:
        """Copy what `owner` keeps, in the order of the stream; None where that does not fit."""
        nbytes = sum(each.nbytes for each in kept)
        with self._lock:
            self._sweep()
            if id(owner) in self._copies:
                self._drop(id(owner))
            if not self._make_room(nbytes):
                return None
            try:
                with torch.inference_mode(False):
                    tensors = tuple(
                        torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in kept
                    )
            except torch.cuda.OutOfMemoryError:  # others have taken it: live with what is there
                self.budget = self.nbytes
                return None
            for mine, theirs in zip(tensors, kept, strict=True):
                mine.copy_(theirs, non_blocking=True)
            gone = self._gone
            number = id(owner)
            reference = weakref.ref(owner, lambda _: gone.append(number))
            self._copies[number] = _Copy(reference, tensors, nbytes, self._round)
            self.nbytes += nbytes
            return tensors

    def _make_room(self, nbytes: int) -> bool:
        """Drop the oldest copies until there is room; False where what is in use leaves none."""
        if nbytes > self.budget:
            return False
        while self.nbytes + nbytes > self.budget:
            number, oldest = next(iter(self._copies.items()))
            if oldest.used_in == self._round:
                return False
            self._drop(number)
            self.counts.evicted += 1
        return True

    def sweep(self) -> None:
        """Free the copies of what is no more."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        while self._gone:
            number = self._gone.popleft()
            copy = self._copies.get(number)
            if copy is not None and copy.owner() is None:  # the id may be another's by now
                self._drop(number)

    def _drop(self, number: int) -> None:
        self.nbytes -= self._copies.pop(number).nbytes
