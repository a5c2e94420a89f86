"""The chunk store that all threads share: it owns the lock around the pool of chunks.

Every public method takes the lock itself; `with store.lock` makes several calls one step. Nobody waits for a
forward of the model under it. Does not know how KV is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KeptChunk
from kvboost.locks import fork_safe_rlock
from kvboost.store import prefix_tree
from kvboost.store.budget import MemoryTier
from kvboost.store.content_index import FoundRun
from kvboost.store.disk_ledger import DiskLedger
from kvboost.store.entries import StoredChunk, StoreEntry
from kvboost.store.pool import ChunkPool, Room
from kvboost.store.prefix_tree import TreeNode, Walk

_MAX_EMPTY_ROOTS = 1_024  # every salt has a root; those without chunks are dropped beyond this


class ChunkStore:
    """Finds, holds, stores and forgets chunks, from any thread."""

    def __init__(self, budget: MemoryTier) -> None:
        self.lock = fork_safe_rlock(around_data=True)
        self._pool = ChunkPool(budget)
        self.on_disk = DiskLedger(self._pool, self.lock)

    # --- finding ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._pool.entries)

    def entry(self, key: str) -> StoreEntry | None:
        """The chunk with this key, or None."""
        return self._pool.entries.get(key)

    def entries(self) -> dict[str, StoreEntry]:
        """All chunks by key, as they are now."""
        with self.lock:
            return dict(self._pool.entries)

    def nodes(self, namespace_key: str) -> list[TreeNode]:
        """The nodes of a namespace's tree, each after its parent."""
        with self.lock:
            root = self._pool.forest.get(namespace_key)
            return prefix_tree.below(root) if root is not None else []

    def walk(self, raw: bytes, namespace: Namespace) -> Walk | None:
        """How far the text `raw` is known; None where nothing of the namespace is."""
        with self.lock:
            root = self._pool.forest.get(namespace.key)
            return prefix_tree.walk(root, raw) if root is not None else None

    def chunks_of(self, nodes: Sequence[TreeNode]) -> tuple[list[KeptChunk], str]:
        """The chunks of `nodes`, in order, up to one whose KV is lost; and why that one is."""
        with self.lock:
            entries = self._pool.entries
            chunks = [entries[node.key].chunk for node in nodes]
            if self._pool.num_lost:
                for number, node in enumerate(nodes):
                    if lost := entries[node.key].lost:
                        return chunks[:number], lost
            return chunks, ""

    def find_runs(
        self, raw: bytes, namespace: Namespace, start: int, end: int, min_tokens: int
    ) -> list[FoundRun]:
        """Text of the prompt positions `[start, end)` that stands anywhere in the namespace, in order."""
        entries, tainted_key = self._pool.entries, namespace.tainted().key

        def rank(node: TreeNode) -> tuple[bool, int]:
            """Exact donors first, then those that were read behind more text: they transfer better."""
            return entries[node.key].root_key != tainted_key, node.start

        with self.lock:
            index = self._pool.forest.content(namespace.content_key)
            if index is None or end - start < min_tokens:
                return []
            return list(index.find(raw, start, end, min_tokens=min_tokens, rank=rank))

    def why_missing(self, raw: bytes, namespace: Namespace, walk: Walk | None) -> str:
        """Why the tokens after what `walk` found were not found."""
        with self.lock:
            return self._pool.forest.why_missing(raw, namespace, walk, self._pool.evicted)

    # --- readers, uses and pins ---------------------------------------------------------------

    def hold(self, key: str, chunk: KeptChunk | None = None) -> StoreEntry | None:
        """Keep a chunk, and so all before it, from eviction; returns what is held. A root needs no hold.

        With `chunk`, only that one, or one that is exact: then equal text has equal KV.
        """
        with self.lock:
            entry = self._pool.entries.get(key)
            is_other = entry is not None and chunk is not None and entry.chunk is not chunk
            if entry is None or (is_other and self._pool.forest.namespace(entry.root_key).base):
                return None
            self._pool.shields.hold(entry)
            return entry

    def release(self, entry: StoreEntry) -> None:
        """End one hold of `entry`, unless another chunk has its key by now."""
        with self.lock:
            if self._pool.entries.get(entry.node.key) is entry:
                self._pool.unhold(entry)

    def unhold(self, key: str) -> None:
        """End one hold."""
        with self.lock:
            entry = self._pool.entries.get(key)
            if entry is not None:
                self._pool.unhold(entry)

    def hand_on(self, parent: TreeNode, child: TreeNode) -> None:
        """Move a reader from `parent` to its child."""
        with self.lock:
            self._pool.shields.hand_on(parent, child)

    def touch(self, keys: Iterable[str]) -> None:
        """Count one use of each of these chunks."""
        with self.lock:
            self._pool.touch(keys)

    def discount_uses(self, walk: Walk) -> None:
        """Take back uses that say nothing about popularity, now that a text goes on behind `walk`.

        A chat that goes on from where its last turn ended is no second reader of its own chunks, and a
        text that leaves a chunk in the middle brings a chunk of its own for the part they share.
        """
        with self.lock:
            left_inside = () if walk.partial is None else (walk.partial,)
            for node in reversed(left_inside if walk.node.children else walk.path):
                self._pool.discount_use(self._pool.entries[node.key])

    def pin(self, key: str, change: int) -> bool:
        """Add a pin to a chunk, or take one away; False where there is none to take."""
        with self.lock:
            entry = self._pool.entries[key]
            if entry.pins + change < 0:
                return False
            self._pool.shields.pin(entry, change)
            return True

    def unpin_all(self) -> None:
        """Take all pins away."""
        with self.lock:
            for entry in self._pool.entries.values():
                if entry.pins:
                    self._pool.shields.pin(entry, -entry.pins)

    # --- storing ------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> TreeNode:
        """The root of a namespace's tree, made where there is none."""
        with self.lock:
            return self._pool.forest.root(namespace)

    def parent_of(self, stored: StoredChunk, family: str) -> TreeNode | None:
        """Where a chunk from a file belongs; None where what it follows is not known, or is another text."""
        with self.lock:
            return self._pool.parent_of(stored, family)

    def begin_storing(self, parent: TreeNode) -> None:
        """Hold the chunk that new ones are to follow, or its root, until `end_storing`."""
        with self.lock:
            self._pool.num_storing += 1
            self.hold(parent.key)

    def end_storing(self, held: TreeNode) -> None:
        """Nothing more is stored behind `held`, which has the reader of `begin_storing` by now."""
        with self.lock:
            self._pool.num_storing -= 1
            self.unhold(held.key)
            if len(self._pool.forest) > _MAX_EMPTY_ROOTS:
                self._pool.prune_roots()

    def fits(self, size_bytes: int, chunks: int = 1) -> bool:
        """Whether so much more can be stored without evicting anything."""
        with self.lock:
            return self._pool.budget.fits(size_bytes, chunks)

    def reserve_or_reason(self, room: Room, replacing: TreeNode | None) -> Room | str:
        """Charge room for a chunk that is about to be made, or say why there is none.

        The chunk `replacing`, which it begins with, goes for it, unless somebody needs that one.
        """
        with self.lock:
            return self._pool.reserve_or_reason(room, replacing)

    def insert(self, room: Room, chunk: KeptChunk) -> TreeNode:
        """Put a chunk into its room; it takes over a reader that holds its parent."""
        with self.lock:
            return self._pool.insert(room, chunk)

    def cancel(self, room: Room) -> None:
        """Give back the room of a chunk that was not made."""
        with self.lock:
            self._pool.cancel(room)

    def clear(self) -> None:
        """Forget everything that nobody holds or pinned."""
        with self.lock:
            self._pool.drop_evictable()
            self._pool.evicted.clear()
            self._pool.prune_roots()

    def hold_all(self, family: str) -> list[StoredChunk]:
        """All chunks of a family but composites, each after its parent. They are held."""
        with self.lock:
            nodes = [node for root in self._pool.forest.roots(family) for node in prefix_tree.below(root)]
            entries = [self._pool.entries[node.key] for node in nodes]
            found = [entry for entry in entries if entry.chunk.composite is None]
            for entry in found:
                self._pool.shields.hold(entry)
            return [self._pool.stored(entry) for entry in found]

    # --- accounts -----------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Sizes at this moment."""
        pool = self._pool
        with self.lock:
            return {
                "chunks": pool.num_chunks_in_ram,
                "chunks_on_disk_only": sum(entry.is_cold for entry in pool.entries.values()),
                "bytes": pool.budget.used_bytes,
                "max_chunks": pool.budget.max_entries,
                "max_bytes": pool.budget.max_bytes,
                "pinned_chunks": pool.shields.num_pinned(),
                "evicted_chunks": pool.num_evicted,
            }

    def check_integrity(self) -> None:
        """Raise AssertionError where tree, entries and budget disagree. For tests."""
        with self.lock:
            self._pool.check_integrity()
