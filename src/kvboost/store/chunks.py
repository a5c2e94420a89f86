"""The chunks that all threads share: put into tree and budget, held, evicted, dropped, lost.

Joins the prefix trees (which tokens are known), the budget (what fits, who goes) and the shields (what must
stay). A chunk whose KV is saved on disk stays in the tree when its tensors go (it is cold then) and takes no
room. Whoever asks or tells it anything holds its `lock`, and nobody waits for a forward of the model under
it. Does not know how KV is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.kv.codec import KeptChunk, StoredKV
from kvboost.locks import fork_safe_rlock
from kvboost.models import chained_hash_from_bytes, token_bytes
from kvboost.store import prefix_tree
from kvboost.store.budget import Borrowers, MemoryTier, SavedKeys, Shields, StoredChunk, StoreEntry
from kvboost.store.forest import Forest
from kvboost.store.prefix_tree import TreeNode, Walk

_MAX_EMPTY_ROOTS = 1_024  # every salt has a root; those without chunks are dropped beyond this


@dataclass(eq=False)
class Room:
    """Room charged for a chunk that is being made, to stand behind `parent` with the tokens `span`."""

    key: str
    parent: TreeNode
    span: bytes
    size_bytes: int
    replaced: StoreEntry | None = None  # the shorter chunk that went for it


class ChunkStore:
    """Chunks by key. Its parts are asked and told directly; only the store adds and drops chunks."""

    def __init__(self, budget: MemoryTier) -> None:
        self.lock = fork_safe_rlock(around_data=True)
        self.budget = budget
        self.forest = Forest()
        self.saved = SavedKeys()
        self._entries: dict[str, StoreEntry] = {}
        self.entries: Mapping[str, StoreEntry] = self._entries  # for all others to read
        self.shields = Shields(self._entries, budget)
        self.borrowers = Borrowers()
        self.reserved: set[str] = set()  # keys whose room is charged and whose tensors are being made
        self._num_lost = 0  # chunks whose KV is lost and that somebody still reads
        self._num_storing = 0  # texts that are being stored
        self.num_evicted = 0
        self.is_crowded = False  # the limit on chunks has made some go

    # --- finding ------------------------------------------------------------------------------

    def chunks_of(self, nodes: Sequence[TreeNode]) -> tuple[list[KeptChunk], str]:
        """The chunks of `nodes`, in order, up to one whose KV is lost; and why that one is."""
        chunks = [self._entries[node.key].chunk for node in nodes]
        if self._num_lost:
            for number, node in enumerate(nodes):
                if lost := self._entries[node.key].lost:
                    return chunks[:number], lost
        return chunks, ""

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

    # --- readers, uses and pins ---------------------------------------------------------------

    def hold(self, key: str, chunk: KeptChunk | None = None) -> StoreEntry | None:
        """Keep a chunk, and so all before it, from eviction; returns what is held. A root needs no hold.

        With `chunk`, only that one, or one that is exact: then equal text has equal KV.
        """
        entry = self._entries.get(key)
        is_other = entry is not None and chunk is not None and entry.chunk is not chunk
        if entry is None or (is_other and self.forest.namespace(entry.root_key).base):
            return None
        self.shields.hold(entry)
        return entry

    def hold_all(self, family: str) -> list[StoredChunk]:
        """All chunks of a family but composites, each after its parent. They are held."""
        nodes = [node for root in self.forest.roots(family) for node in prefix_tree.below(root)]
        found = [entry for node in nodes if (entry := self._entries[node.key]).chunk.composite is None]
        for entry in found:
            self.shields.hold(entry)
        return [self.stored(entry) for entry in found]

    def unhold(self, key: str, entry: StoreEntry | None = None) -> None:
        """End one hold, of `entry` if it is given: another chunk may have its key by now.

        With the last reader goes what is lost.
        """
        held = self._entries.get(key)
        if held is not None and (entry is None or entry is held):
            self.shields.unhold(held)
            if self._num_lost:
                self._drop_lost()

    def touch(self, keys: Iterable[str]) -> None:
        """Count one use of each of these chunks."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.chunk.touch()
                self.saved.note_used(key)
                if not entry.is_cold:
                    self.budget.touch(key, entry.uses)

    def discount_uses(self, walk: Walk) -> None:
        """Take back uses that say nothing about popularity, now that a text goes on behind `walk`.

        A chat that goes on from where its last turn ended is no second reader of its own chunks, and a
        text that leaves a chunk in the middle brings a chunk of its own for the part they share.
        """
        left_inside = () if walk.partial is None else (walk.partial,)
        for node in reversed(left_inside if walk.node.children else walk.path):
            entry = self._entries[node.key]
            entry.discounted = min(entry.discounted + 1, entry.chunk.access_count)
            if not entry.is_cold:
                self.budget.touch(entry.key, entry.uses)

    def pin(self, key: str, change: int) -> bool:
        """Add a pin to a chunk, or take one away; False where there is none to take."""
        entry = self._entries[key]
        if entry.pins + change < 0:
            return False
        self.shields.pin(entry, change)
        return True

    def unpin_all(self) -> None:
        """Take all pins away."""
        for entry in self._entries.values():
            if entry.pins:
                self.shields.pin(entry, -entry.pins)

    # --- adding -------------------------------------------------------------------------------

    def begin_storing(self, parent: TreeNode) -> None:
        """Hold the chunk that new ones are to follow, or its root, until `end_storing`."""
        self._num_storing += 1
        self.hold(parent.key)

    def end_storing(self, held: TreeNode) -> None:
        """Nothing more is stored behind `held`, which has the reader of `begin_storing` by now."""
        self._num_storing -= 1
        self.unhold(held.key)
        if len(self.forest) > _MAX_EMPTY_ROOTS:
            self.prune_roots()

    def prune_roots(self) -> None:
        """Drop the roots of namespaces that hold nothing."""
        if self._num_storing == 0:  # otherwise an empty root may be about to get a child
            self.forest.prune()

    def reserve(self, room: Room, replacing: TreeNode | None) -> str:
        """Charge room for a chunk that is about to be made; returns why there is none, "" where there is.

        The chunk `replacing`, which it begins with, goes for it, unless somebody needs that one.
        """
        if room.key in self._entries:
            return "hash collision"
        if room.key in self.reserved:
            return "being stored"
        if replacing is not None and (replacing.children or self._entries[replacing.key].readers):
            replacing = None
        if not self._make_room(room.size_bytes, replacing):
            return "no room" if self.budget.could_ever_fit(room.size_bytes) else "larger than the budget"
        if replacing is not None:
            room.replaced = self._drop(replacing, successor=room.key)
        self.budget.charge(room.size_bytes)
        self.budget.keep(room.size_bytes)
        self.reserved.add(room.key)
        return ""

    def insert(self, room: Room, chunk: KeptChunk) -> TreeNode:
        """Put a chunk into its room; it takes over a reader that holds its parent."""
        self.reserved.discard(room.key)
        self.budget.keep(-room.size_bytes, -1)
        node = self._add(room.parent, room.span, chunk, room.size_bytes)
        self.forest.evicted.forget(room.key)
        self.shields.hand_on(room.parent, node)
        if room.replaced is not None:
            self.shields.move_pins(node, room.replaced.pins)
        return node

    def cancel(self, room: Room) -> None:
        """Give back the room of a chunk that was not made; what it was to replace comes back."""
        self.reserved.discard(room.key)
        self.budget.keep(-room.size_bytes, -1)
        self.budget.refund(room.size_bytes)
        if room.replaced is not None:
            self.borrowers.redirect(room.key, room.replaced.key)
            self._put_back(room.parent, room.replaced)
        self._drop_borrowers(room.key)

    def _put_back(self, parent: TreeNode, old: StoreEntry) -> None:
        """Take a dropped chunk in again, unless its room is taken by now, or its place is or will be.

        A cold one comes back where the disk has not dropped it yet.
        """
        key = old.key
        taken = key in self._entries or key in self.reserved
        can_stay = key in self.saved.obsolete if old.is_cold else self.budget.fits(old.size_bytes)
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
        if key not in self.reserved:
            self._drop_borrowers(key)

    def insert_cold(self, parent: TreeNode, chunk: KeptChunk) -> bool:
        """Make a chunk known whose KV is on disk only; False where its text is known already."""
        span = token_bytes(chunk.token_ids)
        near, common = prefix_tree.best_child(parent, span)
        is_known = near is not None and common == chunk.length
        if is_known or chunk.chunk_id in self.reserved:
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
            self.borrowers.add(chunk)
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
            self.is_crowded |= self.budget.lacks_entries(0 if is_warm else 1)
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
            self.forest.evicted.remember(node.key, node.parent.key if node.parent else "", len(node.tokens))
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

    def clear(self) -> None:
        """Forget every chunk that nobody holds or pinned, even where it is on disk."""
        while (victim := self.budget.next_victim()) is not None:
            self._drop_with_all_behind(self._entries[victim].node)
        self.forest.evicted.clear()
        self.prune_roots()

    def lose(self, entry: StoreEntry, reason: str) -> None:
        """Drop a chunk whose KV is on disk no longer, with all that follows it, unless it is in RAM.

        While somebody reads it, it only counts as lost and is no longer found.
        """
        if entry.is_cold and not entry.lost:
            entry.lost = reason
            self._num_lost += 1
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
                self.forest.evicted.remember(node.key, parent.key, len(node.tokens), entry.lost)
                self.shields.move_pins(parent, pins)

    def _drop_with_all_behind(self, node: TreeNode) -> None:
        """Drop a chunk, and what follows it: nothing can be reached past a gap."""
        for each in (*reversed(prefix_tree.below(node)), node):
            if each.key in self._entries:
                self._drop(each)

    def _drop_borrowers(self, donor: str) -> None:
        for borrower in self.borrowers.keys_of(donor):
            if borrower in self._entries:
                self._drop_with_all_behind(self._entries[borrower].node)

    def _drop(self, node: TreeNode, successor: str | None = None) -> StoreEntry:
        """Take a chunk out of tree and budget, with all composites that borrow from it.

        Where the chunk `successor` begins alike and takes its place, they borrow from that one.
        """
        entry = self._entries[node.key]
        if successor is not None:
            self.borrowers.redirect(node.key, successor)
        self._drop_borrowers(node.key)
        if entry.chunk.composite is None:
            self.forest.unindex(node, entry.root_key)
        else:
            self.borrowers.discard(entry.chunk)
        self.shields.lift(entry)
        if not entry.is_cold:
            self.shields.count_warm_child(node, -1)
            self.budget.refund(entry.size_bytes)
        del self._entries[node.key]
        prefix_tree.remove(node)
        self.budget.forget(node.key)
        self._num_lost -= bool(entry.lost)
        self.saved.forget(node.key, replaced=successor is not None)
        if node.parent is not None:
            self.shields.update_evictable(node.parent.key)
        return entry

    # --- accounts -----------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Sizes at this moment."""
        return {
            "chunks": self.budget.used_entries - len(self.reserved),
            "chunks_on_disk_only": sum(entry.is_cold for entry in self._entries.values()),
            "bytes": self.budget.used_bytes,
            "max_chunks": self.budget.max_entries,
            "max_bytes": self.budget.max_bytes,
            "pinned_chunks": self.shields.num_pinned(),
            "evicted_chunks": self.num_evicted,
        }
