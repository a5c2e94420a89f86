"""What a chunk store and a store that several machines share tell each other, from any thread.

Chunks of other machines are taken in as if they had been computed here, exact ones behind what they follow;
exact chunks of this one are held while they are written there. Knows no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KeptChunk
from kvboost.models import chained_hash_from_bytes, token_bytes
from kvboost.store.budget import StoredChunk
from kvboost.store.chunks import ChunkStore, Room
from kvboost.store.inserter import ChunkInserter, StoreReport, new_chunk
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode


@dataclass(frozen=True, eq=False)
class HeldChunk:
    """A chunk that is held, its token ids, and the ids that stand right before it."""

    stored: StoredChunk
    ids: np.ndarray  # [tokens], uint32
    before: np.ndarray  # [at most as many as were asked for], uint32
    parent_tokens: int

    @property
    def chunk(self) -> KeptChunk:
        return self.stored.chunk

    @classmethod
    def of(cls, stored: StoredChunk, node: TreeNode, context_tokens: int) -> HeldChunk:
        before, above = b"", node.parent
        while above is not None and len(before) < context_tokens * TOKEN_BYTES:
            before, above = above.tokens + before, above.parent
        parent_tokens = len(node.parent.tokens) // TOKEN_BYTES if node.parent is not None else 0
        known = np.frombuffer(before, dtype="<u4")[-context_tokens:] if before else np.zeros(0, "<u4")
        return cls(stored, np.frombuffer(node.tokens, dtype="<u4"), known, parent_tokens)


class SharedLedger:
    """Takes chunks in, and gives them out, for one chunk store."""

    def __init__(self, store: ChunkStore, inserter: ChunkInserter) -> None:
        self._store = store
        self._inserter = inserter

    def known_chain(self, digests: Sequence[str], namespace: Namespace) -> int:
        """How many of the first chunks of a chain, given by their keys, are here and exact."""
        with self._store.lock:
            for number, digest in enumerate(digests):
                entry = self._store.entries.get(digest)
                if entry is None or entry.lost or entry.root_key != namespace.key:
                    return number
            return len(digests)

    def may_hold(self, size_bytes: int) -> bool:
        """Whether a chunk of that size would fit if nothing else were here."""
        with self._store.lock:
            return self._store.budget.could_ever_fit(size_bytes)

    def take_in(
        self, chunk: KeptChunk, namespace: Namespace, below: str | None = None, *, fetched_ms: float
    ) -> str | None:
        """Store a chunk that another machine computed, and make room for it as for any; returns its key.

        Behind the exact chunk that it follows it is exact. If that is not here, it is found by content only:
        behind the chunk with the key `below`, which was taken in so, or under a root of its own. None where
        there is no room, or its tokens are not those of its key.
        """

        def make(room: Room) -> KeptChunk:
            made = new_chunk(room, chunk.kv, position_offset=chunk.position_start - room.parent.end)
            made.fetched_ms = fetched_ms
            return made

        raw = token_bytes(chunk.token_ids)
        if chained_hash_from_bytes(raw, chunk.parent_hash) != chunk.chunk_id:
            return None
        with self._store.lock:
            entry = self._store.entries.get(chunk.chunk_id)
            if entry is not None:
                return chunk.chunk_id
            parent = self._place_for(chunk, namespace, below)
            if parent is None:
                return None
            self._store.begin_storing(parent)
        node: TreeNode | None = None
        try:
            node = self._inserter.insert(parent, raw, chunk.kv.nbytes, make, StoreReport())
        finally:
            with self._store.lock:
                self._store.end_storing(node or parent)
        return node.key if node is not None else None

    def _place_for(self, chunk: KeptChunk, namespace: Namespace, below: str | None) -> TreeNode | None:
        """What a chunk of another machine is to follow; None where its position cannot be right."""
        above = self._store.entries.get(chunk.parent_hash)
        if chunk.parent_hash == namespace.key:
            parent = self._store.forest.root(namespace)
        elif above is not None and above.root_key == namespace.key and not above.lost:
            parent = above.node
        else:
            near = self._store.entries.get(below) if below is not None else None
            if near is not None and not near.lost and near.chunk.position_end == chunk.position_start:
                return near.node
            return self._store.forest.root(namespace.behind(chunk.parent_hash))
        return parent if parent.end == chunk.position_start else None

    @contextmanager
    def held_exact(self, keys: Mapping[str, Namespace], context_tokens: int) -> Iterator[list[HeldChunk]]:
        """Those of the chunks that are in RAM and exact, each with up to so many tokens before it.

        They are held until the block ends.
        """
        held: list[HeldChunk] = []
        with self._store.lock:
            for key, namespace in keys.items():
                entry = self._store.entries.get(key)
                if entry is None or entry.lost or entry.is_cold or entry.chunk.composite is not None:
                    continue
                if entry.root_key == namespace.key and not namespace.base:
                    self._store.shields.hold(entry)
                    held.append(HeldChunk.of(self._store.stored(entry), entry.node, context_tokens))
        try:
            yield held
        finally:
            with self._store.lock:
                for each in held:
                    self._store.unhold(each.chunk.chunk_id)
