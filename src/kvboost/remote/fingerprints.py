"""Which windows of a text a shared store knows: samples that both sides choose alike, wherever text stands.

Of every `every` windows of 32 tokens in a row, the one with the smallest hash is taken (winnowing: Schleimer,
Wilkerson, Aiken, 2003). So two texts with a common run of `31 + every` tokens have a sample in common, and
no text has to be asked for window by window. Knows token ids, no store.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

from kvboost.store.content_index import WINDOW_TOKENS, window_hashes

_PLACE = struct.Struct("<4s32s32siII")  # and a checksum behind it, as behind the next
_MAGIC = b"KVBW"
_TAIL = struct.Struct("<4s32sI8s")
_TAIL_MAGIC = b"KVBT"
_DIGEST_BYTES = 8
_TAIL_CHECKED = 16  # tokens of a tail that are compared before it is read


def context_tokens(every: int) -> int:
    """How many tokens before a stretch must be known for its samples to be those of the whole text."""
    return WINDOW_TOKENS - 1 + 2 * (every - 1)


def sample(ids: np.ndarray, every: int) -> list[tuple[int, int]]:
    """Position and hash of the sampled windows of `ids` `[tokens]`, in order."""
    if len(ids) < WINDOW_TOKENS:
        return []
    hashes = window_hashes(ids.astype(np.uint32))
    if len(hashes) <= every:
        chosen = np.array([int(hashes.argmin())])
    else:
        lowest = sliding_window_view(hashes, every).argmin(axis=1)
        chosen = np.unique(lowest + np.arange(len(lowest)))
    return list(zip(chosen.tolist(), hashes[chosen].tolist(), strict=True))


def samples_known_with(before: np.ndarray, ids: np.ndarray, every: int) -> list[tuple[int, int]]:
    """Windows of a text that are sampled once `ids` `[tokens]` follow `before` `[n]`, and not earlier.

    Positions are those of a window's first token, counted from the first of `ids`. Some windows end before
    it: that theirs is the smallest hash shows only when those behind them are known.
    """
    known = before[max(0, len(before) - context_tokens(every)) :]
    earlier = {at for at, _ in sample(known, every)}
    found = sample(np.concatenate([known, ids]), every)
    return [(at - len(known), value) for at, value in found if at not in earlier]


def last_sample(before: np.ndarray, every: int) -> list[tuple[int, int]]:
    """The last of the samples that are known before a stretch begins, if any: it leads to what comes next."""
    known = before[max(0, len(before) - context_tokens(every)) :]
    return [(at - len(known), value) for at, value in sample(known, every)[-1:]]


class WindowPlace(NamedTuple):
    """A window begins at token `offset` of the chunk `digest`, below 0 where it begins before it.

    It may end before it, too; then it ends in the chunk `parent`.
    """

    digest: str
    parent: str
    offset: int
    tokens: int  # of the chunk
    parent_tokens: int

    def to_bytes(self) -> bytes:
        pair = bytes.fromhex(self.digest), bytes.fromhex(self.parent)
        return _sealed(_PLACE.pack(_MAGIC, *pair, self.offset, self.tokens, self.parent_tokens))

    @classmethod
    def from_bytes(cls, value: bytes | None) -> WindowPlace | None:
        if (whole := _unsealed(value, _PLACE)) is None:
            return None
        magic, digest, parent, offset, tokens, before = _PLACE.unpack(whole)
        is_one = magic == _MAGIC and -WINDOW_TOKENS - before < offset <= tokens - WINDOW_TOKENS
        return cls(digest.hex(), parent.hex(), offset, tokens, before) if is_one else None


class TailPlace(NamedTuple):
    """What was read last behind a chunk: the chunk `digest` with `tokens` tokens that begin so."""

    digest: str
    tokens: int
    start: bytes

    @classmethod
    def of(cls, digest: str, ids: np.ndarray) -> TailPlace:
        return cls(digest, len(ids), _start_of(ids))

    def may_begin(self, ids: np.ndarray) -> bool:
        """Whether `ids` `[tokens]` begin as the chunk does, as far as can be told."""
        size = min(self.tokens, _TAIL_CHECKED)
        return len(ids) >= size and _start_of(ids[:size]) == self.start

    def to_bytes(self) -> bytes:
        return _sealed(_TAIL.pack(_TAIL_MAGIC, bytes.fromhex(self.digest), self.tokens, self.start))

    @classmethod
    def from_bytes(cls, value: bytes | None) -> TailPlace | None:
        if (whole := _unsealed(value, _TAIL)) is None:
            return None
        magic, digest, tokens, start = _TAIL.unpack(whole)
        return cls(digest.hex(), tokens, start) if magic == _TAIL_MAGIC and tokens else None


def _sealed(value: bytes) -> bytes:
    return value + bytes(xxhash.xxh3_64_digest(value))


def _unsealed(value: bytes | None, form: struct.Struct) -> bytes | None:
    """What was sealed, if it has that form; None where it is damaged. It says how much is to be read."""
    if value is None or len(value) != form.size + _DIGEST_BYTES:
        return None
    return value[: form.size] if _sealed(value[: form.size]) == value else None


def _start_of(ids: np.ndarray) -> bytes:
    return bytes(xxhash.xxh3_64_digest(ids[:_TAIL_CHECKED].astype("<u4").tobytes()))
