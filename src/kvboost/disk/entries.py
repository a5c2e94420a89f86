"""The chunks that this process knows to be on disk, by key. Knows what the index says of them, no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvboost.disk.index import IndexRow
from kvboost.disk.records import DiskEntry, entry_of
from kvboost.locks import fork_safe_rlock


class DiskEntries:
    """Entries of one folder with slots of `slot_bytes`. Thread-safe; its lock is never held over I/O."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._lock = fork_safe_rlock()
        self._entries: dict[str, DiskEntry] = {}
        self._evicted: list[str] = []  # keys that made room since `take_evicted` was called last

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._entries

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def get(self, key: str) -> DiskEntry | None:
        """The entry of a chunk, if it is known."""
        with self._lock:
            return self._entries.get(key)

    def all(self) -> list[DiskEntry]:
        """All entries at this moment."""
        with self._lock:
            return list(self._entries.values())

    def of_row(self, row: IndexRow) -> DiskEntry | None:
        """What a row of the index says, checked unless it is known already; None if it is damaged."""
        known = self.get(row.key)
        if known is not None and (known.slot, known.header.raw) == (row.slot, row.header):
            return known
        return entry_of(row, self._slot_bytes)

    def sizes(self) -> tuple[int, int]:
        """How many entries there are, and the bytes of their records."""
        with self._lock:
            return len(self._entries), sum(entry.header.record_bytes for entry in self._entries.values())

    def replace(self, entries: dict[str, DiskEntry]) -> None:
        """Know these, and no others."""
        with self._lock:
            self._entries = entries

    def update(self, entries: Mapping[str, DiskEntry]) -> None:
        """Know these too."""
        with self._lock:
            self._entries.update(entries)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget the entries of these chunks."""
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)

    def drop_entry(self, entry: DiskEntry) -> None:
        """Forget this very entry; one that has taken its place stays."""
        key = entry.header.key
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]

    def evict(self, keys: list[str]) -> None:
        """Forget chunks that made room for others, and note them for `take_evicted`."""
        with self._lock:
            self._evicted += keys
            self.drop(keys)

    def take_evicted(self) -> list[str]:
        """The keys that made room since this was called last."""
        with self._lock:
            taken, self._evicted = self._evicted, []
            return taken
