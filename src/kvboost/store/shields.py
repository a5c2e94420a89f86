"""Which chunks must stay: a reader or a pin shields a chunk and all chunks before it from eviction.

Tells the budget at once what must stay and what may go, so room is only promised where it can be made.
Works on the entries of a chunk store, under its lock. Knows no namespaces and no disk.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvboost.store.budget import MemoryTier
from kvboost.store.entries import StoreEntry
from kvboost.store.prefix_tree import TreeNode


class Shields:
    """Readers and pins of the chunks in `entries`, told to `budget`."""

    def __init__(self, entries: Mapping[str, StoreEntry], budget: MemoryTier) -> None:
        self._entries = entries
        self._budget = budget

    def hold(self, entry: StoreEntry) -> None:
        """Add a reader."""
        entry.readers += 1
        self._shield(entry, 1)

    def unhold(self, entry: StoreEntry) -> None:
        """Take one reader away."""
        entry.readers -= 1
        self._shield(entry, -1)

    def hand_on(self, parent: TreeNode, child: TreeNode) -> None:
        """Move a reader from `parent` to its child; all before the child stay shielded as they are."""
        if not parent.is_root:
            self._entries[parent.key].readers -= 1
        entry = self._entries[child.key]
        entry.readers += 1
        entry.shields += 1
        if entry.shields == 1:
            self.keep(entry, 1)
            self.update_evictable(child.key)

    def pin(self, entry: StoreEntry, change: int) -> None:
        """Add pins, or take them away where `change` is negative."""
        entry.pins += change
        self._shield(entry, change)

    def move_pins(self, node: TreeNode, pins: int) -> None:
        """Pin `node` as its predecessor was; a pin on a root is a pin on nothing."""
        if pins and not node.is_root:
            self.pin(self._entries[node.key], pins)

    def lift(self, entry: StoreEntry) -> None:
        """Take away all shields of a chunk that goes; the caller moves its pins."""
        if entry.shields:
            self._shield(entry, -entry.shields)

    def _shield(self, entry: StoreEntry, change: int) -> None:
        """Count readers and pins on a chunk and on all chunks before it."""
        node = entry.node
        while (parent := node.parent) is not None:  # up to the root, which has no entry
            entry = self._entries[node.key]
            before, entry.shields = entry.shields, entry.shields + change
            if (before > 0) != (entry.shields > 0):
                self.keep(entry, 1 if entry.shields else -1)
                self.update_evictable(node.key)
            node = parent

    def keep(self, entry: StoreEntry, sign: int) -> None:
        """Count that the tensors of an entry must stay, or need not any longer."""
        if not entry.is_cold:
            self._budget.keep(sign * entry.size_bytes, sign)

    def count_warm_child(self, node: TreeNode, change: int) -> None:
        """Tell the chunk before `node` that `node` got its tensors, or lost them."""
        parent = node.parent
        if parent is not None and not parent.is_root:
            self._entries[parent.key].warm_children += change
            self.update_evictable(parent.key)

    def update_evictable(self, key: str) -> None:
        """Tell the budget whether a chunk may go now."""
        entry = self._entries.get(key)
        if entry is not None:
            self._budget.set_evictable(key, entry.is_evictable)

    def num_pinned(self) -> int:
        """Chunks that a pin keeps: the pinned ones and all before them."""
        kept: set[str] = set()
        for entry in self._entries.values():
            node: TreeNode | None = entry.node if entry.pins else None
            while node is not None and not node.is_root and node.key not in kept:
                kept.add(node.key)
                node = node.parent
        return len(kept)
