"""The check that tree, entries and books of a chunk store agree. Tests run it after every scenario."""

from __future__ import annotations

from kvboost.models import token_bytes
from kvboost.store.chunks import ChunkStore, StoreEntry
from kvboost.store.content_index import ContentIndex
from kvboost.store.prefix_tree import TreeNode, below


def check(store: ChunkStore) -> None:
    """Raise AssertionError where something disagrees."""
    entries, tier = store.entries, store.tier
    pending = bool(store.reserved)  # room is charged for chunks that are being made
    trees = list(store.roots.values())
    nodes = [node for root in trees for node in below(root)]
    for node in [*trees, *nodes]:
        _check_order(node)
    if {node.key for node in nodes} != set(entries) or len(nodes) != len(entries):
        raise AssertionError("entries and tree nodes differ")
    _check_content(store)
    storages: dict[int, int] = {}
    evictable = tier.evictable()
    for node in nodes:
        entry = entries[node.key]
        later = sum(entries[child.key].shields for child in node.children)
        if entry.shields != entry.readers + entry.pins + later:
            raise AssertionError(f"chunk {node.key[:8]} counts its shields wrongly")
        if entry.is_cold and node.key not in store.saved and not entry.shields:
            raise AssertionError(f"chunk {node.key[:8]} is nowhere")
        if entry.warm_children != sum(not entries[child.key].is_cold for child in node.children):
            raise AssertionError(f"chunk {node.key[:8]} counts its children wrongly")
        _check_entry(entry, node, evictable=node.key in evictable)
        for part in entry.chunk.kv.tensors:
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    held = sum(entry.size_bytes for entry in entries.values())
    warm = sum(not entry.is_cold for entry in entries.values())
    if not pending and (held, warm) != (tier.used_bytes, tier.used_entries):
        raise AssertionError(f"books say {tier.used_bytes} bytes, entries hold {held}")
    if sum(storages.values()) != held:
        raise AssertionError(f"tensors keep {sum(storages.values())} bytes alive, entries say {held}")
    if not tier.fits(0, 0):
        raise AssertionError("the budget is exceeded")
    shielded = [entry.size_bytes for entry in entries.values() if entry.shields and not entry.is_cold]
    if not pending and (sum(shielded), len(shielded)) != (tier.kept_bytes, tier.kept_entries):
        raise AssertionError(f"books say {tier.kept_bytes} bytes must stay, entries say {sum(shielded)}")


def _check_content(store: ChunkStore) -> None:
    """What is borrowed exists and has the right tokens, and all other text is found by content."""
    debts: dict[str, set[str]] = {}
    indexed: dict[str, list[TreeNode]] = {}
    for key, entry in store.entries.items():
        composite = entry.chunk.composite
        if composite is None:
            indexed.setdefault(store.namespaces[entry.root_key].content_key, []).append(entry.node)
            continue
        for borrow in composite.borrows:
            debts.setdefault(borrow.donor, set()).add(key)
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
    if debts != store.borrowers:
        raise AssertionError("borrows and borrowers differ")
    for content_key in {*indexed, *store.contents}:
        index = store.contents.get(content_key, ContentIndex())
        index.check_integrity(indexed.get(content_key, []))


def _check_order(node: TreeNode) -> None:
    if [child.tokens for child in node.children] != node.child_tokens:
        raise AssertionError("children and their token bytes differ")
    if node.child_tokens != sorted(set(node.child_tokens)):
        raise AssertionError("children are not sorted, or two are the same")


def _check_entry(entry: StoreEntry, node: TreeNode, *, evictable: bool) -> None:
    if entry.node is not node or token_bytes(entry.chunk.token_ids) != node.tokens:
        raise AssertionError(f"chunk {node.key[:8]} has other tokens than its node")
    if entry.readers < 0 or entry.pins < 0:
        raise AssertionError(f"chunk {node.key[:8]} has a negative count")
    if entry.is_cold and entry.size_bytes:
        raise AssertionError(f"chunk {node.key[:8]} is on disk only and still takes room")
    if entry.is_evictable != evictable:
        raise AssertionError(f"chunk {node.key[:8]} is wrongly evictable or not")
