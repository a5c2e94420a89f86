"""A whole cache as files: `cache.json` (the header) and safetensors shards beside it.

The header names the model's namespace and every chunk with its checksum; replacing it is the one
step that makes a save count, so a save that was cut off leaves the one before it. Nothing is pickled.
A damaged chunk is left out on loading, with everything that follows it. Nothing outside the folder is
opened, and no link in it is followed; a saved cache is trusted as model weights are. Knows no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save_file as write_tensors

from kvboost.disk.serde import buffer_of
from kvboost.disk.trust import open_regular
from kvboost.errors import CacheFileError
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.models import content_hash_from_tokens, token_bytes
from kvboost.store.budget import StoredChunk
from kvboost.store.manager import KVCacheManager

HEADER = "cache.json"
FORMAT = "kvboost-cache"
VERSION = 3
_SHARD_BYTES = 256 << 20
_SHARD_NAME = re.compile(r"chunks-[0-9a-f]+-[0-9]+\.safetensors")
_OF_A_RUN = re.compile(rf"chunks-[0-9a-f]{{12}}-[0-9]{{5,}}\.safetensors|{re.escape(HEADER)}\.[0-9a-f]{{12}}")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
T = TypeVar("T")


@dataclass
class LoadReport:
    """What became of the chunks of a saved cache."""

    loaded: int = 0
    corrupt: int = 0
    no_room: int = 0


def save(
    folder: Path, manager: KVCacheManager, codec: KVCodec, family: str, model: str, *, progress: bool | None
) -> int:
    """Write all chunks of `family` to `folder`; returns how many."""
    _check_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = uuid.uuid4().hex[:12]
    records: list[dict[str, Any]] = []
    left_out: set[str] = set()
    with manager.exported(family) as chunks:
        for number, shard in enumerate(_shards(chunks)):
            name = f"chunks-{run}-{number:05d}.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for stored in _shown(shard, f"saving shard {number + 1}", progress):
                kv = manager.kv_of(stored.chunk) if stored.chunk.parent_hash not in left_out else None
                if kv is None:  # on disk, and not to be had: nothing behind it could be reached either
                    left_out.add(stored.chunk.chunk_id)
                    continue
                chunk = stored.chunk.with_kv(kv)
                tensors |= _tensors_of(chunk)
                records.append({**_record_of(dataclasses.replace(stored, chunk=chunk)), "shard": name})
            os.close(open_regular(folder / name, _NEW))  # so that nothing else is written over
            write_tensors(tensors, folder / name)
            _sync(folder / name)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        "family": family,
        "kv_cache_bits": codec.bits,
        "layout": _layout_fields(codec),
        "chunks": records,
    }
    temporary = folder / f"{HEADER}.{run}"
    with open(open_regular(temporary, _NEW), "w") as file:
        file.write(json.dumps(header))
    _sync(temporary)
    os.replace(temporary, folder / HEADER)
    _remove_other_runs(folder, run)
    return len(records)


def load(
    folder: Path, manager: KVCacheManager, codec: KVCodec, family: str, model: str, *, progress: bool | None
) -> LoadReport:
    """Put the chunks saved in `folder` into `manager`, as far as there is room."""
    header = read_header(folder)
    if header["family"] != family or header["layout"] != _layout_fields(codec):
        raise CacheFileError(
            f"{folder} was saved for the model {header['model']} (namespace {header['family'][:12]}); this "
            f"engine has {model} (namespace {family[:12]}): other weights, dtype, device or encoding"
        )
    report = LoadReport()
    tensors: dict[str, torch.Tensor] = {}
    shard = ""
    damaged: set[str] = set()  # keys of chunks that were left out, and of all that follow them
    for record in _shown(header["chunks"], "loading", progress):
        is_whole = _is_record(record)
        if is_whole and record["shard"] != shard:
            shard = record["shard"]
            tensors = _read_shard(folder / shard)
        is_reachable = is_whole and record["parent"] not in damaged
        chunk = _chunk_of(record, tensors, codec) if is_reachable else None
        if chunk is None:
            report.corrupt += 1
            damaged.add(str(record.get("key")) if isinstance(record, dict) else "")
        elif manager.restore(StoredChunk(record["namespace"], record["content"], chunk), family):
            report.loaded += 1
        else:
            report.no_room += 1
    manager.count_corrupt(report.corrupt)
    return report


def read_header(folder: Path) -> dict[str, Any]:
    """The checked header of a saved cache."""
    try:
        header = json.loads(_read(folder / HEADER))
    except FileNotFoundError as error:
        raise CacheFileError(f"{folder} holds no saved cache: there is no {HEADER} in it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CacheFileError(f"{folder / HEADER} cannot be read: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CacheFileError(f"{folder / HEADER} is not the header of a kvboost cache")
    if header.get("version") != VERSION:
        raise CacheFileError(
            f"{folder} has format version {header.get('version')}, this kvboost reads version {VERSION}"
        )
    if not all(isinstance(header.get(name), kind) for name, kind in _HEADER_FIELDS.items()):
        raise CacheFileError(f"{folder / HEADER} is damaged: one of {', '.join(_HEADER_FIELDS)} is missing")
    return header


_HEADER_FIELDS: dict[str, type] = {"model": str, "family": str, "layout": list, "chunks": list}
_RECORD_FIELDS: dict[str, type | tuple[type, ...]] = {
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


def _is_record(record: Any) -> bool:
    """Whether a record has all its fields, and its shard is one that `save` could have written."""
    return (
        isinstance(record, dict)
        and all(isinstance(record.get(name), kind) for name, kind in _RECORD_FIELDS.items())
        and _SHARD_NAME.fullmatch(record["shard"]) is not None
    )


def _check_target(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CacheFileError(f"{folder} is a file; a cache is saved as a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / HEADER).exists():
        raise CacheFileError(f"{folder} holds other files; give an empty or a new folder")


def _shards(chunks: Iterable[StoredChunk]) -> Iterator[list[StoredChunk]]:
    shard: list[StoredChunk] = []
    size = 0
    for stored in chunks:
        shard.append(stored)
        size += stored.chunk.kv.codec.bytes_for(stored.chunk.length)
        if size >= _SHARD_BYTES:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _tensors_of(chunk: KeptChunk) -> dict[str, torch.Tensor]:
    tensors = {f"{chunk.chunk_id}.{i}": part.cpu() for i, part in enumerate(chunk.kv.tensors)}
    tensors[f"{chunk.chunk_id}.ids"] = torch.tensor(list(chunk.token_ids), dtype=torch.int32)
    return tensors


def _record_of(stored: StoredChunk) -> dict[str, Any]:
    chunk = stored.chunk
    return {
        "key": chunk.chunk_id,
        "parent": chunk.parent_hash,
        "namespace": stored.namespace_key,
        "content": stored.content_key,
        "position_start": chunk.position_start,
        "length": chunk.length,
        "bytes": chunk.memory_bytes(),
        "created_at": chunk.created_at,
        "access_count": chunk.access_count,
        "checksum": _checksum(chunk),
    }


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
        return dict(tensors_from_bytes(_read(path)))  # a format without code
    except (OSError, CacheFileError, SafetensorError, ValueError, KeyError):
        return {}


def _chunk_of(record: dict[str, Any], tensors: dict[str, torch.Tensor], codec: KVCodec) -> KeptChunk | None:
    """The chunk of a header record, checked against its checksum; None where anything is wrong."""
    key, length = record["key"], record["length"]
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
        position_start=record["position_start"],
        position_end=record["position_start"] + length,
        prefix_hash=key,
        content_hash=content_hash_from_tokens(ids),
        created_at=record["created_at"],
        access_count=record["access_count"],
        parent_hash=record["parent"],
    )
    return chunk if _checksum(chunk) == record["checksum"] else None


def _read(path: Path) -> bytes:
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _layout_fields(codec: KVCodec) -> list[list[Any]]:
    return [[str(spec.dtype), spec.heads, spec.head_dim] for spec in codec.layout.slabs]


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove_other_runs(folder: Path, run: str) -> None:
    """Drop shards and headers of earlier saves; what cannot be removed is only in the way."""
    for path in folder.iterdir():
        if _OF_A_RUN.fullmatch(path.name) and run not in path.name:
            with contextlib.suppress(OSError):
                path.unlink()


def _shown(items: list[T], what: str, progress: bool | None) -> Iterable[T]:
    """`items` with a progress bar; by default only where someone watches."""
    if not (sys.stderr.isatty() if progress is None else progress):
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description=what, console=Console(stderr=True))
