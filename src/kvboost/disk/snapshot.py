"""A whole cache as files: `cache.json` (the header) and files of records beside it.

The header names the model's namespace and says where every chunk's record lies; replacing it is the one
step that makes a save count, so a save that was cut off leaves the one before it. Nothing is pickled.
A damaged chunk is left out on loading, with everything that follows it. Nothing outside the folder is
opened, and no link in it is followed; a saved cache is trusted as model weights are. Knows no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from kvboost.disk import serde
from kvboost.disk.old_snapshot import SafetensorsReader
from kvboost.disk.serde import buffer_of
from kvboost.disk.trust import open_regular
from kvboost.errors import CacheFileError
from kvboost.kv.codec import KVCodec
from kvboost.store.budget import StoredChunk
from kvboost.store.manager import KVCacheManager

HEADER = "cache.json"
FORMAT = "kvboost-cache"
VERSION = 4
_SAFETENSORS_VERSION = 3
_SHARD_BYTES = 256 << 20
_SHARD_NAME = re.compile(r"chunks-[0-9a-f]+-[0-9]+\.records")
_OF_A_RUN = re.compile(
    rf"chunks-[0-9a-f]{{12}}-[0-9]{{5,}}\.(?:records|safetensors)|{re.escape(HEADER)}\.[0-9a-f]{{12}}"
)
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
    rows: list[dict[str, Any]] = []
    left_out: set[str] = set()
    with manager.exported(family) as chunks:
        for number, shard in enumerate(_shards(chunks)):
            name = f"chunks-{run}-{number:05d}.records"
            with open(open_regular(folder / name, _NEW), "wb") as file:
                for stored in _shown(shard, f"saving shard {number + 1}", progress):
                    kv = manager.kv_of(stored.chunk) if stored.chunk.parent_hash not in left_out else None
                    if kv is None:  # on disk, and not to be had: nothing behind it could be reached either
                        left_out.add(stored.chunk.chunk_id)
                        continue
                    whole = dataclasses.replace(stored, chunk=stored.chunk.with_kv(kv))
                    rows.append({"shard": name, **_write(file, whole)})
                file.flush()
                os.fsync(file.fileno())
    header = {
        "format": FORMAT,
        "version": VERSION,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        "family": family,
        "kv_cache_bits": codec.bits,
        "layout": _layout_fields(codec),
        "chunks": rows,
    }
    temporary = folder / f"{HEADER}.{run}"
    with open(open_regular(temporary, _NEW), "w") as file:
        file.write(json.dumps(header))
    _sync(temporary)
    os.replace(temporary, folder / HEADER)
    _remove_other_runs(folder, run)
    return len(rows)


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
    is_old = header["version"] == _SAFETENSORS_VERSION
    damaged: set[str] = set()  # keys of chunks that were left out, and of all that follow them
    reader: _Reader = SafetensorsReader(folder, codec) if is_old else _RecordReader(folder, codec)
    for row in _shown(header["chunks"], "loading", progress):
        stored = reader.chunk(row)
        if stored is None or stored.chunk.parent_hash in damaged:
            report.corrupt += 1
            damaged.add(str(row.get("key")) if isinstance(row, dict) else "")
        elif manager.restore(stored, family):
            report.loaded += 1
        else:
            report.no_room += 1
    reader.close()
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
    if header.get("version") not in (VERSION, _SAFETENSORS_VERSION):
        raise CacheFileError(
            f"{folder} has format version {header.get('version')}, this kvboost reads up to {VERSION}"
        )
    if not all(isinstance(header.get(name), kind) for name, kind in _HEADER_FIELDS.items()):
        raise CacheFileError(f"{folder / HEADER} is damaged: one of {', '.join(_HEADER_FIELDS)} is missing")
    return header


_HEADER_FIELDS: dict[str, type] = {"model": str, "family": str, "layout": list, "chunks": list}
_ROW_FIELDS: dict[str, type] = {"key": str, "shard": str, "offset": int, "size": int}


class _Reader(Protocol):
    def chunk(self, row: Any) -> StoredChunk | None:
        """The chunk of a row of the header, checked; None where anything is wrong."""

    def close(self) -> None:
        """Close what is open."""


class _RecordReader:
    """Reads records out of their files, each of which stays open until another is asked for."""

    def __init__(self, folder: Path, codec: KVCodec) -> None:
        self._folder = folder
        self._codec = codec
        self._name = ""
        self._file: io.BufferedReader | None = None

    def chunk(self, row: Any) -> StoredChunk | None:
        if not _is_row(row):
            return None
        try:
            if row["shard"] != self._name:
                self._open(row["shard"])
            return self._read(self._file, row) if self._file is not None else None
        except (OSError, ValueError, OverflowError, CacheFileError):
            return None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self, name: str) -> None:
        self.close()
        self._name, self._file = name, None
        self._file = io.BufferedReader(io.FileIO(open_regular(self._folder / name, os.O_RDONLY)))

    def _read(self, file: io.BufferedReader, row: dict[str, Any]) -> StoredChunk | None:
        if row["offset"] + row["size"] > os.fstat(file.fileno()).st_size:
            return None
        file.seek(row["offset"])
        start = file.read(min(serde.ALIGNMENT, row["size"]))
        start += file.read(max(0, min(serde.header_size(start), row["size"]) - len(start)))
        header = serde.read_header(start)
        if header is None or (header.key, header.record_bytes) != (row["key"], row["size"]):
            return None
        if not header.is_chunk_of(self._codec):
            return None
        tensors = header.tensors()
        payload = [buffer_of(tensor) for tensor in tensors]
        file.seek(row["offset"] + header.payload_start)
        if any(file.readinto(part) != part.nbytes for part in payload) or not header.matches(payload):
            return None
        chunk = header.chunk(self._codec.settled(tensors), self._codec)
        return StoredChunk(header.meta["namespace"], header.meta["content"], chunk)


def _is_row(row: Any) -> bool:
    """Whether a row has all its fields, and its file is one that `save` could have written."""
    return (
        isinstance(row, dict)
        and all(type(row.get(name)) is kind for name, kind in _ROW_FIELDS.items())
        and min(row["offset"], row["size"]) >= 0
        and _SHARD_NAME.fullmatch(row["shard"]) is not None
    )


def _write(file: BinaryIO, stored: StoredChunk) -> dict[str, Any]:
    """Add the record of a chunk to a file; returns its row: where it lies, and what `kvboost stats` shows."""
    record = serde.stored_record(stored)
    file.write(bytes(-file.tell() % serde.ALIGNMENT))
    offset, header = file.tell(), record.header
    file.write(header.raw)
    file.write(bytes(header.payload_start - len(header.raw)))
    for part in record.payload:
        file.write(part)
    return {
        "key": header.key,
        "offset": offset,
        "size": header.record_bytes,
        "namespace": stored.namespace_key,
        "length": stored.chunk.length,
        "bytes": stored.chunk.memory_bytes(),
        "access_count": stored.chunk.access_count,
    }


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
