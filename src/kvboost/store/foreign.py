"""Storing a chunk that was made elsewhere, as `KVCacheManager.store` takes it.

Its tokens and KV are checked, the chunk before it is looked for, and it is kept as that one is. Knows no
model.
"""

from __future__ import annotations

from kvboost.errors import InvalidRequestError
from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KeptChunk, KVCodec
from kvboost.kv.layout import KVLayout
from kvboost.models import CachedChunk, chained_hash_from_bytes, token_bytes
from kvboost.store.chunks import ChunkStore
from kvboost.store.forest import ROOT
from kvboost.store.inserter import ChunkInserter, StoreReport, new_chunk
from kvboost.store.pool import Room
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode

_OWN_FIELDS = ("text", "position_start", "position_end", "created_at", "access_count", "recomputed")


def store_foreign(store: ChunkStore, inserter: ChunkInserter, chunk: CachedChunk) -> bool:
    """Store `chunk` under its prefix hash; False, with a counted reason, where it is refused."""

    def make(room: Room) -> KeptChunk:
        made = new_chunk(room, codec.encode(codec.layout.pack(chunk.past_key_values)))
        for name in _OWN_FIELDS:
            setattr(made, name, getattr(chunk, name))
        return made

    raw = _checked_tokens(chunk)
    key = chunk.prefix_hash or chunk.chunk_id
    report = StoreReport()
    with store.lock:
        entry = store.entry(key)
        if entry is not None and entry.node.tokens == raw:
            return True
        if entry is not None:
            inserter.refuse(report, "hash collision")
            return False
        parent = _parent_of(store, chunk, key, raw)
        codec = _codec_under(store, parent, KVLayout.of(chunk.past_key_values))
        store.begin_storing(parent)
    node: TreeNode | None = None
    try:
        node = inserter.insert(parent, raw, codec.bytes_for(chunk.length), make, report, key=key)
    finally:
        store.end_storing(node or parent)
    return node is not None or report.present > 0


def _checked_tokens(chunk: CachedChunk) -> bytes:
    """The token bytes of a chunk, which must fit its positions and its KV."""
    raw = token_bytes(chunk.token_ids)
    if len(raw) == 0 or len(raw) // TOKEN_BYTES != chunk.length:
        raise InvalidRequestError(
            f"a chunk of positions {chunk.position_start}-{chunk.position_end} needs as many "
            f"token ids, at least one; got {len(raw) // TOKEN_BYTES}"
        )
    lengths = {tensor.shape[2] for pair in chunk.past_key_values for tensor in pair}
    if lengths != {chunk.length}:
        raise InvalidRequestError(
            f"a chunk of {chunk.length} tokens needs KV [1, kv_heads, {chunk.length}, head_dim] for "
            f"every layer; got lengths {sorted(lengths)}"
        )
    return raw


def _parent_of(store: ChunkStore, chunk: CachedChunk, key: str, raw: bytes) -> TreeNode:
    """The chunk that its `parent_hash` names or that its key was chained to; else a root of its own."""
    above = store.entry(chunk.parent_hash)
    if above is not None:
        return above.node
    if chunk.position_start == 0 and chained_hash_from_bytes(raw) == key:
        return store.root(ROOT)
    for entry in store.entries().values():
        if entry.node.end == chunk.position_start and chained_hash_from_bytes(raw, entry.key) == key:
            return entry.node
    return store.root(Namespace(key=f"detached:{key}", family="detached", salt=""))


def _codec_under(store: ChunkStore, parent: TreeNode, layout: KVLayout) -> KVCodec:
    """As its parent is kept, where that has the same layout."""
    entry = store.entry(parent.key)
    above = entry.chunk.kv.codec if entry is not None else None
    return above if above is not None and above.layout == layout else KVCodec(layout)
