"""What is stored, what is found, what is evicted, and why something was not a hit.

Exact matches follow the tree by whole chunks and then into the
next one token by token: KV of a causal prefix stays exact when it is cut. Tokens are compared on
the way, so no hash collision can serve a wrong tensor. All public methods are safe to call from
several threads, and none of them waits for a forward of the model. Knows no model.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvboost.errors import InvalidRequestError, UnstorableKVError
from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.kv.layout import KVLayout, Packed
from kvboost.locks import fork_safe_rlock
from kvboost.models import (
    CachedChunk,
    CompositeChunk,
    TokenIds,
    chained_hash_from_bytes,
    content_hash_from_tokens,
    token_bytes,
)
from kvboost.store import audit, prefix_tree
from kvboost.store.chunks import ChunkStore, StoredChunk, StoreEntry
from kvboost.store.disk_ledger import DiskLedger
from kvboost.store.matching import ChainMatch, ChunkMatch, RunMatch, find_chain, find_runs
from kvboost.store.miss_reasons import divergence_of
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode
from kvboost.store.usage import Usage

ROOT = Namespace(key="", family="", salt="")  # chains without a model, as the public hashes make them
_MAX_EMPTY_ROOTS = 1_024  # every salt has a root; those without chunks are dropped beyond this


@dataclass(frozen=True)
class PrefixMatch:
    """The longest stored exact prefix of a prompt, and why it ends where it ends.

    While `held`, its chunks are not evicted; `KVCacheManager.release` gives them back.
    """

    matches: tuple[ChunkMatch, ...]
    length: int
    miss_reason: str
    held: str | None = None
    divergence: tuple[int, int, int] | None = None  # at, expected token, got token


@dataclass(frozen=True)
class ContentMatch:
    """What is stored of a prompt behind its exact prefix, all of it approximate.

    `chain` reaches from the start of the prompt; `runs` stand anywhere behind it. While `held`, nothing
    of it is evicted; `KVCacheManager.release_content` gives it back.
    """

    chain: ChainMatch = field(default_factory=ChainMatch)
    runs: tuple[RunMatch, ...] = ()
    held: tuple[StoreEntry, ...] = field(default=(), repr=False)


@dataclass
class StoreReport:
    """What became of the chunks of one text."""

    stored: int = 0
    stored_bytes: int = 0
    stored_keys: list[str] = field(default_factory=list)
    present: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    is_refused: bool = False  # as a whole: it must not be stored


class KVCacheManager:
    """The chunk store. `max_chunks=None` and `max_cache_bytes=None` mean no limit."""

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
        self._store = ChunkStore(max_chunks, max_cache_bytes)
        self._usage = Usage()
        self._counts: Counter[str] = Counter()
        self.load: Callable[[Sequence[KeptChunk]], Mapping[str, StoredKV]] | None = None  # from disk
        self._lock = fork_safe_rlock(around_data=True)
        self.on_disk = DiskLedger(self._store, self._lock)

    # --- finding -----------------------------------------------------------------------------

    def match_prefix(
        self, tokens: TokenIds | np.ndarray, namespace: Namespace = ROOT, *, hold: bool = False
    ) -> PrefixMatch:
        """The longest exact prefix of `tokens` that is stored. With `hold` it stays until released."""
        raw = token_bytes(tokens)
        with self._lock:
            root = self._store.roots.get(namespace.key)
            if root is None:
                return PrefixMatch((), 0, self._store.why_missing(raw, namespace, None))
            walk = prefix_tree.walk(root, raw)
            matches = [self._match_of(node, node.end) for node in walk.path]
            if walk.partial is not None:
                matches.append(self._match_of(walk.partial, walk.length))
            if self._store.num_lost and (cut := self._before_lost(matches)) is not None:
                return self._cut_match(cut, hold=hold)
            held = matches[-1].chunk.chunk_id if hold and matches else None
            if held is not None:
                self._store.hold(held)
            reason = (
                "" if walk.length * TOKEN_BYTES == len(raw) else self._store.why_missing(raw, namespace, walk)
            )
            return PrefixMatch(tuple(matches), walk.length, reason, held, divergence_of(raw, walk))

    def _before_lost(self, matches: list[ChunkMatch]) -> tuple[list[ChunkMatch], str] | None:
        """The matches before the first whose KV is lost, and why it is; None where none is."""
        for number, match in enumerate(matches):
            if reason := self._store.entries[match.chunk.chunk_id].lost:
                return matches[:number], reason
        return None

    def _cut_match(self, cut: tuple[list[ChunkMatch], str], *, hold: bool) -> PrefixMatch:
        matches, reason = cut
        held = matches[-1].chunk.chunk_id if hold and matches else None
        if held is not None:
            self._store.hold(held)
        return PrefixMatch(tuple(matches), matches[-1].end if matches else 0, reason, held)

    def release(self, match: PrefixMatch, *, used_tokens: int | None = None) -> None:
        """End the hold of `match`, and count its chunks as used (those within `used_tokens`)."""
        with self._lock:
            for found in reversed(match.matches):
                if used_tokens is None or found.start < used_tokens:
                    self._store.touch(found.chunk.chunk_id)
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
        with self._lock:
            chain = find_chain(self._store, raw, namespace)
            if chain.length - start < self.min_run_tokens:  # not worth making all behind it approximate
                chain = ChainMatch()
            behind = max(start, min(chain.length, end))
            runs = find_runs(self._store, raw, namespace, behind, end, self.min_run_tokens)
            moved = (piece.chunk.chunk_id for run in runs for piece in run)
            keys = dict.fromkeys([*chain.keys, *chain.donors, *moved]) if hold else {}
            held = [entry for key in keys if (entry := self._store.hold(key)) is not None]
            return ContentMatch(chain, tuple(runs), tuple(held))

    def release_content(self, match: ContentMatch, *, used: bool = True) -> None:
        """End the hold of `match`, and count its chunks as used."""
        with self._lock:
            for entry in match.held:
                if used:
                    self._store.touch(entry.chunk.chunk_id)
                self._store.release(entry)

    def find_matching_chunks(self, token_ids: TokenIds, namespace: Namespace = ROOT) -> list[ChunkMatch]:
        """Chunks with text of `token_ids`: its exact prefix first, then what stands anywhere in the store.

        Each match says whether it is approximate.
        """
        with self._lock:
            match = self.match_prefix(token_ids, namespace, hold=True)
            self.release(match)
            raw, total = token_bytes(token_ids), len(token_ids)
            runs = find_runs(self._store, raw, namespace, match.length, total, self.min_run_tokens)
            pieces = [piece for run in runs for piece in run]
            for piece in pieces:
                self._store.touch(piece.chunk.chunk_id)
            return [*match.matches, *pieces]

    def get(self, key: str) -> CachedChunk | None:
        """The chunk stored under a prefix hash, counted as used, or None; from disk where it lies there."""
        with self._lock:
            entry = self._store.entries.get(key)
            if entry is None or entry.lost:
                return None
            self._store.touch(key)
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

    def count_request(
        self,
        *,
        reused: int,
        total: int,
        reason: str,
        approximate: bool = False,
        recomputed: int = 0,
        prefill_seconds: float | None = None,
    ) -> None:
        """Book one request's outcome: `reused` of `total` tokens; why the rest was not, and its cost.

        `approximate` says that not all of it was exact, `recomputed` how much of it was computed again.
        """
        with self._lock:
            self._usage.count(
                reused=reused,
                total=total,
                reason=reason,
                approximate=approximate,
                recomputed=recomputed,
                prefill_seconds=prefill_seconds,
            )

    def most_used(self, count: int) -> list[KeptChunk]:
        """The `count` chunks that were used most, as they are now."""
        with self._lock:
            entries = heapq.nlargest(
                count, self._store.entries.values(), key=lambda entry: entry.chunk.access_count
            )
            return [entry.chunk for entry in entries]

    def count_corrupt(self, chunks: int) -> None:
        """Book chunks that were found damaged."""
        with self._lock:
            self._usage.misses["corrupt"] += chunks

    def count_failure(self, reason: str) -> StoreReport:
        """Book a text that could not be stored."""
        report = StoreReport()
        with self._lock:
            self._refuse(report, reason)
        return report

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
        raw = token_bytes(tokens)
        report = StoreReport()
        with self._lock:
            self._store.num_storing += 1
            walk = prefix_tree.walk(self._store.root(namespace), raw)
            if walk.length * TOKEN_BYTES < len(raw):
                self._store.discount_uses(walk)
            node = self._where_to_store(walk, set(cuts))
            report.present = self._depth(node)
            self._store.hold(node.key)
        try:
            for cut in cuts:
                if cut <= node.end:
                    continue
                span = raw[node.end * TOKEN_BYTES : cut * TOKEN_BYTES]
                size = codec.bytes_for(cut - node.end)
                make = partial(_encoded, codec, extract, node.end, cut)
                child = self._store_span(node, span, size, make, report, text_of, position_offset)
                if child is None and report.refused:
                    break
                if child is not None:  # else the start of a longer chunk; the next cut may go beyond it
                    node = child
        finally:
            self._end_storing(node)
        return report

    def store_chain(
        self,
        tokens: TokenIds | np.ndarray,
        composite: CompositeChunk,
        codec: KVCodec,
        extract: Callable[[np.ndarray], Packed],
        namespace: Namespace = ROOT,
    ) -> StoreReport:
        """Store a prompt that was put together from other chunks, so that its next turn finds it whole.

        Only what `composite` calls its own is kept again; the rest is borrowed, and the chain goes when
        a donor goes. `extract(positions)` makes buffers `[heads, n, head_dim]` for positions `[n]`.
        """
        raw = token_bytes(tokens)
        report = StoreReport()
        with self._lock:
            self._store.num_storing += 1
            walk = prefix_tree.walk(self._store.root(namespace.approximate()), raw)
            parent = walk.node
            rest = CompositeChunk(
                tuple(
                    dataclasses.replace(
                        borrow,
                        start=max(borrow.start, parent.end),
                        offset=borrow.offset + max(0, parent.end - borrow.start),
                    )
                    for borrow in composite.borrows
                    if borrow.end > parent.end
                ),
                composite.own_positions[composite.own_positions >= parent.end],
            )
            self._store.hold(parent.key)
            donors = self._donors_above(parent) | {borrow.donor for borrow in rest.borrows}
            held = [entry for key in donors if (entry := self._store.hold(key)) is not None]
        node: TreeNode | None = None
        try:
            if walk.length * TOKEN_BYTES == len(raw):
                report.present = 1
            elif len(held) == len(donors):
                node = self._store_span(
                    parent,
                    raw[parent.end * TOKEN_BYTES :],
                    codec.bytes_for(len(rest.own_positions)),
                    lambda: codec.encode(extract(rest.own_positions)),
                    report,
                    composite=rest,
                )
            else:
                self._refuse(report, "a donor was evicted")
        finally:
            with self._lock:
                for entry in held:
                    self._store.release(entry)
            self._end_storing(node if node is not None else parent)
        return report

    def _donors_above(self, node: TreeNode) -> set[str]:
        """The chunks that a chain up to `node` borrows from."""
        donors: set[str] = set()
        current: TreeNode | None = node
        while current is not None and not current.is_root:
            composite = self._store.entries[current.key].chunk.composite
            donors |= {borrow.donor for borrow in composite.borrows} if composite is not None else set()
            current = current.parent
        return donors

    def _where_to_store(self, walk: prefix_tree.Walk, cuts: set[int]) -> TreeNode:
        """The last whole node; before it, if it is a tail that a longer chunk will replace."""
        node = walk.node
        is_tail = not node.is_root and not node.children and node.end not in cuts
        return node.parent if is_tail and node.parent is not None else node

    def store(self, chunk: CachedChunk) -> bool:
        """Store a chunk made elsewhere, under its prefix hash. False, with a counted reason, if refused.

        Its parent is `parent_hash`, or the stored chunk that its prefix hash was chained to. One
        whose parent is not stored can only be found by `get`.
        """
        raw = token_bytes(chunk.token_ids)
        if len(raw) == 0 or len(raw) // TOKEN_BYTES != chunk.length:
            raise InvalidRequestError(
                f"a chunk of positions {chunk.position_start}-{chunk.position_end} needs as many "
                f"token ids, at least one; got {len(raw) // TOKEN_BYTES}"
            )
        lengths = {tensor.shape[2] for pair in chunk.past_key_values for tensor in pair}
        if lengths != {chunk.length}:
            raise InvalidRequestError(
                f"a chunk of {chunk.length} tokens needs KV [1, kv_heads, {chunk.length}, head_dim] for "
                f"every layer; got lengths {sorted(lengths)}"
            )
        report = StoreReport()
        with self._lock:
            key = chunk.prefix_hash or chunk.chunk_id
            if key in self._store.entries:
                if self._store.entries[key].node.tokens == raw:
                    return True
                return self._refuse(report, "hash collision")
            parent = self._parent_of(chunk, raw)
            codec = self._codec_under(parent, KVLayout.of(chunk.past_key_values))
            self._store.num_storing += 1
            self._store.hold(parent.key)
        node: TreeNode | None = None
        try:
            node = self._store_span(
                parent,
                raw,
                codec.bytes_for(chunk.length),
                lambda: codec.encode(codec.layout.pack(chunk.past_key_values)),
                report,
                given=chunk,
                key=key,
            )
        finally:
            self._end_storing(node if node is not None else parent)
        return node is not None or report.present > 0

    @contextmanager
    def exported(self, family: str) -> Iterator[list[StoredChunk]]:
        """All chunks of a family, each after its parent, held until the block ends."""
        with self._lock:
            found: list[StoredChunk] = []
            for key, root in self._store.roots.items():
                namespace = self._store.namespaces[key]
                if namespace.family == family:
                    found += [
                        StoredChunk(key, namespace.content_key, self._store.entries[node.key].chunk)
                        for node in prefix_tree.below(root)
                        if self._store.entries[node.key].chunk.composite is None
                    ]
            for stored in found:
                self._store.hold(stored.chunk.chunk_id)
        try:
            yield found
        finally:
            with self._lock:
                for stored in found:
                    self._store.unhold(stored.chunk.chunk_id)

    def restore(self, stored: StoredChunk, family: str) -> bool:
        """Take in a chunk that was exported, with its own tensors; False where there is no room for it.

        Nothing is evicted for it. Its parent must have been restored before it.
        """
        chunk = stored.chunk
        raw = token_bytes(chunk.token_ids)
        with self._lock:
            parent = self._store.parent_of(stored, family)
            if parent is None or chained_hash_from_bytes(raw, parent.key) != chunk.chunk_id:
                return False
            near, common = prefix_tree.best_child(parent, raw)
            if chunk.chunk_id in self._store.entries or (near is not None and common == chunk.length):
                return True
            if not self._store.tier.fits(chunk.kv.nbytes):
                return False
            self._store.hold(parent.key)
            node = self._store_span(
                parent, raw, chunk.kv.nbytes, lambda: chunk.kv, StoreReport(), given=chunk, key=chunk.chunk_id
            )
            self._store.unhold(node.key if node is not None else parent.key)
            return node is not None

    def _store_span(
        self,
        parent: TreeNode,
        span: bytes,
        size: int,
        make: Callable[[], StoredKV],
        report: StoreReport,
        text_of: Callable[[Sequence[int]], str] | None = None,
        position_offset: int = 0,
        given: CachedChunk | None = None,
        composite: CompositeChunk | None = None,
        key: str | None = None,
    ) -> TreeNode | None:
        """Store one chunk of `size` bytes under `parent`, which a reader holds; returns its node, which
        then has that reader instead, or None. `make` is called once there is room for it."""
        tokens = len(span) // TOKEN_BYTES
        with self._lock:
            near, common = prefix_tree.best_child(parent, span)
            if near is not None and common == tokens:
                return self._already_there(parent, near, span, report)
            key = key or chained_hash_from_bytes(span, parent.key)
            if key in self._store.entries or key in self._store.reserved:
                self._refuse(report, "hash collision" if key in self._store.entries else "being stored")
                return None
            tail = near if near is not None and common * TOKEN_BYTES == len(near.tokens) else None
            if tail is not None and (composite is not None or not self._store.can_replace(tail)):
                tail = None
            if not self._store.make_room(size, replacing=tail):
                fits_at_all = self._store.tier.could_ever_fit(size)
                self._refuse(report, "no room" if fits_at_all else "larger than the budget")
                return None
            replaced = self._store.drop(tail, successor=key) if tail is not None else None
            pins = replaced.pins if replaced is not None else 0
            self._store.reserve(key, size)
        try:
            kv = make()
            if kv.nbytes != size:
                raise AssertionError(f"room was made for {size} bytes, the chunk has {kv.nbytes}")
            chunk = _kept_chunk(key, span, parent, kv, position_offset, composite, given)
            if text_of is not None:
                chunk.text = text_of(chunk.token_ids)
        except BaseException as error:
            with self._lock:
                self._store.cancel(key, size, parent, replaced)
                if isinstance(error, UnstorableKVError):
                    self._refuse(report, str(error))
                    return None
            raise
        with self._lock:
            node = self._store.insert(parent, span, chunk, size, pins)
            self._counts["stored_chunks"] += 1
        report.stored += 1
        report.stored_bytes += size
        report.stored_keys.append(key)
        return node

    def _already_there(
        self, parent: TreeNode, near: TreeNode, span: bytes, report: StoreReport
    ) -> TreeNode | None:
        """The span is stored, as a chunk or as the start of a longer one."""
        report.present += 1
        if near.tokens != span:
            return None  # nothing can follow inside a longer chunk
        self._store.hand_on(parent, near)
        return near

    def _codec_under(self, parent: TreeNode, layout: KVLayout) -> KVCodec:
        """How a chunk made elsewhere is kept: as its parent is, where that has the same layout."""
        entry = self._store.entries.get(parent.key)
        above = entry.chunk.kv.codec if entry is not None else None
        return above if above is not None and above.layout == layout else KVCodec(layout)

    def _parent_of(self, chunk: CachedChunk, raw: bytes) -> TreeNode:
        key = chunk.prefix_hash or chunk.chunk_id
        if chunk.parent_hash in self._store.entries:
            return self._store.entries[chunk.parent_hash].node
        if chunk.position_start == 0 and chained_hash_from_bytes(raw) == key:
            return self._store.root(ROOT)
        for entry in self._store.entries.values():
            if entry.node.end == chunk.position_start and chained_hash_from_bytes(raw, entry.node.key) == key:
                return entry.node
        return self._store.root(Namespace(key=f"detached:{key}", family="detached", salt=""))

    # --- room --------------------------------------------------------------------------------

    def has_room(self, tokens: int, bytes_needed: int) -> bool:
        """Whether so much more can be stored without evicting anything."""
        with self._lock:
            return self._store.tier.fits(bytes_needed, -(-tokens // self.chunk_size))

    def clear(self) -> None:
        """Forget everything that nobody holds or pinned; counters stay."""
        with self._lock:
            while (victim := self._store.tier.next_victim()) is not None:
                self._store.drop_with_all_behind(self._store.entries[victim].node)
            self._store.evicted.clear()
            self._store.prune_roots()

    def drop_all(self) -> None:
        """Forget everything that nobody is using, pinned or not."""
        with self._lock:
            for key, entry in self._store.entries.items():
                if entry.pins:
                    self._store.shield(key, -entry.pins)
                    entry.pins = 0
            self.clear()

    def pin(self, tokens: TokenIds | np.ndarray, namespace: Namespace = ROOT) -> int:
        """Keep the stored chunks of `tokens` from eviction; returns how many tokens they hold."""
        return self._change_pins(tokens, namespace, 1)

    def unpin(self, tokens: TokenIds | np.ndarray, namespace: Namespace = ROOT) -> int:
        """Take one pin back from the stored chunks of `tokens`."""
        return self._change_pins(tokens, namespace, -1)

    def _change_pins(self, tokens: TokenIds | np.ndarray, namespace: Namespace, change: int) -> int:
        with self._lock:
            match = self.match_prefix(tokens, namespace)
            for found in reversed(match.matches):
                entry = self._store.entries[found.chunk.chunk_id]
                if change > 0 or entry.pins:  # more of the text may have been stored since it was pinned
                    entry.pins += change
                    self._store.shield(found.chunk.chunk_id, change)
                    break
            return match.length

    # --- small helpers, all under the lock ---------------------------------------------------

    def _end_storing(self, held: TreeNode) -> None:
        with self._lock:
            self._store.num_storing -= 1
            self._store.unhold(held.key)
            if len(self._store.roots) > _MAX_EMPTY_ROOTS:
                self._store.prune_roots()

    def _match_of(self, node: TreeNode, end: int) -> ChunkMatch:
        return ChunkMatch(self._store.entries[node.key].chunk, node.start, end)

    @staticmethod
    def _depth(node: TreeNode) -> int:
        depth, current = 0, node
        while current.parent is not None:
            depth, current = depth + 1, current.parent
        return depth

    def _refuse(self, report: StoreReport, reason: str) -> bool:
        report.refused[reason] += 1
        self._counts[f"refused: {reason}"] += 1
        return False

    # --- accounts ----------------------------------------------------------------------------

    def __len__(self) -> int:
        with self._lock:
            return len(self._store.entries)

    def stats(self) -> dict[str, Any]:
        """Counters and sizes at this moment."""
        with self._lock:
            return {
                "chunks": self._store.tier.used_entries - len(self._store.reserved),
                "chunks_on_disk_only": sum(entry.is_cold for entry in self._store.entries.values()),
                "bytes": self._store.tier.used_bytes,
                "max_chunks": self._store.tier.max_entries,
                "max_bytes": self._store.tier.max_bytes,
                "pinned_chunks": self._store.num_pinned(),
                **self._usage.stats(),
                "stored_chunks": self._counts["stored_chunks"],
                "evicted_chunks": self._store.num_evicted,
                "refused": {
                    name.removeprefix("refused: "): count
                    for name, count in self._counts.items()
                    if name.startswith("refused: ")
                },
            }

    def check_integrity(self) -> None:
        """Raise AssertionError where tree, entries and books disagree. For tests."""
        with self._lock:
            audit.check(self._store)


def _encoded(codec: KVCodec, extract: Callable[[int, int], Packed], start: int, end: int) -> StoredKV:
    return codec.encode(extract(start, end))


def _kept_chunk(
    key: str,
    span: bytes,
    parent: TreeNode,
    kv: StoredKV,
    position_offset: int,
    composite: CompositeChunk | None,
    given: CachedChunk | None,
) -> KeptChunk:
    """The chunk as it is kept; what a `given` one says of itself stays."""
    if isinstance(given, KeptChunk) and given.kv is kv:
        return given
    ids: list[int] = np.frombuffer(span, dtype="<u4").tolist()
    start = parent.end + position_offset
    chunk = KeptChunk(
        kv,
        chunk_id=key,
        text="",
        token_ids=ids,
        position_start=start,
        position_end=start + len(ids),
        prefix_hash=key,
        content_hash=content_hash_from_tokens(ids),
        parent_hash=parent.key,
        recomputed=composite is not None,
        composite=composite,
    )
    if given is not None:
        for name in ("text", "position_start", "position_end", "created_at", "access_count", "recomputed"):
            setattr(chunk, name, getattr(given, name))
    return chunk
