"""A chunk as the store keeps it: its node in the tree, its size, and who needs it. Only data."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.kv.codec import KeptChunk
from kvboost.store.prefix_tree import TreeNode


@dataclass
class StoreEntry:
    """A chunk with its node in the tree, its true size, and who needs it."""

    chunk: KeptChunk
    node: TreeNode
    size_bytes: int
    readers: int = 0
    root_key: str = ""
    pins: int = 0
    shields: int = 0  # readers and pins of this chunk and of all that follow it
    discounted: int = 0  # of its uses, those that say nothing about how popular it is
    warm_children: int = 0  # of the chunks that follow it, those with tensors
    lost: str = ""  # why its KV cannot be had any more: it goes when nobody reads it

    @property
    def key(self) -> str:
        return self.node.key

    @property
    def uses(self) -> int:
        """The uses that count for eviction."""
        return self.chunk.access_count - self.discounted

    @property
    def is_cold(self) -> bool:
        """Whether its KV is on disk only."""
        return not self.chunk.kv.is_loaded

    @property
    def is_evictable(self) -> bool:
        return not (self.is_cold or self.warm_children or self.shields)


@dataclass(frozen=True)
class StoredChunk:
    """A chunk, the key of the root that it stands under, and that of the namespace it belongs to."""

    namespace_key: str
    content_key: str
    chunk: KeptChunk
