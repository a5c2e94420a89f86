"""The check that tree, entries and budget of a chunk store agree. Tests run it after every scenario."""

from __future__ import annotations

from kvboost.models import token_bytes
from kvboost.store.budget import StoreEntry
from kvboost.store.chunks import ChunkStore
from kvboost.store.content_index import ContentIndex
from kvboost.store.prefix_tree import TreeNode, below


def check(store: ChunkStore) -> None:
    """Raise AssertionError where something disagrees. The caller has the store's lock."""
    nodes = _check_trees(store)
    _check_content(store)
    _check_borrows(store)
    entries, evictable = store.entries, store.budget.evictable()
    for node in nodes:
        entry = entries[node.key]
        _check_entry(entry, node, evictable=node.key in evictable)
        if entry.is_cold and node.key not in store.saved and not entry.shields:
            raise AssertionError(f"chunk {node.key[:8]} is nowhere")
        children = [entries[child.key] for child in node.children]
        if entry.shields != entry.readers + entry.pins + sum(child.shields for child in children):
            raise AssertionError(f"chunk {node.key[:8]} counts its shields wrongly")
        if entry.warm_children != sum(not child.is_cold for child in children):
            raise AssertionError(f"chunk {node.key[:8]} counts its children wrongly")
    _check_budget(store)


def _check_trees(store: ChunkStore) -> list[TreeNode]:
    """Every entry has its node; returns the nodes."""
    roots = store.forest.roots()
    nodes = [node for root in roots for node in below(root)]
    for node in [*roots, *nodes]:
        if [child.tokens for child in node.children] != node.child_tokens:
            raise AssertionError("children and their token bytes differ")
        if node.child_tokens != sorted(set(node.child_tokens)):
            raise AssertionError("children are not sorted, or two are the same")
    if {node.key for node in nodes} != set(store.entries) or len(nodes) != len(store.entries):
        raise AssertionError("entries and tree nodes differ")
    return nodes


def _check_entry(entry: StoreEntry, node: TreeNode, *, evictable: bool) -> None:
    if entry.node is not node or token_bytes(entry.chunk.token_ids) != node.tokens:
        raise AssertionError(f"chunk {node.key[:8]} has other tokens than its node")
    if entry.readers < 0 or entry.pins < 0:
        raise AssertionError(f"chunk {node.key[:8]} has a negative count")
    if entry.is_cold and entry.size_bytes:
        raise AssertionError(f"chunk {node.key[:8]} is on disk only and still takes room")
    if entry.is_evictable != evictable:
        raise AssertionError(f"chunk {node.key[:8]} is wrongly evictable or not")


def _check_budget(store: ChunkStore) -> None:
    """The budget counts what the tensors take. While chunks are being made, room is charged for them too."""
    entries, budget, is_storing = store.entries.values(), store.budget, bool(store.reserved)
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for entry in entries
        for part in entry.chunk.kv.tensors
    }
    held = sum(entry.size_bytes for entry in entries)
    warm = sum(not entry.is_cold for entry in entries)
    if not is_storing and (held, warm) != (budget.used_bytes, budget.used_entries):
        raise AssertionError(f"the budget counts {budget.used_bytes} bytes, entries hold {held}")
    if sum(storages.values()) != held:
        raise AssertionError(f"tensors keep {sum(storages.values())} bytes alive, entries say {held}")
    if not budget.fits(0, 0):
        raise AssertionError("the budget is exceeded")
    shielded = [entry.size_bytes for entry in entries if entry.shields and not entry.is_cold]
    if not is_storing and (sum(shielded), len(shielded)) != (budget.kept_bytes, budget.kept_entries):
        raise AssertionError(f"the budget keeps {budget.kept_bytes} bytes, entries say {sum(shielded)}")


def _check_content(store: ChunkStore) -> None:
    """All text but that of composites is found by content."""
    forest = store.forest
    indexed: dict[str, list[TreeNode]] = {}
    for entry in store.entries.values():
        if entry.chunk.composite is None:
            content_key = forest.namespace(entry.root_key).content_key
            indexed.setdefault(content_key, []).append(entry.node)
    for content_key in {*indexed, *forest.content_keys()}:
        index = forest.content(content_key) or ContentIndex()
        index.check_integrity(indexed.get(content_key, []))


def _check_borrows(store: ChunkStore) -> None:
    """What is borrowed exists, or is being made, and has the right tokens."""
    borrowed: dict[str, set[str]] = {}
    for key, entry in store.entries.items():
        for borrow in entry.chunk.composite.borrows if entry.chunk.composite is not None else ():
            borrowed.setdefault(borrow.donor, set()).add(key)
            donor = store.entries.get(borrow.donor)
            if donor is None:
                if borrow.donor not in store.reserved:
                    raise AssertionError(f"chunk {key[:8]} borrows from one that is gone")
                continue
            length = borrow.end - borrow.start
            first = borrow.start - entry.node.start
            lent = token_bytes(donor.chunk.token_ids[borrow.offset : borrow.offset + length])
            if lent != token_bytes(entry.chunk.token_ids[first : first + length]):
                raise AssertionError(f"chunk {key[:8]} borrows other tokens than its own")
    if borrowed != store.borrowers.by_donor():
        raise AssertionError("borrows and borrowers differ")
