"""Windows of documents: which of them are read in one go, each behind those before it.

Knows token ids only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CONTEXT_TOKENS = 2_048  # a document that would have more than these before it begins a new window


@dataclass(frozen=True)
class Place:
    """Tokens `[start, end)` of a window: document number `document`."""

    document: int
    start: int
    end: int


@dataclass(frozen=True)
class Window:
    """A lead-in, then documents with separators between them, as `token_ids` `[tokens]`."""

    token_ids: np.ndarray
    places: tuple[Place, ...]


class Packer:
    """Puts documents into windows of at most `room` tokens, one behind the other."""

    def __init__(self, separator: np.ndarray, room: int | None) -> None:
        self._separator = separator
        self._room = room
        self._windows: list[Window] = []
        self._parts: list[np.ndarray] = []
        self._places: list[Place] = []
        self._length = 0

    def add(self, number: int, ids: np.ndarray, lead: np.ndarray) -> None:
        """Put a document behind those before it, or behind `lead` in a new window."""
        start = self._length + len(self._separator)
        fits = self._room is None or start + len(ids) <= self._room
        if self._places and start <= CONTEXT_TOKENS and fits:
            self._append(self._separator)
        else:
            self._end()
            self._append(lead)
        self._places.append(Place(number, self._length, self._length + len(ids)))
        self._append(ids)

    def windows(self) -> list[Window]:
        """All windows."""
        self._end()
        return self._windows

    def _end(self) -> None:
        if self._places:
            self._windows.append(Window(np.concatenate(self._parts), tuple(self._places)))
        self._parts, self._places, self._length = [], [], 0

    def _append(self, ids: np.ndarray) -> None:
        self._parts.append(ids)
        self._length += len(ids)
