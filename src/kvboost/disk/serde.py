"""A chunk as bytes, and back: a header that describes it, and its tensors as they are.

A record is `header | padding | payload`. The header has a fixed part (magic, version, sizes, checksums), a
JSON part and the token ids; the payload is the chunk's stored tensors one after the other, quantized ones as
they are. The header holds a checksum of itself and one over key, description, tokens and payload, so that
nothing damaged or misplaced is ever taken for a chunk. docs/disk-format.md describes every byte. Knows
tensors, no files.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import xxhash

from kvboost.choices import is_width
from kvboost.errors import CacheFileError
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.kv.layout import HeadRange, KVLayout, SlabSpec
from kvboost.models import CachedChunk, content_hash_from_tokens, token_bytes

MAGIC = b"KVBSLOT\0"
VERSION = 1
ALIGNMENT = 4_096  # the payload starts at a multiple of it
_FIXED = struct.Struct("<8sIIIIQ16s")  # magic, version, header, JSON and token bytes, payload bytes, checksum
_DIGEST_BYTES = 16
_MAX_HEADER = 64 << 20
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "key": str,
    "parent": str,
    "namespace": str,
    "content": str,
    "text": str,
    "position_start": int,
    "created_at": (int, float),
    "access_count": int,
    "recomputed": bool,
}
Buffer = memoryview


@dataclass(frozen=True)
class RecordHeader:
    """What a record says about its chunk, checked; `raw` is the header as bytes."""

    raw: bytes
    meta: dict[str, Any]
    token_ids: np.ndarray  # [tokens], uint32
    payload_bytes: int
    checksum: bytes

    @property
    def key(self) -> str:
        return str(self.meta["key"])

    @property
    def payload_start(self) -> int:
        """Where the payload begins, from the start of the record."""
        return padded(len(self.raw))

    @property
    def record_bytes(self) -> int:
        return self.payload_start + self.payload_bytes

    @cached_property
    def codec(self) -> KVCodec:
        """How its tensors are to be read."""
        return _codec_of(json.dumps([self.meta["bits"], self.meta["slabs"], self.meta["layers"]]))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty tensors in main memory for the payload."""
        specs = self.codec.specs(len(self.token_ids))
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in specs)

    def matches(self, payload: Sequence[Buffer]) -> bool:
        """Whether the payload is what was written under this header."""
        described = self.raw[_FIXED.size : -_DIGEST_BYTES]
        return _checksum(self.key, described, payload) == self.checksum

    def chunk(self, tensors: tuple[torch.Tensor, ...], codec: KVCodec | None = None) -> KeptChunk:
        """The chunk with its tensors, kept as `codec` says (None = as the header describes it)."""
        meta, ids = self.meta, self.token_ids.tolist()
        return KeptChunk(
            StoredKV(codec or self.codec, tensors, len(ids)),
            chunk_id=self.key,
            text=meta["text"],
            token_ids=ids,
            position_start=meta["position_start"],
            position_end=meta["position_start"] + len(ids),
            prefix_hash=self.key,
            content_hash=content_hash_from_tokens(self.token_ids),
            created_at=meta["created_at"],
            access_count=meta["access_count"],
            recomputed=meta["recomputed"],
            parent_hash=meta["parent"],
        )


@dataclass(frozen=True)
class Record:
    """A chunk as bytes: its header, and the buffers of its payload."""

    header: RecordHeader
    payload: tuple[Buffer, ...]

    def to_bytes(self) -> bytes:
        """All of it in one piece, for places that keep bytes by key."""
        padding = bytes(self.header.payload_start - len(self.header.raw))
        return b"".join([self.header.raw, padding, *self.payload])


def padded(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def to_record(
    chunk: CachedChunk, *, namespace: str = "", content: str = "", with_text: bool = True
) -> Record:
    """The bytes of a chunk below the root `namespace`, which content matching finds under `content`."""
    kv = chunk.kv if isinstance(chunk, KeptChunk) else _stored(chunk)
    if isinstance(chunk, KeptChunk) and chunk.composite is not None:
        raise CacheFileError("a chunk that borrows from others cannot be written by itself")
    meta: dict[str, Any] = {
        "key": chunk.prefix_hash or chunk.chunk_id,
        "parent": chunk.parent_hash,
        "namespace": namespace,
        "content": content,
        "text": chunk.text if with_text else "",
        "position_start": chunk.position_start,
        "created_at": chunk.created_at,
        "access_count": chunk.access_count,
        "recomputed": chunk.recomputed,
        "bits": kv.codec.bits,
        "slabs": [[str(s.dtype).removeprefix("torch."), s.heads, s.head_dim] for s in kv.codec.layout.slabs],
        "layers": [[[r.slab, r.start, r.end] for r in pair] for pair in kv.codec.layout.layers],
    }
    description = json.dumps(meta, separators=(",", ":")).encode()
    tokens = token_bytes(chunk.token_ids)
    payload = tuple(buffer_of(tensor.cpu()) for tensor in kv.tensors)
    payload_bytes = sum(part.nbytes for part in payload)
    found = tuple((tuple(tensor.shape), tensor.dtype) for tensor in kv.tensors)
    if not tokens or found != kv.codec.specs(len(tokens) // 4):
        raise CacheFileError("a chunk needs at least one token, and KV of as many tokens as it has ids")
    checksum = _checksum(meta["key"], description + tokens, payload)
    size = _FIXED.size + len(description) + len(tokens) + _DIGEST_BYTES
    fixed = _FIXED.pack(MAGIC, VERSION, size, len(description), len(tokens), payload_bytes, checksum)
    body = fixed + description + tokens
    raw = body + xxhash.xxh3_128_digest(body)
    ids = np.frombuffer(tokens, dtype="<u4")
    return Record(RecordHeader(raw, meta, ids, payload_bytes, checksum), payload)


def header_size(start: bytes) -> int:
    """Bytes of the header that begins with `start`; 0 if that is no header."""
    if len(start) < _FIXED.size:
        return 0
    magic, version, size, json_bytes, tokens, _, _ = _FIXED.unpack_from(start)
    fits = size == _FIXED.size + json_bytes + tokens + _DIGEST_BYTES and size <= _MAX_HEADER
    return int(size) if magic == MAGIC and version == VERSION and fits else 0


def read_header(raw: bytes) -> RecordHeader | None:
    """The header in the first bytes of `raw`; None where it is damaged or of another version."""
    size = header_size(raw)
    if not size or len(raw) < size:
        return None
    raw = bytes(raw[:size])
    body, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != digest:
        return None
    _, _, _, json_bytes, _, payload_bytes, checksum = _FIXED.unpack_from(raw)
    try:
        meta = json.loads(body[_FIXED.size : _FIXED.size + json_bytes])
        if not all(isinstance(meta[name], kind) for name, kind in _FIELDS.items()):
            return None
        ids = np.frombuffer(body[_FIXED.size + json_bytes :], dtype="<u4")
        header = RecordHeader(raw, meta, ids, payload_bytes, checksum)
        specs = header.codec.specs(len(ids))
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    except CacheFileError:
        return None
    expected = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
    return header if expected == payload_bytes and len(ids) else None


def from_bytes(data: bytes, key: str) -> KeptChunk | None:
    """The chunk that `Record.to_bytes` made bytes of; None where they are damaged, or those of another."""
    header = read_header(data)
    if header is None or header.key != key or header.record_bytes != len(data):
        return None
    tensors = header.tensors()
    payload = [buffer_of(tensor) for tensor in tensors]
    rest = memoryview(data)[header.payload_start :]
    for part in payload:
        part[:] = rest[: part.nbytes]
        rest = rest[part.nbytes :]
    return header.chunk(tensors) if header.matches(payload) else None


def buffer_of(tensor: torch.Tensor) -> Buffer:
    """The bytes of a contiguous tensor in main memory, without copying."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _checksum(key: str, described: bytes, payload: Sequence[Buffer]) -> bytes:
    digest = xxhash.xxh3_128(key.encode())
    digest.update(described)
    for part in payload:
        digest.update(part)
    return bytes(digest.digest())


def _stored(chunk: CachedChunk) -> StoredKV:
    codec = KVCodec(KVLayout.of(chunk.past_key_values))
    return StoredKV(codec, codec.layout.pack(chunk.past_key_values), chunk.length)


@lru_cache(maxsize=64)
def _codec_of(description: str) -> KVCodec:
    """The codec of a description; chunks of one layout share it."""
    bits, slabs, layers = json.loads(description)
    if not is_width(bits):
        raise CacheFileError(f"unknown width {bits!r}")
    cpu = torch.device("cpu")
    specs = tuple(SlabSpec(cpu, _dtype(name), int(head_dim), int(heads)) for name, heads, head_dim in slabs)
    ranges = tuple((HeadRange(*map(int, key)), HeadRange(*map(int, value))) for key, value in layers)
    return KVCodec(KVLayout(specs, ranges), bits)


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CacheFileError(f"unknown type {name!r}")
    return dtype
