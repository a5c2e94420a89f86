"""What of a prompt is stored: its exact prefix, approximate chains, and runs of text from anywhere.

Exact matches follow the tree by whole chunks and then into the next one token by token: KV of a causal
prefix stays exact when it is cut. Behind the exact prefix, first the approximate chain of an earlier request
that began alike is looked up, then, in what is left, text that stands anywhere in the store (runs). Tokens
are always compared, so no hash collision can serve a wrong tensor. Finding changes nothing but holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KeptChunk, StoredKV
from kvboost.store.budget import StoreEntry, donors_of
from kvboost.store.chunks import ChunkStore
from kvboost.store.forest import divergence_of
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode, Walk


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


def find_prefix(store: ChunkStore, raw: bytes, namespace: Namespace, *, hold: bool) -> PrefixMatch:
    """The longest exact prefix of the prompt `raw`. With `hold` it stays until it is released."""
    with store.lock:
        walk = store.forest.walk(raw, namespace)
        if walk is None:
            return PrefixMatch((), 0, store.forest.why_missing(raw, namespace, None))
        chunks, lost = store.chunks_of(nodes := _nodes_of(walk))
        matches = [
            ChunkMatch(chunk, node.start, node.end) for chunk, node in zip(chunks, nodes, strict=False)
        ]
        if matches and matches[-1].end > walk.length:
            matches[-1] = ChunkMatch(chunks[-1], matches[-1].start, walk.length)
        held = chunks[-1].chunk_id if hold and chunks else None
        if held is not None:
            store.hold(held)
        if lost:
            return PrefixMatch(tuple(matches), matches[-1].end if matches else 0, lost, held)
        is_whole = walk.length * TOKEN_BYTES == len(raw)
        reason = "" if is_whole else store.forest.why_missing(raw, namespace, walk)
        return PrefixMatch(tuple(matches), walk.length, reason, held, divergence_of(raw, walk))


def find_content(
    store: ChunkStore, raw: bytes, namespace: Namespace, start: int, end: int, min_tokens: int, *, hold: bool
) -> ContentMatch:
    """What is stored of the prompt positions `[start, end)`. With `hold` it stays until it is released."""
    with store.lock:
        chain = find_chain(store, raw, namespace)
        if chain.length - start < min_tokens:  # not worth making all behind it approximate
            chain = ChainMatch()
        behind = max(start, min(chain.length, end))
        runs = find_runs(store, raw, namespace, behind, end, min_tokens)
        moved = (piece.chunk.chunk_id for run in runs for piece in run)
        keys = dict.fromkeys([*chain.keys, *chain.donors, *moved]) if hold else {}
        held = [entry for key in keys if (entry := store.hold(key)) is not None]
        return ContentMatch(chain, tuple(runs), tuple(held))


def find_chain(store: ChunkStore, raw: bytes, namespace: Namespace) -> ChainMatch:
    """The longest approximate chain that the prompt `raw` begins with. The caller has the store's lock."""
    walk = store.forest.walk(raw, namespace.approximate())
    if walk is None:
        return ChainMatch()
    chunks, _ = store.chunks_of(_nodes_of(walk))
    length = walk.length
    pieces: list[ChunkMatch] = []
    overlays: list[Overlay] = []
    for chunk in chunks:
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
    keys = tuple(chunk.chunk_id for chunk in chunks)
    return ChainMatch(length, tuple(kept), tuple(overlays), keys, frozenset(donors_of(chunks)))


def find_runs(
    store: ChunkStore, raw: bytes, namespace: Namespace, start: int, end: int, min_tokens: int
) -> list[RunMatch]:
    """Text of the prompt positions `[start, end)` that is stored anywhere, in order.

    The caller has the store's lock.
    """
    tainted_key = namespace.tainted().key

    def rank(node: TreeNode) -> bool:
        """Exact donors first."""
        return store.entries[node.key].root_key != tainted_key

    index = store.forest.content(namespace.content_key)
    if index is None or end - start < min_tokens:
        return []
    runs: list[RunMatch] = []
    for found in index.find(raw, start, end, min_tokens=min_tokens, rank=rank):
        run: list[ChunkMatch] = []
        for piece in found.pieces:
            entry = store.entries.get(piece.node.key)
            if entry is None or entry.lost:
                continue
            match = ChunkMatch(entry.chunk, piece.start, piece.end, piece.offset, approximate=True)
            if run and (run[-1].shift, run[-1].end) != (match.shift, match.start):
                runs.append(tuple(run))  # its chunks were computed at several places
                run = []
            run.append(match)
        if run:
            runs.append(tuple(run))
    return runs


def find_text(
    store: ChunkStore, raw: bytes, namespace: Namespace, before: bytes, min_before: int
) -> RunMatch:
    """The exact stored text that `raw` begins with, as one run that was read behind other text.

    At least `min_before` tokens stand before it, and the text that it belongs to begins with `before`. The
    caller has the store's lock.
    """

    def rank(node: TreeNode) -> bool:
        is_exact = store.entries[node.key].root_key == namespace.key
        return is_exact and (not before or _begins_with(node, before))

    index = store.forest.content(namespace.content_key)
    runs = index.find(raw, 0, len(raw) // TOKEN_BYTES, rank=rank) if index is not None else []
    if not runs or runs[0].start > 0:
        return ()
    first = runs[0].pieces[0]
    if first.node.start + first.offset < max(min_before, len(before) // TOKEN_BYTES) or not rank(first.node):
        return ()
    entries = [store.entries[piece.node.key] for piece in runs[0].pieces]
    found = [
        ChunkMatch(entry.chunk, piece.start, piece.end, piece.offset, approximate=True)
        for entry, piece in zip(entries, runs[0].pieces, strict=True)
    ]
    return tuple(found) if not any(entry.lost for entry in entries) else ()


def _begins_with(node: TreeNode, before: bytes) -> bool:
    """Whether the text that `node` belongs to begins with `before`; reads no more of it."""
    way: list[TreeNode] = []
    above: TreeNode | None = node
    while above is not None:
        way.append(above)
        above = above.parent
    text = b""
    for each in reversed(way):
        if len(text) >= len(before):
            break
        text += each.tokens
    return text.startswith(before)


def _nodes_of(walk: Walk) -> list[TreeNode]:
    """The nodes with tokens of the text, the last one maybe in part."""
    return list(walk.path) if walk.partial is None else [*walk.path, walk.partial]
