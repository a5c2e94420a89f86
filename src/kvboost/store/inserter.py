"""Putting one chunk after another into a store: room first, then KV, then its place in the tree.

Room is reserved under the store's lock, the chunk is made without it, so nobody waits for a copy and a
refused chunk costs nothing. Knows no prompts and no namespaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvboost.errors import UnstorableKVError
from kvboost.kv.codec import KeptChunk, StoredKV
from kvboost.models import CompositeChunk, chained_hash_from_bytes, content_hash_from_tokens
from kvboost.store import prefix_tree
from kvboost.store.chunks import ChunkStore
from kvboost.store.pool import Room
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode
from kvboost.store.usage import Usage

MakeChunk = Callable[[Room], KeptChunk]


@dataclass
class StoreReport:
    """What became of the chunks of one text."""

    stored: int = 0
    stored_bytes: int = 0
    stored_keys: list[str] = field(default_factory=list)
    present: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    is_refused: bool = False  # as a whole: it must not be stored


class ChunkInserter:
    """Makes chunks and puts them into `store`, from any thread."""

    def __init__(self, store: ChunkStore, usage: Usage) -> None:
        self._store = store
        self._usage = usage

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
                return self._already_there(parent, near, span, report)
            wanted = Room(key or chained_hash_from_bytes(span, parent.key), parent, span, size_bytes)
            is_start = near is not None and common * TOKEN_BYTES == len(near.tokens)
            room = self._store.reserve_or_reason(wanted, near if replaces and is_start else None)
        if isinstance(room, str):
            self.refuse(report, room)
            return None
        return self._fill(room, make, report)

    def _already_there(
        self, parent: TreeNode, near: TreeNode, span: bytes, report: StoreReport
    ) -> TreeNode | None:
        """The span is stored, as a chunk or as the start of a longer one."""
        report.present += 1
        if near.tokens != span:
            return None  # nothing can follow inside a longer chunk
        self._store.hand_on(parent, near)
        return near

    def _fill(self, room: Room, make: MakeChunk, report: StoreReport) -> TreeNode | None:
        """Make the chunk that room is reserved for, and put it there."""
        try:
            chunk = make(room)
            if chunk.kv.nbytes != room.size_bytes:
                raise AssertionError(
                    f"room was made for {room.size_bytes} bytes, the chunk has {chunk.kv.nbytes}"
                )
        except BaseException as error:
            self._store.cancel(room)
            if isinstance(error, UnstorableKVError):
                self.refuse(report, str(error))
                return None
            raise
        node = self._store.insert(room, chunk)
        self._usage.count_stored()
        report.stored += 1
        report.stored_bytes += room.size_bytes
        report.stored_keys.append(room.key)
        return node

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
