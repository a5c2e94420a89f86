"""The store's books: what is kept, how much it takes and may, what must stay, who goes next, what is on disk.

Eviction is by frequency, then age: the entry used least goes first, among equals the one used
longest ago. Uses count from the level that eviction has reached, and that rises by one whenever all
that was new at the level before is gone: a use outlasts `_TURNOVERS_PER_USE` such rounds, so an entry
that was popular long ago does not stay for ever. A reader or a pin shields a chunk and all chunks before it
from eviction. A composite chunk borrows KV from donors, and goes when one of them goes, unless a longer chunk
takes the donor's place. Works under the lock of the chunk store. Knows no namespaces and no files.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from kvboost.kv.codec import KeptChunk
from kvboost.models import CompositeChunk
from kvboost.store.prefix_tree import TreeNode

_TURNOVERS_PER_USE = 8  # measured with `kvboost bench eviction`; see docs/log.md


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


class MemoryTier:
    """Byte and entry accounting with an eviction order. Knows entries by name, no tokens and no tensors."""

    def __init__(self, max_entries: int | None, max_bytes: int | None) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.used_entries = 0
        self.kept_bytes = 0  # of what is used: must not be evicted now
        self.kept_entries = 0
        self._level = 0
        self._clock = 0
        self._ranks: dict[str, tuple[int, int]] = {}  # every entry: (level + worth, last use)
        self._evictable: set[str] = set()
        self._heap: list[tuple[int, int, str]] = []  # evictable ones by rank, with outdated leftovers

    def fits(self, size_bytes: int, entries: int = 1) -> bool:
        """Whether that much more fits now, without evicting."""
        return self._is_within(self.used_bytes + size_bytes, self.used_entries + entries)

    def could_fit(self, size_bytes: int, entries: int = 1) -> bool:
        """Whether it would fit if all that may go were evicted."""
        return self._is_within(self.kept_bytes + size_bytes, self.kept_entries + entries)

    def lacks_entries(self, entries: int = 1) -> bool:
        """Whether that many more are too many, whatever their size."""
        return self.max_entries is not None and self.used_entries + entries > self.max_entries

    def could_ever_fit(self, size_bytes: int) -> bool:
        """Whether it would fit into an empty tier."""
        return self._is_within(size_bytes, 1)

    def _is_within(self, size_bytes: int, entries: int) -> bool:
        if self.max_bytes is not None and size_bytes > self.max_bytes:
            return False
        return self.max_entries is None or entries <= self.max_entries

    def charge(self, size_bytes: int, entries: int = 1) -> None:
        """Count bytes as used; they must fit."""
        if not self.fits(size_bytes, entries):
            raise ValueError(f"{size_bytes} bytes do not fit into the budget")
        self.used_bytes += size_bytes
        self.used_entries += entries

    def refund(self, size_bytes: int, entries: int = 1) -> None:
        """Give back what was charged."""
        self.used_bytes -= size_bytes
        self.used_entries -= entries

    def keep(self, size_bytes: int, entries: int = 1) -> None:
        """Count used bytes as such that must stay for now; negative numbers let them go again."""
        self.kept_bytes += size_bytes
        self.kept_entries += entries

    def touch(self, entry: str, uses: int) -> None:
        """Rank `entry`, used `uses` times by now, as used just now."""
        self._clock += 1
        self._ranks[entry] = (self._level + 1 + _TURNOVERS_PER_USE * uses, self._clock)
        if entry in self._evictable:
            self._push(entry)

    def set_evictable(self, entry: str, evictable: bool) -> None:
        """Say whether `entry` may be evicted."""
        if not evictable:
            self._evictable.discard(entry)
        elif entry not in self._evictable:
            self._evictable.add(entry)
            self._push(entry)

    def forget(self, entry: str) -> None:
        """Drop `entry` from the eviction order."""
        self._evictable.discard(entry)
        self._ranks.pop(entry, None)

    def next_victim(self) -> str | None:
        """The evictable entry that goes next, or None. It stays until it is forgotten."""
        while self._heap:
            level, clock, entry = self._heap[0]
            if entry in self._evictable and self._ranks[entry] == (level, clock):
                self._level = max(self._level, level)
                return entry
            heapq.heappop(self._heap)
        return None

    def evictable(self) -> frozenset[str]:
        """The entries that may be evicted now."""
        return frozenset(self._evictable)

    def _push(self, entry: str) -> None:
        heapq.heappush(self._heap, (*self._ranks[entry], entry))
        if len(self._heap) > 4 * len(self._evictable) + 64:
            self._heap = [(*self._ranks[name], name) for name in self._evictable]
            heapq.heapify(self._heap)


class Shields:
    """Readers and pins of the chunks in `entries`.

    Tells `budget` at once what must stay and what may go, so room is only promised where it can be made.
    """

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
                self._budget.set_evictable(node.key, entry.is_evictable)
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


class Borrowers:
    """The composites by donor. A donor may be a key whose chunk is still being made."""

    def __init__(self) -> None:
        self._by_donor: dict[str, dict[str, KeptChunk]] = {}

    def add(self, chunk: KeptChunk) -> None:
        """Note what a chunk borrows, if anything."""
        for donor in donors_of([chunk]):
            self._by_donor.setdefault(donor, {})[chunk.chunk_id] = chunk

    def discard(self, chunk: KeptChunk) -> None:
        """Forget a composite that goes."""
        for donor in donors_of([chunk]):
            borrowers = self._by_donor.get(donor, {})
            borrowers.pop(chunk.chunk_id, None)
            if not borrowers:
                self._by_donor.pop(donor, None)

    def keys_of(self, donor: str) -> list[str]:
        """The composites that borrow from `donor`."""
        return list(self._by_donor.get(donor, ()))

    def redirect(self, donor: str, successor: str) -> None:
        """Let all that borrow from `donor` borrow from `successor`, which begins with the same tokens."""
        for key, chunk in self._by_donor.pop(donor, {}).items():
            assert chunk.composite is not None
            borrows = tuple(
                replace(borrow, donor=successor) if borrow.donor == donor else borrow
                for borrow in chunk.composite.borrows
            )
            chunk.composite = replace(chunk.composite, borrows=borrows)
            self._by_donor.setdefault(successor, {})[key] = chunk

    def by_donor(self) -> Mapping[str, Set[str]]:
        """The keys of all composites by donor."""
        return {donor: set(borrowers) for donor, borrowers in self._by_donor.items()}


def donors_of(chunks: Iterable[KeptChunk]) -> set[str]:
    """The chunks that `chunks` borrow from."""
    return {
        borrow.donor for chunk in chunks if chunk.composite is not None for borrow in chunk.composite.borrows
    }


def part_behind(composite: CompositeChunk, start: int) -> CompositeChunk:
    """The part of a composite from position `start` on."""
    borrows = tuple(
        replace(borrow, start=max(borrow.start, start), offset=borrow.offset + max(0, start - borrow.start))
        for borrow in composite.borrows
        if borrow.end > start
    )
    return CompositeChunk(borrows, composite.own_positions[composite.own_positions >= start])


class SavedKeys:
    """Keys of what is on disk, what is not yet, what was used, and what is of no use there any more."""

    def __init__(self) -> None:
        self.is_on = False  # whether there is a disk to save to
        self.saved: set[str] = set()
        self.unsaved: OrderedDict[str, None] = OrderedDict()  # in the order in which they came
        self.used: dict[str, None] = {}  # of the saved ones, since somebody asked last
        self.obsolete: list[str] = []  # saved ones that a longer chunk has replaced

    def __contains__(self, key: str) -> bool:
        """Whether a chunk is on disk."""
        return key in self.saved

    def note_new(self, key: str) -> None:
        """A chunk is to be saved, unless it is."""
        if self.is_on and key not in self.saved:
            self.unsaved[key] = None

    def note_found(self, key: str) -> None:
        """A chunk was found on disk: it need not be saved."""
        self.saved.add(key)
        self.unsaved.pop(key, None)

    def note_used(self, key: str) -> None:
        """A chunk was used."""
        if key in self.saved:
            self.used[key] = None

    def note_back(self, key: str) -> None:
        """The store has taken a replaced chunk in again."""
        if key in self.obsolete:
            self.obsolete.remove(key)
            self.saved.add(key)

    def forget(self, key: str, *, replaced: bool) -> None:
        """The store has dropped a chunk; where a longer one has replaced it, the disk can drop it too."""
        if replaced and key in self.saved:
            self.obsolete.append(key)
        self.saved.discard(key)
        self.unsaved.pop(key, None)
        self.used.pop(key, None)
