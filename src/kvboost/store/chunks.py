"""The chunks that are known: their place in the tree, their bytes in the books, who needs them.

Joins the prefix tree (which tokens are known) with the RAM tier's books (what fits, who goes).
A chunk that is read or pinned shields itself and all chunks before it from eviction, so what
may go is known at any moment and room is only promised where it can be made. A chunk whose KV is saved
on disk stays in the tree when its tensors go (it is cold then) and takes no room. Not thread-safe by itself,
and it does not know how KV is made.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass

from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KeptChunk, StoredKV
from kvboost.store import prefix_tree
from kvboost.store.budget import MemoryTier
from kvboost.store.content_index import ContentIndex
from kvboost.store.miss_reasons import EvictedChunks, why_missing
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
    def uses(self) -> int:
        """The uses that count for eviction."""
        return self.chunk.access_count - self.discounted

    @property
    def is_cold(self) -> bool:
        """Whether its KV lies on disk only."""
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


class ChunkStore:
    """Entries by key, a tree per namespace, and the books."""

    def __init__(self, max_chunks: int | None, max_cache_bytes: int | None) -> None:
        self.tier = MemoryTier(max_chunks, max_cache_bytes)
        self.roots: dict[str, TreeNode] = {}
        self.namespaces: dict[str, Namespace] = {}
        self.entries: dict[str, StoreEntry] = {}
        self.evicted = EvictedChunks()
        self.contents: dict[str, ContentIndex] = {}  # by the namespace whose prompts may find it
        self.borrowers: dict[str, set[str]] = {}  # by donor: the composites that borrow from it
        self.reserved: set[str] = set()  # keys whose room is charged and whose tensors are being made
        self.saved: set[str] = set()  # keys of chunks that are on disk too
        self.unsaved: OrderedDict[str, None] = OrderedDict()  # keys of those that are not yet, in order
        self.used: dict[str, None] = {}  # saved chunks that were used since somebody asked last
        self.num_lost = 0
        self.obsolete: list[str] = []  # saved chunks that a longer one has replaced
        self.saves = False  # whether there is a disk to save to
        self.num_storing = 0
        self.num_evicted = 0

    def reserve(self, key: str, size: int) -> None:
        """Charge room for a chunk that is about to be made."""
        self.tier.charge(size)
        self.tier.keep(size)
        self.reserved.add(key)

    def cancel(self, key: str, size: int, parent: TreeNode, replaced: StoreEntry | None) -> None:
        """Give back the room of a chunk that was not made; what it was to replace comes back."""
        self.reserved.discard(key)
        self.tier.keep(-size, -1)
        self.tier.refund(size)
        if replaced is not None:
            self._redirect(key, replaced.chunk.chunk_id)
            self._put_back(parent, replaced)
        self._drop_borrowers(key)

    def _put_back(self, parent: TreeNode, entry: StoreEntry) -> None:
        """Take a dropped chunk in again, unless its room is taken by now, or its place is or will be."""
        key = entry.chunk.chunk_id
        taken = key in self.entries or key in self.reserved
        if not taken and self.tier.fits(entry.size_bytes):
            self.tier.charge(entry.size_bytes)
            node = prefix_tree.insert(parent, entry.node.tokens, key, None)
            kept = StoreEntry(
                entry.chunk, node, entry.size_bytes, root_key=entry.root_key, discounted=entry.discounted
            )
            self.entries[key] = kept
            self._register(kept)
            self._count_warm_child(node, 1)
            if key in self.obsolete:
                self.obsolete.remove(key)
                self.saved.add(key)
            self._note_unsaved(kept.chunk)
            self.tier.touch(key, kept.uses)
            self.update_evictable(key)
            if not parent.is_root:
                self.update_evictable(parent.key)
        if key in self.entries:
            self.move_pins(self.entries[key].node, entry.pins)
            return
        self.move_pins(parent, entry.pins)
        if key not in self.reserved:
            self._drop_borrowers(key)

    def insert(self, parent: TreeNode, span: bytes, chunk: KeptChunk, size: int, pins: int) -> TreeNode:
        """Put a chunk into its reserved room; it takes over a reader that holds `parent`."""
        key = chunk.chunk_id
        self.reserved.discard(key)
        self.tier.keep(-size, -1)
        node = prefix_tree.insert(parent, span, key, None)
        root_key = parent.key if parent.is_root else self.entries[parent.key].root_key
        self.entries[key] = StoreEntry(chunk, node, size, root_key=root_key)
        self._register(self.entries[key])
        self._count_warm_child(node, 1)
        self._note_unsaved(chunk)
        self.tier.touch(key, chunk.access_count)
        self.evicted.forget(key)
        self.hand_on(parent, node)
        self.move_pins(node, pins)
        return node

    def root(self, namespace: Namespace) -> TreeNode:
        """The root of a namespace's tree, made where there is none."""
        if namespace.key not in self.roots:
            self.roots[namespace.key] = TreeNode(namespace.key, b"", None)
        self.namespaces[namespace.key] = namespace
        return self.roots[namespace.key]

    def prune_roots(self) -> None:
        """Drop the roots of namespaces that hold nothing."""
        if self.num_storing == 0:  # otherwise an empty root may be about to get a child
            for key in [key for key, root in self.roots.items() if not root.children]:
                del self.roots[key], self.namespaces[key]

    def parent_of(self, stored: StoredChunk, family: str) -> TreeNode | None:
        """Where a chunk from a file belongs; None where the chunk before it is not known."""
        if stored.namespace_key not in self.namespaces:
            # Whose salt it is, the file does not say: to everyone else it was never stored.
            base = stored.content_key if stored.content_key != stored.namespace_key else ""
            unknown_salt = f"\0{stored.content_key}"
            self.root(Namespace(stored.namespace_key, family, unknown_salt, base))
        if stored.chunk.parent_hash == stored.namespace_key:
            return self.roots[stored.namespace_key]
        entry = self.entries.get(stored.chunk.parent_hash)
        return entry.node if entry is not None else None

    def hold(self, key: str) -> StoreEntry | None:
        """Keep a chunk, and so all before it, from eviction; returns what is held. A root needs no hold."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.readers += 1
            self.shield(key, 1)
        return entry

    def release(self, entry: StoreEntry) -> None:
        """End one hold of `entry`, unless another chunk has its key by now."""
        if self.entries.get(entry.chunk.chunk_id) is entry:
            self.unhold(entry.chunk.chunk_id)

    def unhold(self, key: str) -> None:
        """End one hold."""
        if key in self.entries:
            self.entries[key].readers -= 1
            self.shield(key, -1)
            if self.num_lost:
                self._drop_lost()

    def hand_on(self, parent: TreeNode, child: TreeNode) -> None:
        """Move a reader from `parent` to its child; all before the child stay shielded as they are."""
        if not parent.is_root:
            self.entries[parent.key].readers -= 1
        entry = self.entries[child.key]
        entry.readers += 1
        entry.shields += 1
        if entry.shields == 1:
            self._keep(entry, 1)
            self.update_evictable(child.key)

    def shield(self, key: str, change: int) -> None:
        """Book readers and pins on a chunk and on all chunks before it."""
        node: TreeNode | None = self.entries[key].node
        while node is not None and not node.is_root:
            entry = self.entries[node.key]
            before, entry.shields = entry.shields, entry.shields + change
            if (before > 0) != (entry.shields > 0):
                self._keep(entry, 1 if entry.shields else -1)
                self.update_evictable(node.key)
            node = node.parent

    def _keep(self, entry: StoreEntry, sign: int) -> None:
        """Book that the tensors of an entry must stay, or need not any longer."""
        if not entry.is_cold:
            self.tier.keep(sign * entry.size_bytes, sign)

    def touch(self, key: str) -> None:
        """Count one use of a chunk."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.chunk.touch()
            if key in self.saved:
                self.used[key] = None
            if not entry.is_cold:
                self.tier.touch(key, entry.uses)

    def discount_uses(self, walk: prefix_tree.Walk) -> None:
        """Take back uses that say nothing about popularity, now that a text goes on behind `walk`.

        A chat that goes on from where its last turn ended is no second reader of its own chunks, and a
        text that leaves a chunk in the middle brings a chunk of its own for the part they share.
        """
        left_inside = () if walk.partial is None else (walk.partial,)
        for node in reversed(left_inside if walk.node.children else walk.path):
            entry = self.entries[node.key]
            entry.discounted = min(entry.discounted + 1, entry.chunk.access_count)
            if not entry.is_cold:
                self.tier.touch(node.key, entry.uses)

    def update_evictable(self, key: str) -> None:
        """Tell the books whether a chunk may go now."""
        entry = self.entries.get(key)
        if entry is not None:
            self.tier.set_evictable(key, entry.is_evictable)

    def move_pins(self, node: TreeNode, pins: int) -> None:
        """Pin `node` as its predecessor was; a pin on a root is a pin on nothing."""
        if pins and not node.is_root:
            self.entries[node.key].pins += pins
            self.shield(node.key, pins)

    def can_replace(self, tail: TreeNode) -> bool:
        """Whether a longer chunk may take the place of `tail`: nobody reads it, nothing follows it."""
        return not tail.children and self.entries[tail.key].readers == 0

    def make_room(self, size: int, replacing: TreeNode | None) -> bool:
        """Evict until `size` bytes fit, counting `replacing` as gone; False if they cannot."""
        warm = replacing is not None and not self.entries[replacing.key].is_cold
        credit = self.entries[replacing.key].size_bytes if replacing is not None else 0
        slots = 0 if warm else 1
        pinned = warm and replacing is not None and self.entries[replacing.key].shields > 0
        if not self.tier.could_fit(size - credit * pinned, 1 - pinned):
            return False  # not at the expense of what is there
        if replacing is not None:
            self.tier.set_evictable(replacing.key, False)
        while not self.tier.fits(size - credit, slots):
            victim = self.tier.next_victim()
            if victim is None:
                raise AssertionError("the books promised room that is not there")
            self._evict(self.entries[victim])
        return True

    def _evict(self, entry: StoreEntry) -> None:
        """Let the tensors of an entry go; the chunk stays known where it is on disk."""
        node = entry.node
        if node.key in self.saved:
            self.tier.forget(node.key)
            self.tier.refund(entry.size_bytes)
            entry.size_bytes = 0
            entry.chunk.kv = entry.chunk.kv.without_tensors()
            self._count_warm_child(node, -1)
        else:
            self.drop_with_all_behind(node)
            self.evicted.remember(node.key, node.parent.key if node.parent else "", len(node.tokens))
        self.num_evicted += 1

    def warm_up(self, entry: StoreEntry, kv: StoredKV) -> bool:
        """Take the tensors of a cold entry in, where there is room, or other saved ones can make it."""
        if not entry.is_cold or entry.lost or not self.tier.could_fit(kv.nbytes):
            return False
        while not self.tier.fits(kv.nbytes):
            victim = self.tier.next_victim()
            if victim is None or victim not in self.saved:  # it would be gone for good
                return False
            self._evict(self.entries[victim])
        self.tier.charge(kv.nbytes)
        entry.chunk.kv, entry.size_bytes = kv, kv.nbytes
        if entry.shields:
            self._keep(entry, 1)
        self.tier.touch(entry.chunk.chunk_id, entry.uses)
        self._count_warm_child(entry.node, 1)
        self.update_evictable(entry.chunk.chunk_id)
        return True

    def insert_cold(self, parent: TreeNode, span: bytes, chunk: KeptChunk) -> None:
        """Make a chunk known whose KV lies on disk only."""
        node = prefix_tree.insert(parent, span, chunk.chunk_id, None)
        root_key = parent.key if parent.is_root else self.entries[parent.key].root_key
        self.entries[chunk.chunk_id] = StoreEntry(chunk, node, 0, root_key=root_key)
        self._register(self.entries[chunk.chunk_id])
        self.saved.add(chunk.chunk_id)

    def forget(self, key: str, reason: str) -> None:
        """Drop a chunk whose KV turned out to be lost, with all that follows it.

        While somebody reads it, it only counts as lost and is no longer found.
        """
        entry = self.entries.get(key)
        if entry is None or not entry.is_cold or entry.lost:
            return
        self.saved.discard(key)
        entry.lost = reason
        self.num_lost += 1
        self._drop_lost()

    def _drop_lost(self) -> None:
        """Drop what is lost and nobody reads; pins on it go to the chunk before it."""
        for entry in [entry for entry in self.entries.values() if entry.lost]:
            node, reason = entry.node, entry.lost
            behind = [lower for lower in prefix_tree.below(node) if lower.key in self.entries]
            if node.key not in self.entries or any(self.entries[n.key].readers for n in (node, *behind)):
                continue
            pins = sum(self.entries[n.key].pins for n in (node, *behind))
            parent = node.parent
            self.drop_with_all_behind(node)
            if parent is not None:
                self.evicted.remember(node.key, parent.key, len(node.tokens), reason)
                self.move_pins(parent, pins)

    def drop_with_all_behind(self, node: TreeNode) -> None:
        """Drop a chunk, and what follows it: nothing can be reached past a gap."""
        for lower in reversed(prefix_tree.below(node)):
            if lower.key in self.entries:
                self.drop(lower)
        if node.key in self.entries:
            self.drop(node)

    def _count_warm_child(self, node: TreeNode, change: int) -> None:
        parent = node.parent
        if parent is not None and not parent.is_root:
            self.entries[parent.key].warm_children += change
            self.update_evictable(parent.key)

    def _note_unsaved(self, chunk: KeptChunk) -> None:
        if self.saves and chunk.composite is None and chunk.chunk_id not in self.saved:
            self.unsaved[chunk.chunk_id] = None

    def drop(self, node: TreeNode, successor: str | None = None) -> StoreEntry:
        """Take a chunk out of tree and books, with all composites that borrow from it.

        Where the chunk `successor` begins alike and takes its place, they borrow from that one.
        """
        entry = self.entries[node.key]
        if successor is not None:
            self._redirect(node.key, successor)
        self._drop_borrowers(node.key)
        self._unregister(entry)
        if entry.shields:  # pins: they move along
            self.shield(node.key, -entry.shields)
        if not entry.is_cold:
            self._count_warm_child(node, -1)
            self.tier.refund(entry.size_bytes)
        del self.entries[node.key]
        parent = node.parent
        prefix_tree.remove(node)
        self.tier.forget(node.key)
        self.num_lost -= bool(entry.lost)
        self.used.pop(node.key, None)
        was_saved = node.key in self.saved
        self.saved.discard(node.key)
        self.unsaved.pop(node.key, None)
        if successor is not None and was_saved:
            self.obsolete.append(node.key)
        if parent is not None and not parent.is_root:
            self.update_evictable(parent.key)
        return entry

    def _drop_borrowers(self, donor: str) -> None:
        for borrower in list(self.borrowers.get(donor, ())):
            if borrower in self.entries:
                for lower in reversed(prefix_tree.below(self.entries[borrower].node)):
                    self.drop(lower)
                self.drop(self.entries[borrower].node)

    def _register(self, entry: StoreEntry) -> None:
        """Make an entry findable by content; note what a composite borrows."""
        composite = entry.chunk.composite
        if composite is not None:
            for borrow in composite.borrows:
                self.borrowers.setdefault(borrow.donor, set()).add(entry.chunk.chunk_id)
            return
        content_key = self.namespaces[entry.root_key].content_key
        self.contents.setdefault(content_key, ContentIndex()).add(entry.node)

    def _unregister(self, entry: StoreEntry) -> None:
        composite = entry.chunk.composite
        if composite is not None:
            for borrow in composite.borrows:
                debts = self.borrowers.get(borrow.donor, set())
                debts.discard(entry.chunk.chunk_id)
                if not debts:
                    self.borrowers.pop(borrow.donor, None)
            return
        content_key = self.namespaces[entry.root_key].content_key
        index = self.contents.get(content_key)
        if index is not None:
            index.discard(entry.node)
            if not len(index):
                del self.contents[content_key]

    def _redirect(self, donor: str, successor: str) -> None:
        for borrower in self.borrowers.pop(donor, ()):
            chunk = self.entries[borrower].chunk
            assert chunk.composite is not None
            borrows = tuple(
                dataclasses.replace(borrow, donor=successor) if borrow.donor == donor else borrow
                for borrow in chunk.composite.borrows
            )
            chunk.composite = dataclasses.replace(chunk.composite, borrows=borrows)
            self.borrowers.setdefault(successor, set()).add(borrower)

    def num_pinned(self) -> int:
        """Chunks that a pin keeps: the pinned ones and all before them."""
        kept: set[str] = set()
        for entry in self.entries.values():
            node: TreeNode | None = entry.node if entry.pins else None
            while node is not None and not node.is_root and node.key not in kept:
                kept.add(node.key)
                node = node.parent
        return len(kept)

    def why_missing(self, raw: bytes, namespace: Namespace, walk: prefix_tree.Walk | None) -> str:
        """Why the tokens after what `walk` found were not found."""
        return why_missing(raw, namespace, walk, self.evicted, self.roots, self.namespaces)
