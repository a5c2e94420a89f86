"""The cache manager: what is stored, what is found, what is evicted, and why something was not a hit.

The face of the store to the rest of the engine. All public methods are safe to call from several threads, and
none of them waits for a forward of the model. Knows no model.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from kvboost.errors import InvalidRequestError
from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.kv.layout import Packed
from kvboost.models import CachedChunk, CompositeChunk, TokenIds, token_bytes
from kvboost.store import audit, matching, prefix_tree
from kvboost.store.budget import MemoryTier, StoredChunk, donors_of, part_behind
from kvboost.store.chunks import ChunkStore, Room
from kvboost.store.disk_ledger import DiskLedger
from kvboost.store.forest import ROOT
from kvboost.store.inserter import ChunkInserter, StoreReport, new_chunk, store_foreign
from kvboost.store.matching import ChunkMatch, ContentMatch, PrefixMatch, RunMatch
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode, Walk
from kvboost.store.shared_ledger import SharedLedger
from kvboost.store.usage import Usage


class KVCacheManager:
    """The chunk store. `max_chunks=None` and `max_cache_bytes=None` mean no limit."""

    budget_type: ClassVar[type[MemoryTier]] = MemoryTier

    def __init__(
        self,
        max_chunks: int | None = 128,
        max_cache_bytes: int | None = None,
        *,
        chunk_size: int = 128,
        min_run_tokens: int = 32,
    ) -> None:
        for name, value in (("max_chunks", max_chunks), ("max_cache_bytes", max_cache_bytes)):
            if value is not None and value < 0:
                raise InvalidRequestError(f"{name} must be None or at least 0, got {value}")
        self.chunk_size = chunk_size
        self.min_run_tokens = min_run_tokens
        self.load: Callable[[Sequence[KeptChunk]], Mapping[str, StoredKV]] | None = None  # from disk
        self._store = ChunkStore(self.budget_type(max_chunks, max_cache_bytes))
        self.on_disk = DiskLedger(self._store)
        self._usage = Usage(self._store.lock)
        self._inserter = ChunkInserter(self._store, self._usage)
        self.shared = SharedLedger(self._store, self._inserter)
        self.count_request = self._usage.count_request  # whoever runs requests and loads chunks tells it
        self.count_corrupt = self._usage.count_corrupt

    # --- finding -----------------------------------------------------------------------------

    def match_prefix(
        self, tokens: TokenIds | np.ndarray, namespace: Namespace = ROOT, *, hold: bool = False
    ) -> PrefixMatch:
        """The longest exact prefix of `tokens` that is stored. With `hold` it stays until released."""
        return matching.find_prefix(self._store, token_bytes(tokens), namespace, hold=hold)

    def release(self, match: PrefixMatch, *, used_tokens: int | None = None) -> None:
        """End the hold of `match`, and count its chunks as used (those within `used_tokens`)."""
        used = [
            found.chunk.chunk_id
            for found in reversed(match.matches)
            if used_tokens is None or found.start < used_tokens
        ]
        with self._store.lock:
            self._store.touch(used)
            if match.held is not None:
                self._store.unhold(match.held)

    def match_content(
        self,
        tokens: TokenIds | np.ndarray,
        namespace: Namespace = ROOT,
        *,
        start: int,
        end: int,
        hold: bool = False,
    ) -> ContentMatch:
        """What is stored of the prompt positions `[start, end)`. With `hold` it stays until released."""
        raw = token_bytes(tokens)
        return matching.find_content(self._store, raw, namespace, start, end, self.min_run_tokens, hold=hold)

    def release_content(self, match: ContentMatch, *, used: bool = True) -> None:
        """End the hold of `match`, and count its chunks as used."""
        with self._store.lock:
            for entry in match.held:
                if used:
                    self._store.touch([entry.key])
                self._store.unhold(entry.key, entry)

    def find_matching_chunks(self, token_ids: TokenIds, namespace: Namespace = ROOT) -> list[ChunkMatch]:
        """Chunks with text of `token_ids`: its exact prefix first, then what stands anywhere in the store.

        Each match says whether it is approximate.
        """
        raw = token_bytes(token_ids)
        with self._store.lock:
            match = self.match_prefix(token_ids, namespace, hold=True)
            self.release(match)
            runs = matching.find_runs(
                self._store, raw, namespace, match.length, len(token_ids), self.min_run_tokens
            )
            pieces = [piece for run in runs for piece in run]
            self._store.touch(piece.chunk.chunk_id for piece in pieces)
            return [*match.matches, *pieces]

    def find_text(
        self,
        tokens: np.ndarray,
        namespace: Namespace,
        behind: np.ndarray,
        *,
        min_before: int,
        used: bool = False,
    ) -> RunMatch:
        """What is held of `tokens` from their first one on, exactly, in one run behind other text.

        Its text begins with `behind`, and at least `min_before` tokens stand before it. With `used` its
        chunks are counted as used.
        """
        with self._store.lock:
            found = matching.find_text(
                self._store, token_bytes(tokens), namespace, token_bytes(behind), min_before
            )
            if used:
                self._store.touch(piece.chunk.chunk_id for piece in reversed(found))
            return found

    def get(self, key: str) -> CachedChunk | None:
        """The chunk stored under a prefix hash, counted as used, or None; from disk where it is there."""
        with self._store.lock:
            entry = self._store.entries.get(key)
            if entry is None or entry.lost:
                return None
            self._store.touch([key])
            chunk = entry.chunk
        kv = self.kv_of(chunk)
        if kv is None:
            return None
        return chunk if chunk.kv is kv else chunk.with_kv(kv)

    def kv_of(self, chunk: KeptChunk) -> StoredKV | None:
        """The KV of a chunk, loaded from disk where it has to be; None where it cannot be had."""
        if chunk.kv.is_loaded:
            return chunk.kv
        loaded = self.load([chunk]) if self.load is not None else {}
        self.on_disk.warm_up(loaded)
        return loaded.get(chunk.chunk_id)

    def most_used(self, count: int) -> list[KeptChunk]:
        """The `count` chunks that were used most, as they are now."""
        with self._store.lock:
            entries = list(self._store.entries.values())
        most = heapq.nlargest(count, entries, key=lambda entry: entry.chunk.access_count)
        return [entry.chunk for entry in most]

    # --- storing -----------------------------------------------------------------------------

    def store_prefix(
        self,
        tokens: TokenIds | np.ndarray,
        cuts: Sequence[int],
        codec: KVCodec,
        extract: Callable[[int, int], Packed],
        namespace: Namespace = ROOT,
        *,
        text_of: Callable[[Sequence[int]], str] | None = None,
        position_offset: int = 0,
    ) -> StoreReport:
        """Store the chunks of `tokens` that are not there yet, cut at `cuts`.

        Their first token stands at position `position_offset`.

        `extract(start, end)` gives buffers or views `[heads, tokens, head_dim]` of a span, which `codec`
        copies. It is called without the lock, after room was made, so a refused chunk costs nothing.
        """

        def make(room: Room) -> KeptChunk:
            start = room.parent.end
            kv = codec.encode(extract(start, start + len(room.span) // TOKEN_BYTES))
            return new_chunk(room, kv, position_offset=position_offset, text_of=text_of)

        raw = token_bytes(tokens)
        report = StoreReport()
        with self._store.lock:
            walk = prefix_tree.walk(self._store.forest.root(namespace), raw)
            if walk.length * TOKEN_BYTES < len(raw):
                self._store.discount_uses(walk)
            node = _where_to_store(walk, set(cuts))
            report.present = len(walk.path) - (node is not walk.node)
            self._store.begin_storing(node)
        try:
            for cut in cuts:
                if cut <= node.end:
                    continue
                span = raw[node.end * TOKEN_BYTES : cut * TOKEN_BYTES]
                size = codec.bytes_for(cut - node.end)
                child = self._inserter.insert(node, span, size, make, report)
                if child is None and report.refused:
                    break
                if child is not None:  # else the start of a longer chunk; the next cut may go beyond it
                    node = child
        finally:
            with self._store.lock:
                self._store.end_storing(node)
        return report

    def store_chain(
        self,
        tokens: TokenIds | np.ndarray,
        composite: CompositeChunk,
        codec: KVCodec,
        extract: Callable[[np.ndarray], Packed],
        namespace: Namespace = ROOT,
        *,
        sources: Mapping[str, KeptChunk] | None = None,
    ) -> StoreReport:
        """Store a prompt that was put together from other chunks, so that its next turn finds it whole.

        Only what `composite` calls its own is kept again; the rest is borrowed, and the chain goes when
        a donor goes. `extract(positions)` makes buffers `[heads, n, head_dim]` for positions `[n]`. `sources`
        are the chunks that the KV came from: one of another request that has a donor's key by now is none.
        """

        def make(room: Room) -> KeptChunk:
            return new_chunk(room, codec.encode(extract(rest.own_positions)), composite=rest)

        raw = token_bytes(tokens)
        report = StoreReport()
        with self._store.lock:
            walk = prefix_tree.walk(self._store.forest.root(namespace.approximate()), raw)
            node = walk.node
            rest = part_behind(composite, node.end)
            self._store.begin_storing(node)
            donors = donors_of(self._store.chunks_of(walk.path)[0])
            donors |= {borrow.donor for borrow in rest.borrows}
            of = sources or {}
            held = [each for key in donors if (each := self._store.hold(key, of.get(key))) is not None]
        try:
            if walk.length * TOKEN_BYTES == len(raw):
                report.present = 1
            elif len(held) == len(donors):
                span = raw[node.end * TOKEN_BYTES :]
                size = codec.bytes_for(len(rest.own_positions))
                node = self._inserter.insert(node, span, size, make, report, replaces=False) or node
            else:
                self._inserter.refuse(report, "a donor was evicted")
        finally:
            with self._store.lock:
                for entry in held:
                    self._store.unhold(entry.key, entry)
                self._store.end_storing(node)
        return report

    def store(self, chunk: CachedChunk) -> bool:
        """Store a chunk made elsewhere, under its prefix hash. False, with a counted reason, if refused.

        Its parent is `parent_hash`, or the stored chunk that its prefix hash was chained to. One
        whose parent is not stored can only be found by `get`.
        """
        return store_foreign(self._store, self._inserter, chunk)

    # --- saving and loading ------------------------------------------------------------------

    @contextmanager
    def exported(self, family: str) -> Iterator[list[StoredChunk]]:
        """All chunks of a family, each after its parent, held until the block ends."""
        with self._store.lock:
            found = self._store.hold_all(family)
        try:
            yield found
        finally:
            with self._store.lock:
                for stored in found:
                    self._store.unhold(stored.chunk.chunk_id)

    def restore(self, stored: StoredChunk, family: str) -> bool:
        """Take in a chunk that was exported, with its own tensors; False where there is no room for it.

        Nothing is evicted for it. Its parent must have been restored before it.
        """
        chunk, size = stored.chunk, stored.chunk.kv.nbytes
        raw = token_bytes(chunk.token_ids)
        with self._store.lock:
            parent = self._store.parent_of(stored, family)
            if parent is None:
                return False
            near, common = prefix_tree.best_child(parent, raw)
            is_there = near is not None and common == chunk.length
            if is_there or chunk.chunk_id in self._store.entries:
                return True
            if not self._store.budget.fits(size):
                return False
            self._store.hold(parent.key)
            node = self._inserter.insert(
                parent, raw, size, lambda _: chunk, StoreReport(), key=chunk.chunk_id
            )
            self._store.unhold((node or parent).key)
            return node is not None

    # --- room --------------------------------------------------------------------------------

    def has_room(self, tokens: int, bytes_needed: int) -> bool:
        """Whether so much more can be stored without evicting anything."""
        with self._store.lock:
            return self._store.budget.fits(bytes_needed, -(-tokens // self.chunk_size))

    def clear(self) -> None:
        """Forget everything that nobody holds or pinned; counters stay."""
        with self._store.lock:
            self._store.clear()

    def drop_all(self) -> None:
        """Forget everything that nobody is using, pinned or not."""
        with self._store.lock:
            self._store.unpin_all()
            self._store.clear()

    def pin(self, tokens: TokenIds | np.ndarray, namespace: Namespace = ROOT) -> int:
        """Keep the stored chunks of `tokens` from eviction; returns how many tokens they hold."""
        return self._change_pins(tokens, namespace, 1)

    def unpin(self, tokens: TokenIds | np.ndarray, namespace: Namespace = ROOT) -> int:
        """Take one pin back from the stored chunks of `tokens`."""
        return self._change_pins(tokens, namespace, -1)

    def _change_pins(self, tokens: TokenIds | np.ndarray, namespace: Namespace, change: int) -> int:
        with self._store.lock:
            match = self.match_prefix(tokens, namespace)
            for found in reversed(match.matches):  # more of the text may have been stored since it was pinned
                if self._store.pin(found.chunk.chunk_id, change):
                    break
            return match.length

    # --- accounts ----------------------------------------------------------------------------

    def count_failure(self, reason: str) -> StoreReport:
        """Count a text that could not be stored."""
        report = StoreReport()
        self._inserter.refuse(report, reason)
        return report

    def __len__(self) -> int:
        return len(self._store.entries)

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """How fast prompts were computed so far; None before the first."""
        return self._usage.prefill_tokens_per_second

    def stats(self) -> dict[str, Any]:
        """Counters and sizes at this moment."""
        with self._store.lock:
            return {**self._store.stats(), **self._usage.stats()}

    def check_integrity(self) -> None:
        """Raise AssertionError where tree, entries and budget disagree. For tests."""
        with self._store.lock:
            audit.check(self._store)


def _where_to_store(walk: Walk, cuts: set[int]) -> TreeNode:
    """The last whole node; before it, if it is a tail that a longer chunk will replace."""
    node = walk.node
    is_tail = not node.is_root and not node.children and node.end not in cuts
    return node.parent if is_tail and node.parent is not None else node
