"""Composite chunks: which of them borrow KV from which donor.

A composite goes when a donor goes, unless a longer chunk takes the donor's place. Works under the lock of
the chunk store. Knows no tree and no budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Set

from kvboost.kv.codec import KeptChunk
from kvboost.models import CompositeChunk


class Borrowers:
    """The composites by donor. A donor may be a key whose chunk is still being made."""

    def __init__(self) -> None:
        self._by_donor: dict[str, dict[str, KeptChunk]] = {}

    def add(self, chunk: KeptChunk) -> None:
        """Note what a chunk borrows, if anything."""
        for donor in donors_of([chunk]):
            self._by_donor.setdefault(donor, {})[chunk.chunk_id] = chunk

    def discard(self, chunk: KeptChunk) -> None:
        """Forget a composite that goes."""
        for donor in donors_of([chunk]):
            borrowers = self._by_donor.get(donor, {})
            borrowers.pop(chunk.chunk_id, None)
            if not borrowers:
                self._by_donor.pop(donor, None)

    def keys_of(self, donor: str) -> list[str]:
        """The composites that borrow from `donor`."""
        return list(self._by_donor.get(donor, ()))

    def redirect(self, donor: str, successor: str) -> None:
        """Let all that borrow from `donor` borrow from `successor`, which begins with the same tokens."""
        for key, chunk in self._by_donor.pop(donor, {}).items():
            assert chunk.composite is not None
            borrows = tuple(
                dataclasses.replace(borrow, donor=successor) if borrow.donor == donor else borrow
                for borrow in chunk.composite.borrows
            )
            chunk.composite = dataclasses.replace(chunk.composite, borrows=borrows)
            self._by_donor.setdefault(successor, {})[key] = chunk

    def by_donor(self) -> Mapping[str, Set[str]]:
        """The keys of all composites by donor."""
        return {donor: set(borrowers) for donor, borrowers in self._by_donor.items()}


def donors_of(chunks: Iterable[KeptChunk]) -> set[str]:
    """The chunks that `chunks` borrow from."""
    return {
        borrow.donor for chunk in chunks if chunk.composite is not None for borrow in chunk.composite.borrows
    }


def part_behind(composite: CompositeChunk, start: int) -> CompositeChunk:
    """The part of a composite from position `start` on."""
    borrows = tuple(
        dataclasses.replace(
            borrow, start=max(borrow.start, start), offset=borrow.offset + max(0, start - borrow.start)
        )
        for borrow in composite.borrows
        if borrow.end > start
    )
    return CompositeChunk(borrows, composite.own_positions[composite.own_positions >= start])
