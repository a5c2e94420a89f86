"""What of a chunk store is on disk: noted, handed out to be saved, taken over, forgotten.

Works on the store under its lock. Knows no files and no threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kvboost.kv.codec import StoredKV
from kvboost.models import chained_hash_from_bytes, token_bytes
from kvboost.store import prefix_tree
from kvboost.store.chunks import ChunkStore, StoredChunk


class DiskLedger:
    """The books of the disk behind a store. All methods may be called from any thread."""

    def __init__(self, store: ChunkStore, lock: threading.RLock) -> None:
        self._store = store
        self._lock = lock

    def save_from_now_on(self) -> None:
        """Note what is not on disk; `take_unsaved` hands it out."""
        with self._lock:
            self._store.saves = True
            self._store.unsaved = OrderedDict.fromkeys(
                key
                for key, entry in self._store.entries.items()
                if entry.chunk.composite is None and key not in self._store.saved
            )

    def stop_saving(self) -> None:
        """Hand nothing out any more."""
        with self._lock:
            self._store.saves = False
            self._store.unsaved = OrderedDict()

    def note_saved(self, keys: Iterable[str]) -> set[str]:
        """Remember that chunks are on disk; returns the keys of those that are not known at all."""
        with self._lock:
            found = set(keys)
            known = found & self._store.entries.keys()
            self._store.saved |= known
            for key in known & self._store.unsaved.keys():
                del self._store.unsaved[key]
            return found - known

    def adopt(self, chunks: Iterable[StoredChunk], family: str) -> int:
        """Make chunks known whose KV lies on disk, as far as what they follow is known; returns how many."""
        adopted = 0
        with self._lock:
            for stored in sorted(chunks, key=lambda one: one.chunk.position_start):
                chunk, raw = stored.chunk, token_bytes(stored.chunk.token_ids)
                if chunk.chunk_id in self._store.entries:
                    continue
                parent = self._store.parent_of(stored, family)
                if parent is None or chained_hash_from_bytes(raw, parent.key) != chunk.chunk_id:
                    continue
                near, common = prefix_tree.best_child(parent, raw)
                inside = near is not None and common == chunk.length
                if not inside and chunk.chunk_id not in self._store.reserved:
                    self._store.insert_cold(parent, raw, chunk)
                    adopted += 1
            self._store.prune_roots()
        return adopted

    def take_unsaved(self, limit: int, family: str) -> list[StoredChunk]:
        """Up to `limit` chunks of a family that are to be saved, held until `mark_saved`."""
        with self._lock:
            taken: list[StoredChunk] = []
            while self._store.unsaved and len(taken) < limit:
                key, _ = self._store.unsaved.popitem(last=False)
                entry = self._store.entries[key]
                namespace = self._store.namespaces[entry.root_key]
                if namespace.family == family and not entry.is_cold:
                    self._store.hold(key)
                    taken.append(StoredChunk(namespace.key, namespace.content_key, entry.chunk))
            return taken

    def mark_saved(self, chunks: Sequence[StoredChunk], written: Sequence[bool]) -> None:
        """Release chunks that `take_unsaved` gave out, and remember those that are on disk now."""
        with self._lock:
            for stored, is_written in zip(chunks, written, strict=True):
                if is_written:
                    self._store.saved.add(stored.chunk.chunk_id)
                self._store.unhold(stored.chunk.chunk_id)

    def take_obsolete(self) -> list[str]:
        """Keys of saved chunks that longer ones have replaced."""
        with self._lock:
            taken, self._store.obsolete = self._store.obsolete, []
            return [key for key in taken if key not in self._store.entries]

    def take_used(self) -> list[str]:
        """Keys of saved chunks that were used since this was asked last."""
        with self._lock:
            taken, self._store.used = self._store.used, {}
            return list(taken)

    def lost(self, keys: Iterable[str], reason: str) -> None:
        """Note that chunks are no longer on disk; those that are nowhere else are forgotten."""
        with self._lock:
            for key in keys:
                self._store.saved.discard(key)
                self._store.forget(key, reason)

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
            return len(self._store.unsaved)
