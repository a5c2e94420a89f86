"""KV tensors whose every number follows from the tokens before it, so that a wrong one shows.

The value at position p, head r is a fingerprint of the tokens up to and including p, plus r. Two
layers with differing head sizes make two slabs. float64 holds the fingerprints exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KVCodec
from kvboost.kv.layout import KVLayout, Packed
from kvboost.models import CachedChunk, PastKVType, chained_hash, content_hash_from_tokens
from kvboost.store.chunking import ChunkRegistry
from kvboost.store.forest import ROOT
from kvboost.store.inserter import StoreReport
from kvboost.store.manager import KVCacheManager
from kvboost.store.matching import ChunkMatch

_HEADS = ((1, 2), (2, 3))  # (kv_heads, head_dim) of each layer
LAYOUT = KVLayout.of(tuple((torch.empty(1, h, 0, d, dtype=torch.float64),) * 2 for h, d in _HEADS))
CODEC = KVCodec(LAYOUT)
TOKEN_SIZE = LAYOUT.bytes_per_token


@lru_cache(maxsize=100_000)
def _fingerprint(prefix: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(prefix).encode(), digest_size=5).digest(), "little") * 16


def past_of(tokens: Sequence[int], start: int, end: int) -> PastKVType:
    """The KV that a model would have for `tokens[start:end]` behind `tokens[:start]`."""
    marks = torch.tensor(
        [_fingerprint(tuple(tokens[: p + 1])) for p in range(start, end)], dtype=torch.float64
    )
    pairs = []
    for layer, (heads, dim) in enumerate(_HEADS):
        offsets = torch.arange(heads, dtype=torch.float64).view(1, heads, 1, 1) + 4 * layer
        keys = (marks.view(1, 1, -1, 1) + offsets).expand(1, heads, end - start, dim).contiguous()
        pairs.append((keys, keys + 2))
    return tuple(pairs)


def extractor(tokens: Sequence[int]) -> Callable[[int, int], Packed]:
    return lambda start, end: LAYOUT.pack(past_of(tokens, start, end))


def store(
    manager: KVCacheManager,
    tokens: Sequence[int],
    namespace: Namespace = ROOT,
    cuts: Sequence[int] | None = None,
) -> StoreReport:
    """Store `tokens` as the engine would, cut at multiples of the manager's chunk size."""
    if cuts is None:
        cuts = ChunkRegistry(manager.chunk_size).cuts(tokens)
    return manager.store_prefix(tokens, cuts, CODEC, extractor(tokens), namespace)


def user_chunk(tokens: Sequence[int], start: int, end: int, parent: str | None = None) -> CachedChunk:
    """A chunk as a caller makes it, with nothing but the public hash functions."""
    ids = list(tokens[start:end])
    key = chained_hash(ids, parent)
    return CachedChunk(
        chunk_id=key,
        text="",
        token_ids=ids,
        past_key_values=past_of(tokens, start, end),
        position_start=start,
        position_end=end,
        prefix_hash=key,
        content_hash=content_hash_from_tokens(ids),
    )


def check_kv(matches: Sequence[ChunkMatch], tokens: Sequence[int]) -> None:
    """Every match must hold exactly the KV of its stretch of `tokens`."""
    for match in matches:
        wanted = past_of(tokens, match.start, match.end)
        first = match.offset
        count = match.end - match.start
        for pair, wanted_pair in zip(match.chunk.past_key_values, wanted, strict=True):
            for tensor, wanted_tensor in zip(pair, wanted_pair, strict=True):
                found = tensor[:, :, first : first + count]
                assert torch.equal(found, wanted_tensor), f"wrong KV for [{match.start}, {match.end})"


def check_cover(matches: Sequence[ChunkMatch], length: int) -> None:
    """Matches must follow each other from 0 to `length` without gaps."""
    position = 0
    for match in matches:
        assert match.start == position < match.end
        position = match.end
    assert position == length
