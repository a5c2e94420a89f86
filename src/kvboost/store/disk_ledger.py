"""What of a chunk store is on disk: noted, handed out to be saved, taken over, forgotten.

Knows no files and no threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kvboost.kv.codec import StoredKV
from kvboost.store.budget import StoredChunk
from kvboost.store.chunks import ChunkStore


class DiskLedger:
    """What the disk behind a store asks and tells it, from any thread."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._keys = store.saved
        self._lock = store.lock

    def save_from_now_on(self) -> None:
        """Note what is not on disk; `take_unsaved` hands it out."""
        with self._lock:
            self._keys.is_on = True
            self._keys.unsaved = OrderedDict.fromkeys(
                key
                for key, entry in self._store.entries.items()
                if entry.chunk.composite is None and key not in self._keys
            )

    def stop_saving(self) -> None:
        """Hand nothing out any more."""
        with self._lock:
            self._keys.is_on = False
            self._keys.unsaved.clear()

    def note_saved(self, keys: Iterable[str]) -> set[str]:
        """Remember that chunks are on disk; returns the keys of those that are not known at all."""
        with self._lock:
            found = set(keys)
            known = found & self._store.entries.keys()
            for key in known:
                self._keys.note_found(key)
            return found - known

    def adopt(self, chunks: Iterable[StoredChunk], family: str) -> int:
        """Make chunks known whose KV is on disk, as far as what they follow is known; returns how many."""
        adopted = 0
        with self._lock:
            for stored in sorted(chunks, key=lambda one: one.chunk.position_start):
                if stored.chunk.chunk_id in self._store.entries:
                    continue
                parent = self._store.parent_of(stored, family)
                if parent is not None:
                    adopted += self._store.insert_cold(parent, stored.chunk)
            self._store.prune_roots()
        return adopted

    def take_unsaved(self, limit: int, family: str) -> list[StoredChunk]:
        """Up to `limit` chunks of a family that are to be saved, held until `mark_saved`."""
        taken: list[StoredChunk] = []
        with self._lock:
            while len(taken) < limit and self._keys.unsaved:
                key, _ = self._keys.unsaved.popitem(last=False)
                entry = self._store.entries[key]
                if self._store.forest.namespace(entry.root_key).family == family and not entry.is_cold:
                    self._store.shields.hold(entry)
                    taken.append(self._store.stored(entry))
        return taken

    def mark_saved(self, chunks: Sequence[StoredChunk], written: Sequence[bool]) -> None:
        """Release chunks that `take_unsaved` gave out, and remember those that are on disk now.

        One that was noted as new again since it was taken stays so.
        """
        with self._lock:
            for stored, is_written in zip(chunks, written, strict=True):
                if is_written:
                    self._keys.saved.add(stored.chunk.chunk_id)
                self._store.unhold(stored.chunk.chunk_id)

    def take_obsolete(self) -> list[str]:
        """Keys of saved chunks that longer ones have replaced since this was asked last."""
        with self._lock:
            taken, self._keys.obsolete = self._keys.obsolete, []
            return [key for key in taken if key not in self._store.entries]

    def take_used(self) -> list[str]:
        """Keys of saved chunks that were used since this was asked last."""
        with self._lock:
            taken, self._keys.used = self._keys.used, {}
            return list(taken)

    def lost(self, keys: Iterable[str], reason: str) -> None:
        """Note that chunks are no longer on disk; those that are nowhere else are forgotten."""
        with self._lock:
            for key in keys:
                self._keys.saved.discard(key)
                entry = self._store.entries.get(key)
                if entry is not None:
                    self._store.lose(entry, reason)

    def warm_up(self, loaded: Mapping[str, StoredKV]) -> None:
        """Keep KV that was loaded from disk, as far as there is room."""
        with self._lock:
            for key, kv in loaded.items():
                entry = self._store.entries.get(key)
                if entry is not None:
                    self._store.warm_up(entry, kv)

    @property
    def num_unsaved(self) -> int:
        with self._lock:
            return len(self._keys.unsaved)
