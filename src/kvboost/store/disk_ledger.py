"""What of a chunk store is on disk: noted, handed out to be saved, taken over, forgotten.

Works on the pool of chunks, under the lock of its store. Knows no files and no threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from kvboost.kv.codec import StoredKV
from kvboost.store.entries import StoredChunk
from kvboost.store.pool import ChunkPool


class DiskLedger:
    """What the disk behind a store asks and tells it, from any thread."""

    def __init__(self, pool: ChunkPool, lock: threading.RLock) -> None:
        self._pool = pool
        self._saved = pool.saved
        self._lock = lock

    def save_from_now_on(self) -> None:
        """Note what is not on disk; `take_unsaved` hands it out."""
        with self._lock:
            entries = self._pool.entries.items()
            self._saved.start(key for key, entry in entries if entry.chunk.composite is None)

    def stop_saving(self) -> None:
        """Hand nothing out any more."""
        with self._lock:
            self._saved.stop()

    def note_saved(self, keys: Iterable[str]) -> set[str]:
        """Remember that chunks are on disk; returns the keys of those that are not known at all."""
        with self._lock:
            found = set(keys)
            known = found & self._pool.entries.keys()
            for key in known:
                self._saved.note_found(key)
            return found - known

    def adopt(self, chunks: Iterable[StoredChunk], family: str) -> int:
        """Make chunks known whose KV is on disk, as far as what they follow is known; returns how many."""
        adopted = 0
        with self._lock:
            for stored in sorted(chunks, key=lambda one: one.chunk.position_start):
                if stored.chunk.chunk_id in self._pool.entries:
                    continue
                parent = self._pool.parent_of(stored, family)
                if parent is not None:
                    adopted += self._pool.insert_cold(parent, stored.chunk)
            self._pool.prune_roots()
        return adopted

    def take_unsaved(self, limit: int, family: str) -> list[StoredChunk]:
        """Up to `limit` chunks of a family that are to be saved, held until `mark_saved`."""
        taken: list[StoredChunk] = []
        with self._lock:
            while len(taken) < limit and (key := self._saved.take_unsaved()) is not None:
                entry = self._pool.entries[key]
                if self._pool.forest.namespace(entry.root_key).family == family and not entry.is_cold:
                    self._pool.shields.hold(entry)
                    taken.append(self._pool.stored(entry))
        return taken

    def mark_saved(self, chunks: Sequence[StoredChunk], written: Sequence[bool]) -> None:
        """Release chunks that `take_unsaved` gave out, and remember those that are on disk now."""
        with self._lock:
            for stored, is_written in zip(chunks, written, strict=True):
                if is_written:
                    self._saved.note_written(stored.chunk.chunk_id)
                entry = self._pool.entries.get(stored.chunk.chunk_id)
                if entry is not None:
                    self._pool.unhold(entry)

    def take_obsolete(self) -> list[str]:
        """Keys of saved chunks that longer ones have replaced."""
        with self._lock:
            return [key for key in self._saved.take_obsolete() if key not in self._pool.entries]

    def take_used(self) -> list[str]:
        """Keys of saved chunks that were used since this was asked last."""
        with self._lock:
            return self._saved.take_used()

    def lost(self, keys: Iterable[str], reason: str) -> None:
        """Note that chunks are no longer on disk; those that are nowhere else are forgotten."""
        with self._lock:
            for key in keys:
                self._saved.note_gone(key)
                entry = self._pool.entries.get(key)
                if entry is not None:
                    self._pool.lose(entry, reason)

    def warm_up(self, loaded: Mapping[str, StoredKV]) -> None:
        """Keep KV that was loaded from disk, as far as there is room."""
        with self._lock:
            for key, kv in loaded.items():
                entry = self._pool.entries.get(key)
                if entry is not None:
                    self._pool.warm_up(entry, kv)

    @property
    def num_unsaved(self) -> int:
        with self._lock:
            return self._saved.num_unsaved
