"""The chunks themselves: put into tree and budget, evicted, dropped, lost.

Joins the prefix trees (which tokens are known), the budget (what fits, who goes) and the shields (what must
stay). A chunk whose KV is saved on disk stays in the tree when its tensors go (it is cold then) and takes no
room. Not thread-safe: `ChunkStore` holds the lock. Does not know how KV is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvboost.kv.codec import KeptChunk, StoredKV
from kvboost.models import chained_hash_from_bytes, token_bytes
from kvboost.store import audit, prefix_tree
from kvboost.store.budget import MemoryTier
from kvboost.store.composites import Borrowers
from kvboost.store.entries import StoredChunk, StoreEntry
from kvboost.store.forest import Forest
from kvboost.store.miss_reasons import EvictedChunks
from kvboost.store.prefix_tree import TreeNode
from kvboost.store.saved_keys import SavedKeys
from kvboost.store.shields import Shields


@dataclass(eq=False)
class Room:
    """Room charged for a chunk that is being made, to stand behind `parent` with the tokens `span`."""

    key: str
    parent: TreeNode
    span: bytes
    size_bytes: int
    replaced: StoreEntry | None = None  # the shorter chunk that went for it


class ChunkPool:
    """Chunks by key. Its parts are asked and told directly; only the pool adds and drops chunks."""

    def __init__(self, budget: MemoryTier) -> None:
        self.budget = budget
        self.forest = Forest()
        self.saved = SavedKeys()
        self.evicted = EvictedChunks()
        self._entries: dict[str, StoreEntry] = {}
        self.entries: Mapping[str, StoreEntry] = self._entries  # for all others to read
        self.shields = Shields(self._entries, budget)
        self._borrowers = Borrowers()
        self._reserved: set[str] = set()  # keys whose room is charged and whose tensors are being made
        self.num_lost = 0  # chunks whose KV is lost and that somebody still reads
        self.num_storing = 0  # texts that are being stored
        self.num_evicted = 0

    @property
    def num_chunks_in_ram(self) -> int:
        return self.budget.used_entries - len(self._reserved)

    def touch(self, keys: Iterable[str]) -> None:
        """Count one use of each of these chunks."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.chunk.touch()
                self.saved.note_used(key)
                if not entry.is_cold:
                    self.budget.touch(key, entry.uses)

    def discount_use(self, entry: StoreEntry) -> None:
        """Take back one use of a chunk, if it has any left."""
        entry.discounted = min(entry.discounted + 1, entry.chunk.access_count)
        if not entry.is_cold:
            self.budget.touch(entry.key, entry.uses)

    def unhold(self, entry: StoreEntry) -> None:
        """Take one reader of a chunk away; with the last one goes what is lost."""
        self.shields.unhold(entry)
        if self.num_lost:
            self._drop_lost()

    def stored(self, entry: StoreEntry) -> StoredChunk:
        """A chunk with its namespace, as it goes into a file."""
        namespace = self.forest.namespace(entry.root_key)
        return StoredChunk(namespace.key, namespace.content_key, entry.chunk)

    def parent_of(self, stored: StoredChunk, family: str) -> TreeNode | None:
        """Where a chunk from a file belongs; None where what it follows is not known, or is another text."""
        chunk = stored.chunk
        parent: TreeNode | None = self.forest.root_of_file(stored.namespace_key, stored.content_key, family)
        if chunk.parent_hash != stored.namespace_key:
            above = self._entries.get(chunk.parent_hash)
            parent = above.node if above is not None else None
        if parent is None:
            return None
        is_right = chained_hash_from_bytes(token_bytes(chunk.token_ids), parent.key) == chunk.chunk_id
        return parent if is_right else None

    def prune_roots(self) -> None:
        """Drop the roots of namespaces that hold nothing."""
        if self.num_storing == 0:  # otherwise an empty root may be about to get a child
            self.forest.prune()

    # --- adding -------------------------------------------------------------------------------

    def reserve_or_reason(self, room: Room, replacing: TreeNode | None) -> Room | str:
        """Charge room for a chunk that is about to be made, or say why there is none.

        The chunk `replacing`, which it begins with, goes for it, unless somebody needs that one.
        """
        if room.key in self._entries:
            return "hash collision"
        if room.key in self._reserved:
            return "being stored"
        if replacing is not None and (replacing.children or self._entries[replacing.key].readers):
            replacing = None
        if not self._make_room(room.size_bytes, replacing):
            return "no room" if self.budget.could_ever_fit(room.size_bytes) else "larger than the budget"
        if replacing is not None:
            room.replaced = self._drop(replacing, successor=room.key)
        self.budget.charge(room.size_bytes)
        self.budget.keep(room.size_bytes)
        self._reserved.add(room.key)
        return room

    def insert(self, room: Room, chunk: KeptChunk) -> TreeNode:
        """Put a chunk into its room; it takes over a reader that holds its parent."""
        self._reserved.discard(room.key)
        self.budget.keep(-room.size_bytes, -1)
        node = self._add(room.parent, room.span, chunk, room.size_bytes)
        self.evicted.forget(room.key)
        self.shields.hand_on(room.parent, node)
        if room.replaced is not None:
            self.shields.move_pins(node, room.replaced.pins)
        return node

    def cancel(self, room: Room) -> None:
        """Give back the room of a chunk that was not made; what it was to replace comes back."""
        self._reserved.discard(room.key)
        self.budget.keep(-room.size_bytes, -1)
        self.budget.refund(room.size_bytes)
        if room.replaced is not None:
            self._borrowers.redirect(room.key, room.replaced.key)
            self._put_back(room.parent, room.replaced)
        self._drop_borrowers(room.key)

    def _put_back(self, parent: TreeNode, old: StoreEntry) -> None:
        """Take a dropped chunk in again, unless its room is taken by now, or its place is or will be.

        A cold one comes back where the disk has not dropped it yet.
        """
        key = old.key
        taken = key in self._entries or key in self._reserved
        can_stay = self.saved.is_obsolete(key) if old.is_cold else self.budget.fits(old.size_bytes)
        if can_stay and not taken:
            if not old.is_cold:
                self.budget.charge(old.size_bytes)
            self.saved.note_back(key)
            self._add(parent, old.node.tokens, old.chunk, old.size_bytes, old.discounted)
            self.shields.update_evictable(key)
            self.shields.update_evictable(parent.key)
        if key in self._entries:
            self.shields.move_pins(self._entries[key].node, old.pins)
            return
        self.shields.move_pins(parent, old.pins)
        if key not in self._reserved:
            self._drop_borrowers(key)

    def insert_cold(self, parent: TreeNode, chunk: KeptChunk) -> bool:
        """Make a chunk known whose KV is on disk only; False where its text is known already."""
        span = token_bytes(chunk.token_ids)
        near, common = prefix_tree.best_child(parent, span)
        is_known = near is not None and common == chunk.length
        if is_known or chunk.chunk_id in self._reserved:
            return False
        self._add(parent, span, chunk, 0)
        self.saved.note_found(chunk.chunk_id)
        return True

    def _add(
        self, parent: TreeNode, span: bytes, chunk: KeptChunk, size_bytes: int, discounted: int = 0
    ) -> TreeNode:
        """Enter a chunk whose room is charged."""
        node = prefix_tree.insert(parent, span, chunk.chunk_id, None)
        root_key = parent.key if parent.is_root else self._entries[parent.key].root_key
        entry = StoreEntry(chunk, node, size_bytes, root_key=root_key, discounted=discounted)
        self._entries[node.key] = entry
        if chunk.composite is None:
            self.forest.index(node, root_key)
        else:
            self._borrowers.add(chunk)
        if not entry.is_cold:
            self.shields.count_warm_child(node, 1)
            self.budget.touch(node.key, entry.uses)
            if chunk.composite is None:
                self.saved.note_new(node.key)
        return node

    # --- evicting -----------------------------------------------------------------------------

    def _make_room(self, size: int, replacing: TreeNode | None) -> bool:
        """Evict until `size` bytes fit, counting `replacing` as gone; False if they cannot."""
        old = self._entries[replacing.key] if replacing is not None else None
        is_warm = old is not None and not old.is_cold
        credit = old.size_bytes if old is not None else 0
        is_pinned = is_warm and old is not None and old.shields > 0
        if not self.budget.could_fit(size - credit * is_pinned, 1 - is_pinned):
            return False  # not at the expense of what is there
        if old is not None:
            self.budget.set_evictable(old.key, False)
        while not self.budget.fits(size - credit, 0 if is_warm else 1):
            victim = self.budget.next_victim()
            if victim is None:
                raise AssertionError("the budget promised room that is not there")
            self._evict(self._entries[victim])
        return True

    def _evict(self, entry: StoreEntry) -> None:
        """Let the tensors of an entry go; the chunk stays known where it is on disk."""
        node = entry.node
        if node.key in self.saved:
            self.budget.forget(node.key)
            self.budget.refund(entry.size_bytes)
            entry.size_bytes = 0
            entry.chunk.kv = entry.chunk.kv.without_tensors()
            self.shields.count_warm_child(node, -1)
        else:
            self._drop_with_all_behind(node)
            self.evicted.remember(node.key, node.parent.key if node.parent else "", len(node.tokens))
        self.num_evicted += 1

    def warm_up(self, entry: StoreEntry, kv: StoredKV) -> None:
        """Take the tensors of a cold chunk in, where there is room, or other saved ones can make it."""
        if not entry.is_cold or entry.lost or not self.budget.could_fit(kv.nbytes):
            return
        while not self.budget.fits(kv.nbytes):
            victim = self.budget.next_victim()
            if victim is None or victim not in self.saved:  # it would be gone for good
                return
            self._evict(self._entries[victim])
        self.budget.charge(kv.nbytes)
        entry.chunk.kv, entry.size_bytes = kv, kv.nbytes
        if entry.shields:
            self.shields.keep(entry, 1)
        self.budget.touch(entry.key, entry.uses)
        self.shields.count_warm_child(entry.node, 1)
        self.shields.update_evictable(entry.key)

    # --- dropping -----------------------------------------------------------------------------

    def drop_evictable(self) -> None:
        """Drop every chunk that may be evicted, even where it is on disk."""
        while (victim := self.budget.next_victim()) is not None:
            self._drop_with_all_behind(self._entries[victim].node)

    def lose(self, entry: StoreEntry, reason: str) -> None:
        """Drop a chunk whose KV is on disk no longer, with all that follows it, unless it is in RAM.

        While somebody reads it, it only counts as lost and is no longer found.
        """
        if entry.is_cold and not entry.lost:
            entry.lost = reason
            self.num_lost += 1
            self._drop_lost()

    def _drop_lost(self) -> None:
        """Drop what is lost and nobody reads; pins on it go to the chunk before it."""
        for entry in [entry for entry in self._entries.values() if entry.lost]:
            node, parent = entry.node, entry.node.parent
            behind = [self._entries[lower.key] for lower in prefix_tree.below(node)]
            if entry.key not in self._entries or any(each.readers for each in (entry, *behind)):
                continue
            pins = sum(each.pins for each in (entry, *behind))
            self._drop_with_all_behind(node)
            if parent is not None:
                self.evicted.remember(node.key, parent.key, len(node.tokens), entry.lost)
                self.shields.move_pins(parent, pins)

    def _drop_with_all_behind(self, node: TreeNode) -> None:
        """Drop a chunk, and what follows it: nothing can be reached past a gap."""
        for each in (*reversed(prefix_tree.below(node)), node):
            if each.key in self._entries:
                self._drop(each)

    def _drop_borrowers(self, donor: str) -> None:
        for borrower in self._borrowers.keys_of(donor):
            if borrower in self._entries:
                self._drop_with_all_behind(self._entries[borrower].node)

    def _drop(self, node: TreeNode, successor: str | None = None) -> StoreEntry:
        """Take a chunk out of tree and budget, with all composites that borrow from it.

        Where the chunk `successor` begins alike and takes its place, they borrow from that one.
        """
        entry = self._entries[node.key]
        if successor is not None:
            self._borrowers.redirect(node.key, successor)
        self._drop_borrowers(node.key)
        if entry.chunk.composite is None:
            self.forest.unindex(node, entry.root_key)
        else:
            self._borrowers.discard(entry.chunk)
        self.shields.lift(entry)
        if not entry.is_cold:
            self.shields.count_warm_child(node, -1)
            self.budget.refund(entry.size_bytes)
        del self._entries[node.key]
        prefix_tree.remove(node)
        self.budget.forget(node.key)
        self.num_lost -= bool(entry.lost)
        self.saved.forget(node.key, replaced=successor is not None)
        if node.parent is not None:
            self.shields.update_evictable(node.parent.key)
        return entry

    def check_integrity(self) -> None:
        """Raise AssertionError where tree, entries and budget disagree."""
        audit.check(self._entries, self.forest, self.budget, self._borrowers, self.saved, self._reserved)
