"""Text of a prompt that is stored, but not as its exact prefix: approximate chains and runs.

Looked up behind the exact prefix: first the approximate chain of an earlier request that began alike,
then, in what is left, text that stands anywhere in the store (runs). Tokens are compared in both.
Works on a chunk store whose lock the caller holds; changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KeptChunk, StoredKV
from kvboost.store import prefix_tree
from kvboost.store.chunks import ChunkStore
from kvboost.store.prefix_tree import TreeNode


@dataclass(frozen=True)
class ChunkMatch:
    """Prompt tokens `[start, end)` found in `chunk` from its token number `offset` on."""

    chunk: KeptChunk
    start: int
    end: int
    offset: int = 0
    approximate: bool = False

    @property
    def shift(self) -> int:
        """By how many positions its KV has to be moved."""
        return self.start - (self.chunk.position_start + self.offset)

    def within(self, start: int, end: int) -> ChunkMatch | None:
        """The part of it inside `[start, end)`, or None."""
        first, last = max(self.start, start), min(self.end, end)
        if first >= last:
            return None
        return ChunkMatch(self.chunk, first, last, self.offset + first - self.start, self.approximate)


@dataclass(frozen=True, eq=False)
class Overlay:
    """KV that a chain holds itself: the first n tokens of `kv` stand at `positions` `[n]` of the prompt."""

    positions: np.ndarray
    kv: StoredKV


@dataclass(frozen=True)
class ChainMatch:
    """The approximate chain of an earlier request: the prompt's first `length` tokens."""

    length: int = 0
    pieces: tuple[ChunkMatch, ...] = ()
    overlays: tuple[Overlay, ...] = ()
    keys: tuple[str, ...] = ()  # of the chain's own chunks, in order
    donors: frozenset[str] = frozenset()  # all that they borrow from


RunMatch = tuple[ChunkMatch, ...]  # neighbours with one shift


def find_chain(store: ChunkStore, raw: bytes, namespace: Namespace) -> ChainMatch:
    """The longest approximate chain that the prompt `raw` begins with."""
    root = store.roots.get(namespace.approximate().key)
    if root is None:
        return ChainMatch()
    walk = prefix_tree.walk(root, raw)
    nodes = [*walk.path, *([walk.partial] if walk.partial is not None else [])]
    length = walk.length
    pieces: list[ChunkMatch] = []
    overlays: list[Overlay] = []
    for node in nodes:
        chunk = store.entries[node.key].chunk
        assert chunk.composite is not None
        for borrow in chunk.composite.borrows:
            donor = store.entries.get(borrow.donor)
            if donor is None or donor.lost:  # its successor is being stored this very moment
                length = min(length, borrow.start)
                continue
            piece = ChunkMatch(donor.chunk, borrow.start, borrow.end, borrow.offset, approximate=True)
            if (part := piece.within(0, length)) is not None:
                pieces.append(part)
        own = int(np.searchsorted(chunk.composite.own_positions, length))
        if own:
            overlays.append(Overlay(chunk.composite.own_positions[:own], chunk.kv))
    kept = [part for piece in pieces if (part := piece.within(0, length)) is not None]
    donors = frozenset(
        borrow.donor
        for node in nodes
        if (composite := store.entries[node.key].chunk.composite) is not None
        for borrow in composite.borrows
    )
    return ChainMatch(length, tuple(kept), tuple(overlays), tuple(node.key for node in nodes), donors)


def find_runs(
    store: ChunkStore, raw: bytes, namespace: Namespace, start: int, end: int, min_tokens: int
) -> list[RunMatch]:
    """Text of the prompt positions `[start, end)` that is stored anywhere, in order."""
    index = store.contents.get(namespace.content_key)
    if index is None or end - start < min_tokens:
        return []
    tainted_key = namespace.tainted().key

    def rank(node: TreeNode) -> tuple[bool, int]:
        """Exact donors first, then those that were read behind more text: they transfer better."""
        return store.entries[node.key].root_key != tainted_key, node.start

    runs: list[RunMatch] = []
    for found in index.find(raw, start, end, min_tokens=min_tokens, rank=rank):
        run: list[ChunkMatch] = []
        for piece in found.pieces:
            if store.entries[piece.node.key].lost:
                continue
            chunk = store.entries[piece.node.key].chunk
            match = ChunkMatch(chunk, piece.start, piece.end, piece.offset, approximate=True)
            if run and (run[-1].shift, run[-1].end) != (
                match.shift,
                match.start,
            ):  # computed at several places
                runs.append(tuple(run))
                run = []
            run.append(match)
        if run:
            runs.append(tuple(run))
    return runs
