"""Tensors as bytes, and back: a header that describes them, and the tensors as they are.

A record is `header | padding | payload`. The header has a fixed part (magic, version, sizes, checksums), a
JSON part and token ids; the payload is the tensors one after the other. Kind "kv" is a chunk, quantized ones
as they are kept; "state" is what a model carries beside KV, "opaque" another engine's own. The header holds
a checksum of itself and one over key, description, tokens and payload, so that nothing damaged or misplaced
is ever taken for what was written. docs/disk-format.md describes every byte. Knows tensors, no files.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import xxhash

from kvboost.choices import is_width
from kvboost.errors import CacheFileError
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.kv.layout import HeadRange, KVLayout, SlabSpec
from kvboost.models import CachedChunk, content_hash_from_tokens, token_bytes
from kvboost.store.budget import StoredChunk

MAGIC = b"KVBSLOT\0"
VERSION = 2
VERSIONS = (1, 2)  # that are read
Kind = Literal["kv", "state", "opaque"]
KINDS: tuple[Kind, ...] = ("kv", "state", "opaque")
KV: Kind = "kv"
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
_NEW_FIELDS = ("kind", "tensors")  # in version 2
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
Buffer = memoryview


class TensorSpec(NamedTuple):
    """One tensor of a payload."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RecordHeader:
    """What a record says about its tensors, checked; `raw` is the header as bytes."""

    raw: bytes
    meta: dict[str, Any]
    token_ids: np.ndarray  # [tokens], uint32
    specs: tuple[TensorSpec, ...]
    payload_bytes: int
    checksum: bytes

    @property
    def key(self) -> str:
        return str(self.meta["key"])

    @property
    def kind(self) -> str:
        """ "kv", "state" or "opaque"."""
        return str(self.meta.get("kind", KV))

    @property
    def payload_start(self) -> int:
        """Where the payload begins, from the start of the record."""
        return padded(len(self.raw))

    @property
    def record_bytes(self) -> int:
        return self.payload_start + self.payload_bytes

    @cached_property
    def codec(self) -> KVCodec:
        """How the tensors of a chunk are to be read."""
        return _codec_of(json.dumps([self.meta["bits"], self.meta["slabs"], self.meta["layers"]]))

    def is_chunk_of(self, codec: KVCodec | None) -> bool:
        """Whether this is a chunk, kept as `codec` says (None = in any form)."""
        return self.kind == KV and (codec is None or self.codec.keeps_form_of(codec))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty tensors in main memory for the payload."""
        return tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in self.specs)

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
    """Tensors as bytes: their header, and the buffers of the payload."""

    header: RecordHeader
    payload: tuple[Buffer, ...]

    def to_bytes(self) -> bytes:
        """All of it in one piece, for places that keep bytes by key."""
        padding = bytes(self.header.payload_start - len(self.header.raw))
        return b"".join([self.header.raw, padding, *self.payload])

    def of_version_1(self) -> Record:
        """The same chunk as an older kvboost writes it; `CacheFileError` where it is no chunk."""
        if self.header.kind != KV:
            raise CacheFileError("a folder of version 1 holds chunks only")
        meta = {name: value for name, value in self.header.meta.items() if name not in _NEW_FIELDS}
        return _sealed(1, meta, self.header.token_ids.tobytes(), self.header.specs, self.payload)


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
    found = tuple((tuple(tensor.shape), tensor.dtype) for tensor in kv.tensors)
    if not chunk.token_ids or found != kv.codec.specs(len(chunk.token_ids)):
        raise CacheFileError("a chunk needs at least one token, and KV of as many tokens as it has ids")
    return record_of(
        KV,
        chunk.prefix_hash or chunk.chunk_id,
        {f"slab{number}": tensor for number, tensor in enumerate(kv.tensors)},
        chunk.token_ids,
        parent=chunk.parent_hash,
        namespace=namespace,
        content=content,
        text=chunk.text if with_text else "",
        position_start=chunk.position_start,
        created_at=chunk.created_at,
        access_count=chunk.access_count,
        recomputed=chunk.recomputed,
        bits=kv.codec.bits,
        slabs=[[_name(s.dtype), s.heads, s.head_dim] for s in kv.codec.layout.slabs],
        layers=[[[r.slab, r.start, r.end] for r in pair] for pair in kv.codec.layout.layers],
    )


def stored_record(stored: StoredChunk) -> Record:
    """The bytes of a chunk of the store, without its text."""
    names = {"namespace": stored.namespace_key, "content": stored.content_key}
    return to_record(stored.chunk, **names, with_text=False)


def record_of(
    kind: Kind,
    key: str,
    tensors: Mapping[str, torch.Tensor],
    token_ids: Sequence[int] | np.ndarray = (),
    **fields: Any,
) -> Record:
    """The bytes of named tensors; `fields` are those of the JSON part that are not as in an empty one."""
    specs = tuple(TensorSpec(name, each.dtype, tuple(each.shape)) for name, each in tensors.items())
    if unknown := {spec.dtype for spec in specs} - set(_DTYPES.values()):
        raise CacheFileError(f"tensors of type {unknown.pop()} cannot be written")
    meta: dict[str, Any] = {
        "kind": kind,
        "key": key,
        "parent": "",
        "namespace": "",
        "content": "",
        "text": "",
        "position_start": 0,
        "created_at": 0.0,
        "access_count": 0,
        "recomputed": False,
        "tensors": [[spec.name, _name(spec.dtype), list(spec.shape)] for spec in specs],
        **fields,
    }
    payload = tuple(buffer_of(tensor.cpu()) for tensor in tensors.values())
    return _sealed(VERSION, meta, token_bytes(token_ids), specs, payload)


def _sealed(
    version: int,
    meta: dict[str, Any],
    tokens: bytes,
    specs: tuple[TensorSpec, ...],
    payload: tuple[Buffer, ...],
) -> Record:
    description = json.dumps(meta, separators=(",", ":")).encode()
    payload_bytes = sum(part.nbytes for part in payload)
    checksum = _checksum(meta["key"], description + tokens, payload)
    size = _FIXED.size + len(description) + len(tokens) + _DIGEST_BYTES
    fixed = _FIXED.pack(MAGIC, version, size, len(description), len(tokens), payload_bytes, checksum)
    body = fixed + description + tokens
    raw = body + xxhash.xxh3_128_digest(body)
    ids = np.frombuffer(tokens, dtype="<u4")
    return Record(RecordHeader(raw, meta, ids, specs, payload_bytes, checksum), payload)


def header_size(start: bytes) -> int:
    """Bytes of the header that begins with `start`; 0 if that is no header."""
    if len(start) < _FIXED.size:
        return 0
    magic, version, size, json_bytes, tokens, _, _ = _FIXED.unpack_from(start)
    fits = size == _FIXED.size + json_bytes + tokens + _DIGEST_BYTES and size <= _MAX_HEADER
    return int(size) if magic == MAGIC and version in VERSIONS and fits else 0


def read_header(raw: bytes) -> RecordHeader | None:
    """The header in the first bytes of `raw`; None where it is damaged or of another version."""
    size = header_size(raw)
    if not size or len(raw) < size:
        return None
    raw = bytes(raw[:size])
    body, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != digest:
        return None
    _, version, _, json_bytes, _, payload_bytes, checksum = _FIXED.unpack_from(raw)
    try:
        meta = json.loads(body[_FIXED.size : _FIXED.size + json_bytes])
        if not all(isinstance(meta[name], kind) for name, kind in _FIELDS.items()):
            return None
        ids = np.frombuffer(body[_FIXED.size + json_bytes :], dtype="<u4")
        specs = _specs_of(meta, len(ids), version)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    except CacheFileError:
        return None
    fits = sum(spec.nbytes for spec in specs) == payload_bytes
    return RecordHeader(raw, meta, ids, specs, payload_bytes, checksum) if fits else None


def _specs_of(meta: dict[str, Any], tokens: int, version: int) -> tuple[TensorSpec, ...]:
    """The tensors that a header describes; an error where it contradicts itself."""
    if version == 1 and any(name in meta for name in _NEW_FIELDS):
        raise CacheFileError("fields of a later version")
    kind = KV if version == 1 else meta["kind"]
    if kind not in KINDS or (kind == KV and not tokens):
        raise CacheFileError(f"a record of the kind {kind!r} with {tokens} tokens")
    of_codec: tuple[TensorSpec, ...] = ()
    if kind == KV:
        codec = _codec_of(json.dumps([meta["bits"], meta["slabs"], meta["layers"]]))
        of_codec = tuple(
            TensorSpec(f"slab{number}", dtype, tuple(shape))
            for number, (shape, dtype) in enumerate(codec.specs(tokens))
        )
    if version == 1:
        return of_codec
    specs = tuple(_spec(*each) for each in meta["tensors"])
    if len({spec.name for spec in specs}) < len(specs) or (kind == KV and specs != of_codec):
        raise CacheFileError("tensors that do not fit their description")
    return specs


def _spec(name: Any, dtype: Any, shape: Any) -> TensorSpec:
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not isinstance(name, str) or not is_shape:
        raise CacheFileError(f"no tensor: {name!r}")
    return TensorSpec(name, _dtype(dtype), tuple(shape))


def from_bytes(data: bytes, key: str) -> KeptChunk | None:
    """The chunk that `Record.to_bytes` made bytes of; None where they are damaged, or those of another."""
    found = tensors_in(data, key)
    return found[0].chunk(found[1]) if found is not None and found[0].kind == KV else None


def tensors_in(data: bytes, key: str) -> tuple[RecordHeader, tuple[torch.Tensor, ...]] | None:
    """Header and tensors of a record in one piece; None where it is damaged, or that of another key."""
    header = read_header(data)
    if header is None or header.key != key or header.record_bytes != len(data):
        return None
    tensors = header.tensors()
    payload = [buffer_of(tensor) for tensor in tensors]
    rest = memoryview(data)[header.payload_start :]
    for part in payload:
        part[:] = rest[: part.nbytes]
        rest = rest[part.nbytes :]
    return (header, tensors) if header.matches(payload) else None


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
    if not isinstance(name, str) or name not in _DTYPES:
        raise CacheFileError(f"unknown type {name!r}")
    return _DTYPES[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
