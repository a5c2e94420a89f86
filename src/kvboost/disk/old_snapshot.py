"""Saved caches of format version 3: the tensors of their chunks lie in safetensors files.

They are read, and no longer written. Knows the files, and no store.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes

from kvboost.disk.serde import buffer_of
from kvboost.disk.trust import open_regular
from kvboost.errors import CacheFileError
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.models import content_hash_from_tokens, token_bytes
from kvboost.store.budget import StoredChunk

_SHARD_NAME = re.compile(r"chunks-[0-9a-f]+-[0-9]+\.safetensors")
_ROW_FIELDS: dict[str, type | tuple[type, ...]] = {
    "key": str,
    "parent": str,
    "namespace": str,
    "content": str,
    "shard": str,
    "checksum": str,
    "position_start": int,
    "length": int,
    "bytes": int,
    "access_count": int,
    "created_at": (int, float),
}


def _is_row(row: Any) -> bool:
    """Whether a row has all its fields, and its shard is one that `save` could have written."""
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), kind) for name, kind in _ROW_FIELDS.items())
        and _SHARD_NAME.fullmatch(row["shard"]) is not None
    )


class SafetensorsReader:
    """Reads chunks by the rows of a header; the last file stays in memory."""

    def __init__(self, folder: Path, codec: KVCodec) -> None:
        self._folder = folder
        self._codec = codec
        self._shard = ""
        self._tensors: dict[str, torch.Tensor] = {}

    def chunk(self, row: Any) -> StoredChunk | None:
        """The chunk of a row, checked; None where anything is wrong."""
        if not _is_row(row):
            return None
        if row["shard"] != self._shard:
            self._shard = row["shard"]
            self._tensors = _read_shard(self._folder / self._shard)
        chunk = _chunk_of(row, self._tensors, self._codec)
        return None if chunk is None else StoredChunk(row["namespace"], row["content"], chunk)

    def close(self) -> None:
        """Forget the file in memory."""
        self._tensors = {}


def _checksum(chunk: KeptChunk) -> str:
    """Over key, parent, position, tokens and all tensors."""
    digest = xxhash.xxh3_128(f"{chunk.chunk_id}|{chunk.parent_hash}|{chunk.position_start}|".encode())
    digest.update(token_bytes(chunk.token_ids))
    for part in chunk.kv.tensors:
        digest.update(buffer_of(part.cpu()))
    return str(digest.hexdigest())


def _read_shard(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a shard; none where it cannot be read."""
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            return dict(tensors_from_bytes(file.read()))  # a format without code
    except (OSError, CacheFileError, SafetensorError, ValueError, KeyError):
        return {}


def _chunk_of(row: dict[str, Any], tensors: dict[str, torch.Tensor], codec: KVCodec) -> KeptChunk | None:
    """The chunk of a row of the header, checked against its checksum; None where anything is wrong."""
    key, length = row["key"], row["length"]
    specs = codec.specs(max(length, 0))
    names = [f"{key}.{index}" for index in range(len(specs))]
    if not all(name in tensors for name in [*names, f"{key}.ids"]):
        return None
    raw_ids = tensors[f"{key}.ids"]
    if raw_ids.dtype != torch.int32 or raw_ids.dim() != 1:
        return None
    ids = raw_ids.tolist()
    kept = tuple(tensors[name].clone() for name in names)
    found = tuple((tuple(part.shape), part.dtype) for part in kept)
    if found != specs or len(ids) != length or min(ids, default=-1) < 0:
        return None
    chunk = KeptChunk(
        StoredKV(codec, codec.settled(kept), length),
        chunk_id=key,
        text="",
        token_ids=ids,
        position_start=row["position_start"],
        position_end=row["position_start"] + length,
        prefix_hash=key,
        content_hash=content_hash_from_tokens(ids),
        created_at=row["created_at"],
        access_count=row["access_count"],
        parent_hash=row["parent"],
    )
    return chunk if _checksum(chunk) == row["checksum"] else None
