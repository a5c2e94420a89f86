"""Putting one chunk after another into a store: room first, then KV, then its place in the tree.

Room is reserved under the store's lock, the chunk is made without it, so nobody waits for a copy and a
refused chunk costs nothing. Knows no prompts and no namespaces.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvboost.errors import InvalidRequestError, UnstorableKVError
from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.kv.layout import KVLayout
from kvboost.models import (
    CachedChunk,
    CompositeChunk,
    chained_hash_from_bytes,
    content_hash_from_tokens,
    token_bytes,
)
from kvboost.store import prefix_tree
from kvboost.store.chunks import ChunkStore, Room
from kvboost.store.forest import ROOT
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode
from kvboost.store.usage import Usage

_log = logging.getLogger(__name__)
MakeChunk = Callable[[Room], KeptChunk]
_OWN_FIELDS = ("text", "position_start", "position_end", "created_at", "access_count", "recomputed")


@dataclass
class StoreReport:
    """What became of the chunks of one text."""

    stored: int = 0
    stored_bytes: int = 0
    stored_keys: list[str] = field(default_factory=list)
    present: int = 0
    evicted: int = 0  # chunks that went for those that were stored
    refused: Counter[str] = field(default_factory=Counter)
    is_refused: bool = False  # as a whole: it must not be stored


class ChunkInserter:
    """Makes chunks and puts them into `store`, from any thread."""

    def __init__(self, store: ChunkStore, usage: Usage) -> None:
        self._store = store
        self._usage = usage
        self._has_told = False  # that the limit on chunks makes some go

    def insert(
        self,
        parent: TreeNode,
        span: bytes,
        size_bytes: int,
        make: MakeChunk,
        report: StoreReport,
        *,
        key: str | None = None,
        replaces: bool = True,
    ) -> TreeNode | None:
        """Store one chunk behind `parent`, which a reader holds; returns its node, which then has that
        reader instead, or None. `make` is called once there is room for it.

        With `replaces` it may take the place of a shorter chunk that it begins with.
        """
        with self._store.lock:
            near, common = prefix_tree.best_child(parent, span)
            if near is not None and common * TOKEN_BYTES == len(span):
                report.present += 1
                if near.tokens != span:
                    return None  # nothing can follow inside a longer chunk
                self._store.shields.hand_on(parent, near)
                return near
            room = Room(key or chained_hash_from_bytes(span, parent.key), parent, span, size_bytes)
            is_start = near is not None and common * TOKEN_BYTES == len(near.tokens)
            evicted = self._store.num_evicted
            no_room = self._store.reserve(room, near if replaces and is_start else None)
            report.evicted += self._store.num_evicted - evicted
            is_news = self._store.is_crowded and not self._has_told
            self._has_told |= is_news
        if is_news:
            self._tell_of_limit()
        if no_room:
            self.refuse(report, no_room)
            return None
        try:
            chunk = make(room)
            if chunk.kv.nbytes != size_bytes:
                raise AssertionError(f"room was made for {size_bytes} bytes, the chunk has {chunk.kv.nbytes}")
        except BaseException as error:
            with self._store.lock:
                self._store.cancel(room)
            if isinstance(error, UnstorableKVError):
                self.refuse(report, str(error))
                return None
            raise
        with self._store.lock:
            node = self._store.insert(room, chunk)
        self._usage.count_stored()
        report.stored += 1
        report.stored_bytes += size_bytes
        report.stored_keys.append(room.key)
        return node

    def _tell_of_limit(self) -> None:
        _log.warning(
            "max_chunks=%s is reached, so the chunks that were used least go for new ones. To keep more, "
            "raise max_chunks, or set max_chunks=None with max_cache_bytes as the limit; "
            'cache_stats()["evicted_chunks"] counts what went. This is said once.',
            self._store.budget.max_entries,
        )

    def refuse(self, report: StoreReport, reason: str) -> None:
        """Note that something was not stored."""
        report.refused[reason] += 1
        self._usage.count_refused(reason)


def new_chunk(
    room: Room,
    kv: StoredKV,
    *,
    position_offset: int = 0,
    composite: CompositeChunk | None = None,
    text_of: Callable[[Sequence[int]], str] | None = None,
) -> KeptChunk:
    """The chunk for `room`, whose text begins at position `position_offset`."""
    ids: list[int] = np.frombuffer(room.span, dtype="<u4").tolist()
    start = room.parent.end + position_offset
    return KeptChunk(
        kv,
        chunk_id=room.key,
        text=text_of(ids) if text_of is not None else "",
        token_ids=ids,
        position_start=start,
        position_end=start + len(ids),
        prefix_hash=room.key,
        content_hash=content_hash_from_tokens(ids),
        parent_hash=room.parent.key,
        recomputed=composite is not None,
        composite=composite,
    )


# --- chunks that were made elsewhere --------------------------------------------------------------


def store_foreign(store: ChunkStore, inserter: ChunkInserter, chunk: CachedChunk) -> bool:
    """Store a chunk that was made elsewhere under its prefix hash; False where it is refused.

    Its tokens and KV are checked, the chunk before it is looked for, and it is kept as that one is.
    """

    def make(room: Room) -> KeptChunk:
        made = new_chunk(room, codec.encode(codec.layout.pack(chunk.past_key_values)))
        for name in _OWN_FIELDS:
            setattr(made, name, getattr(chunk, name))
        return made

    raw = _checked_tokens(chunk)
    key = chunk.prefix_hash or chunk.chunk_id
    report = StoreReport()
    with store.lock:
        entry = store.entries.get(key)
        if entry is not None and entry.node.tokens == raw:
            return True
        if entry is not None:
            inserter.refuse(report, "hash collision")
            return False
        parent = _parent_of(store, chunk, key, raw)
        codec = _codec_under(store, parent, KVLayout.of(chunk.past_key_values))
        store.begin_storing(parent)
    node: TreeNode | None = None
    try:
        node = inserter.insert(parent, raw, codec.bytes_for(chunk.length), make, report, key=key)
    finally:
        with store.lock:
            store.end_storing(node or parent)
    return node is not None or report.present > 0


def _checked_tokens(chunk: CachedChunk) -> bytes:
    """The token bytes of a chunk, which must fit its positions and its KV."""
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
    return raw


def _parent_of(store: ChunkStore, chunk: CachedChunk, key: str, raw: bytes) -> TreeNode:
    """The chunk that its `parent_hash` names or that its key was chained to; else a root of its own."""
    above = store.entries.get(chunk.parent_hash)
    if above is not None:
        return above.node
    if chunk.position_start == 0 and chained_hash_from_bytes(raw) == key:
        return store.forest.root(ROOT)
    for entry in store.entries.values():
        if entry.node.end == chunk.position_start and chained_hash_from_bytes(raw, entry.key) == key:
            return entry.node
    return store.forest.root(Namespace(key=f"detached:{key}", family="detached", salt=""))


def _codec_under(store: ChunkStore, parent: TreeNode, layout: KVLayout) -> KVCodec:
    """As its parent is kept, where that has the same layout."""
    entry = store.entries.get(parent.key)
    above = entry.chunk.kv.codec if entry is not None else None
    return above if above is not None and above.layout == layout else KVCodec(layout)
