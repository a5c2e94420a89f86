"""What is believed of a record that another machine wrote: how much is read for it, and what it must be.

Checksums find accidents, not peers that are broken or mean. What they say about sizes is held against what
chunks of this engine have, before anything is read; what comes must be numbers, under its own key, at a place
that a text can have. Else it is damaged. Knows records and codecs, no store.
"""

from __future__ import annotations

import torch

from kvboost.disk.chunk_tier import OTHER_FORM
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.models import chained_hash_from_bytes, token_bytes
from kvboost.remote import parts

_MOST_TOKENS = 1 << 16  # of a chunk; other machines may cut text otherwise
_MOST_POSITIONS = 1 << 31
_HEADER_ROOM = 1 << 20  # bytes that a record may have beside token ids and tensors
_TOKEN_BYTES = 4
_CHECKED_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def most_bytes(tokens: int, codec: KVCodec) -> int:
    """How large a record of so many tokens can be; 0 where no chunk has so many."""
    if not 0 < tokens <= _MOST_TOKENS:
        return 0
    return codec.bytes_for(tokens) + _TOKEN_BYTES * tokens + _HEADER_ROOM


def chunk_in(joined: parts.Joined, codec: KVCodec, tokens: int) -> KeptChunk | str:
    """The chunk of `tokens` tokens in a record whose checksums are right; the reason where it is none."""
    header, tensors = joined
    if not header.is_chunk_of(codec):
        return OTHER_FORM
    start, parent = header.meta["position_start"], header.meta["parent"]
    is_possible = len(header.token_ids) == tokens and 0 <= start <= _MOST_POSITIONS - tokens
    if not is_possible or not parent.isascii() or not all(map(_is_finite, codec.numbers(tensors, tokens))):
        return parts.CORRUPT
    if chained_hash_from_bytes(token_bytes(header.token_ids), parent) != header.key:
        return parts.CORRUPT
    return header.chunk((), codec).with_kv(StoredKV(codec, codec.settled(tensors), tokens))


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are finite."""
    if tensor.dtype not in _CHECKED_TYPES or not tensor.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
