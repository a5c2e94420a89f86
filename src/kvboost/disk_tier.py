"""Chunks on disk: a folder with a slot file, an index, and nothing that could serve a wrong tensor.

A chunk is written to a free slot first and then entered in the index; it is read back with its header and
compared with the index, and its checksum covers key, description, tokens and payload. Whatever goes wrong is
a miss with a counted reason. Several processes may use one folder, and any of them may die at any moment. An
index that is damaged is set aside and made anew from the slots. Knows chunks and files, no model.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvboost import serde
from kvboost.disk_folder import (
    ADVICE,
    DESCRIPTION,
    FolderDescription,
    alone,
    make_private_folder,
    read_description,
)
from kvboost.disk_index import VERSION, DiskIndex, IndexRow, Owner
from kvboost.errors import CacheFileError
from kvboost.kv_codec import KeptChunk, KVCodec
from kvboost.locks import fork_safe_rlock
from kvboost.models import CachedChunk
from kvboost.serde import Record, RecordHeader
from kvboost.slot_file import MOST_SLOTS, SlotFile

INDEX = "index.sqlite"
SLOTS = "slots.bin"
CORRUPT = "corrupt"
GONE = "evicted"
_FAILURES = (OSError, sqlite3.Error, UnicodeError)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DiskEntry:
    """A chunk on disk: its slot, and all that its header says."""

    slot: int
    header: RecordHeader


@dataclass
class CheckReport:
    """What a look at every slot found."""

    slots: int = 0
    good: int = 0
    corrupt: list[str] = field(default_factory=list)  # keys
    writing: int = 0
    problems: list[str] = field(default_factory=list)  # of the index

    @property
    def free(self) -> int:
        return self.slots - self.good - len(self.corrupt) - self.writing

    @property
    def is_good(self) -> bool:
        return not (self.corrupt or self.problems)


class DiskTier:
    """A folder of at most `max_chunks` chunks, in slots of `slot_bytes` that are there from the start."""

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        max_chunks: int = 256,
        slot_bytes: int = 10_485_760,
        *,
        codec: KVCodec | None = None,
        label: str = "",
    ) -> None:
        """Open or make the folder. With a `codec`, chunks of any other form are not read.

        `label` says to people whose chunks these are.
        """
        for name, value, least in (
            ("max_chunks", max_chunks, 0),
            ("slot_bytes", slot_bytes, serde.ALIGNMENT),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CacheFileError(f"{name} must be at least {least}, got {value!r}")
        self.folder = Path(cache_dir)
        self.max_chunks = max_chunks
        self.slot_bytes = slot_bytes
        self.misses: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.evicted: list[str] = []  # keys that made room since somebody asked last
        self._codec = codec
        self._lock = fork_safe_rlock()  # for the entries; never held while the disk is waited for
        self._writing = fork_safe_rlock()
        self._entries: dict[str, DiskEntry] = {}
        self._open_files: contextlib.ExitStack = contextlib.ExitStack()
        self._is_closed = False
        make_private_folder(self.folder)
        self._description = FolderDescription(self.folder, slot_bytes, max_chunks, label)
        self._open()
        self._load()

    @classmethod
    def existing(cls, folder: str | os.PathLike[str]) -> DiskTier:
        """The tier that was made in `folder`, with the sizes that it was made with."""
        found = read_description(Path(folder))
        if found is None:
            raise CacheFileError(f"{folder} holds no disk cache: there is no readable {DESCRIPTION} in it")
        return cls(folder, found["max_chunks"], found["slot_bytes"])

    @property
    def label(self) -> str:
        """Whose chunks these are, in words."""
        return self._description.label

    # --- opening -----------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the index and the slots, making what is missing; nothing is touched if they do not fit."""
        try:
            with contextlib.ExitStack() as opened, alone(self.folder / "opening"):
                self._owner = Owner(self.folder / "owners")
                opened.callback(self._owner.close)
                self._description.check()
                index, is_new = self._open_index()
                opened.callback(index.close)
                self._slots = SlotFile(self.folder / SLOTS, self.slot_bytes, self.max_chunks)
                opened.callback(self._slots.close)
                self._description.write(self._owner.name)
                if is_new:
                    self._rebuild(index)
                self._index = index
                self._open_files = opened.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise CacheFileError(f"{self.folder} cannot be used ({error}): {ADVICE}") from error

    def _open_index(self) -> tuple[DiskIndex, bool]:
        """The index, and whether it is a new one, to be filled from the slots: if it was damaged or gone."""
        path = self.folder / INDEX
        is_new = not path.exists()
        try:
            return self._checked_index(path), is_new
        except (sqlite3.DatabaseError, UnicodeError) as error:
            if "locked" in str(error):
                raise CacheFileError(
                    f"{path} is locked by another program ({error}): end it, or use another folder"
                ) from error
            warnings.warn(f"{path} is damaged ({error}); it is made anew from the slots", stacklevel=5)
            self._set_aside(path)
            return self._checked_index(path), True

    def _checked_index(self, path: Path) -> DiskIndex:
        """The index, if it is whole and can be written to; otherwise `sqlite3.DatabaseError`."""
        index = DiskIndex(path, self._owner)
        try:
            if problems := index.problems():
                raise sqlite3.DatabaseError(problems[0])
            index.resize(self.max_chunks, VERSION)
        except BaseException:
            index.close()
            raise
        return index

    def _set_aside(self, path: Path) -> None:
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).unlink()
        path.replace(path.with_name(path.name + ".damaged"))

    def _rebuild(self, index: DiskIndex) -> None:
        """Enter every slot that holds a whole record."""
        rows: dict[str, IndexRow] = {}
        for slot in range(self.max_chunks):
            with contextlib.suppress(OSError, EOFError):
                header = self._header_in(slot)
                if header is not None and self._payload(DiskEntry(slot, header)) is not None:
                    rows[header.key] = _row(slot, header)
        index.publish(rows.values())

    def _header_in(self, slot: int) -> RecordHeader | None:
        start = bytearray(min(serde.ALIGNMENT, self.slot_bytes))
        self._slots.read_into(slot, [memoryview(start)])
        size = serde.header_size(bytes(start))
        if size > len(start):
            if size > self.slot_bytes:
                return None
            start = bytearray(size)
            self._slots.read_into(slot, [memoryview(start)])
        header = serde.read_header(bytes(start))
        return header if header is not None and header.record_bytes <= self.slot_bytes else None

    def _load(self) -> None:
        """Take over what the index says; rows that are damaged are dropped."""
        try:
            rows = self._index.rows()
        except sqlite3.Error as error:
            self.misses[f"index: {error}"] += 1
            return
        entries: dict[str, DiskEntry] = {}
        damaged = []
        for row in rows:
            entry = self._entry_of(row)
            if entry is None:
                damaged.append(row)
            else:
                entries[row.key] = entry
        with self._lock:
            self._entries = entries
        if damaged:
            self.misses[CORRUPT] += len(damaged)
            with contextlib.suppress(sqlite3.Error):
                self._index.remove_rows(damaged)

    def _entry_of(self, row: IndexRow) -> DiskEntry | None:
        """What a row of the index says, checked; None where it is damaged."""
        known = self._entries.get(row.key)
        if known is not None and (known.slot, known.header.raw) == (row.slot, row.header):
            return known
        if not isinstance(row.header, bytes) or not isinstance(row.slot, int):
            return None
        header = serde.read_header(row.header)
        if header is None or len(header.raw) != len(row.header) or header.key != row.key:
            return None
        fits = 0 <= row.slot < MOST_SLOTS and header.record_bytes <= self.slot_bytes
        return DiskEntry(row.slot, header) if fits else None

    def refresh(self) -> bool:
        """Notice what other processes have written; True where something changed."""
        with self._writing:
            if self._is_closed:
                return False
            try:
                if self._index.was_replaced() or self._slots.was_replaced():
                    self._open_files.close()
                    self._open()
                elif not self._index.has_changed():
                    return False
            except (*_FAILURES, CacheFileError) as error:
                self.misses[f"index: {error}"] += 1
                return False
            self._load()
            return True

    # --- writing -----------------------------------------------------------------------------

    def write(self, chunk: CachedChunk) -> bool:
        """Write a chunk; False, with a counted reason, where there is no room or it does not fit a slot.

        What was used longest ago makes room. A chunk that is there already is not written again.
        """
        try:
            record = serde.to_record(chunk)
        except CacheFileError as error:
            self.refused[str(error)] += 1
            return False
        return self.write_records([record])[0]

    def write_records(self, records: Sequence[Record]) -> list[bool]:
        """Write several; they are synced and entered together, and all are there or counted."""
        fits = [record.header.record_bytes <= self.slot_bytes for record in records]
        self.refused["larger than a slot"] += fits.count(False)
        wanted = {record.header.key: record for record, fit in zip(records, fits, strict=True) if fit}
        with self._writing:
            if self._is_closed:
                self.refused["closed"] += len(records)
                return [False] * len(records)
            try:
                self._write(wanted)
            except _FAILURES as error:
                self.refused[f"{type(error).__name__}: {error}"] += 1
            return [record.header.key in self._entries for record in records]

    def _write(self, wanted: dict[str, Record]) -> None:
        if self._index.was_replaced() or self._slots.was_replaced():
            self.refresh()
        parents = [str(record.header.meta["parent"]) for record in wanted.values()]
        claimed, evicted = self._index.claim(list(wanted), parents)
        with self._lock:
            self.evicted += evicted
            for key in evicted:
                self._entries.pop(key, None)
        written: list[IndexRow] = []
        failed: list[int] = []
        try:
            for key, slot in claimed.items():
                record = wanted[key]
                try:
                    self._slots.write(slot, record.header.payload_start, record.payload)
                    self._slots.write(slot, 0, [record.header.raw])
                    written.append(_row(slot, record.header))
                except (OSError, EOFError) as error:
                    failed.append(slot)
                    self.refused[f"{type(error).__name__}: {error}"] += 1
            self._slots.sync()
        except BaseException:
            failed = list(claimed.values())
            written = []
            raise
        finally:
            try:
                if written:
                    self._index.publish(written)
            finally:
                if failed:
                    self._index.give_up(failed)
        with self._lock:
            for row in written:
                self._entries[row.key] = DiskEntry(row.slot, wanted[row.key].header)
        for key in wanted.keys() - claimed.keys() - self._entries.keys():
            row_of_another = self._index.row(key)
            entry = self._entry_of(row_of_another) if row_of_another is not None else None
            if entry is not None:
                self._entries[key] = entry
            else:
                self.refused["no room"] += 1

    # --- reading -----------------------------------------------------------------------------

    def read(self, chunk_hash: str, device: str | torch.device = "cpu") -> CachedChunk | None:
        """The chunk of that prefix hash, its tensors on `device`; None, with a counted reason, if not there.

        It is a `CachedChunk` whose `past_key_values` are those that were written.
        """
        entry = self.entry(chunk_hash)
        if entry is None and self.refresh():
            entry = self.entry(chunk_hash)
        if entry is None:
            self.misses["never stored"] += 1
            return None
        return self.load(entry, device)

    def entry(self, key: str) -> DiskEntry | None:
        """What is known of a chunk, without reading it."""
        with self._lock:
            return self._entries.get(key)

    def entries(self) -> list[DiskEntry]:
        """All that is known to be on disk, without reading any of it."""
        with self._lock:
            return list(self._entries.values())

    def load(self, entry: DiskEntry, device: str | torch.device = "cpu") -> KeptChunk | None:
        """Read a chunk and check it over; None, with a counted reason, where it is not what it should be."""
        found = self.load_or_reason(entry, device)
        return found if isinstance(found, KeptChunk) else None

    def load_or_reason(self, entry: DiskEntry, device: str | torch.device = "cpu") -> KeptChunk | str:
        """Like `load`, but the reason, which is counted too, in place of None."""
        found: DiskEntry | str = entry
        for _ in range(2):  # another process may have moved it in between
            if isinstance(found, str):
                break
            if not self.is_readable(found):
                found = "other encoding"
                break
            try:
                tensors = self._payload(found)
            except OSError as error:
                found = f"{type(error).__name__}: {error}"
                break
            if tensors is not None:
                return found.header.chunk(tuple(tensor.to(device) for tensor in tensors), self._codec)
            found = self._moved(found)
        reason = found if isinstance(found, str) else GONE
        self.misses[reason] += 1
        return reason

    def is_readable(self, entry: DiskEntry) -> bool:
        """Whether a chunk has the form that this tier reads."""
        return self._codec is None or _same_form(entry.header.codec, self._codec)

    def _payload(self, entry: DiskEntry) -> tuple[torch.Tensor, ...] | None:
        """The tensors of an entry; None where its slot holds something else by now."""
        header = entry.header
        tensors = header.tensors()
        payload = [serde.buffer_of(tensor) for tensor in tensors]
        found = bytearray(header.payload_start)
        try:
            self._slots.read_into(entry.slot, [memoryview(found), *payload])
        except EOFError:
            return None
        is_whole = bytes(found[: len(header.raw)]) == header.raw and header.matches(payload)
        return tensors if is_whole else None

    def _moved(self, entry: DiskEntry) -> DiskEntry | str:
        """Where a chunk is now whose slot holds something else; a reason where it is gone or damaged."""
        key = entry.header.key
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]
        try:
            row = self._index.row(key)
            if row is None:
                return GONE
            now = self._entry_of(row)
            if now is None or (now.slot, now.header.raw) == (entry.slot, entry.header.raw):
                self._index.remove_rows([row])
                return CORRUPT
        except _FAILURES:
            return CORRUPT
        with self._lock:
            self._entries[key] = now
        return now

    def take_evicted(self) -> list[str]:
        """The keys that made room for others since this was asked last."""
        with self._lock:
            taken, self.evicted = self.evicted, []
            return taken

    def touch(self, keys: Sequence[str]) -> None:
        """Count chunks as used just now."""
        with contextlib.suppress(*_FAILURES):
            self._index.touch(keys)

    def remove(self, keys: Sequence[str]) -> None:
        """Forget chunks."""
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)
        with contextlib.suppress(*_FAILURES):
            self._index.remove(keys)

    # --- the whole ---------------------------------------------------------------------------

    def check(self, *, repair: bool = False, progress: Progress = lambda _done, _total: None) -> CheckReport:
        """Read every chunk and check it over; with `repair`, drop those that are damaged."""
        report = CheckReport(slots=self.max_chunks)
        try:
            report.problems = self._index.problems()
            rows = self._index.rows()
            report.writing = self._index.counts()[1]
        except sqlite3.Error as error:
            report.problems.append(str(error))
            return report
        damaged = []
        for number, row in enumerate(rows):
            progress(number, len(rows))
            if self._is_good(row):
                report.good += 1
            elif self._is_still(row):
                report.corrupt.append(row.key)
                damaged.append(row)
        progress(len(rows), len(rows))
        if repair and damaged:
            with self._lock:
                for row in damaged:
                    self._entries.pop(row.key, None)
            try:
                self._index.remove_rows(damaged)
            except sqlite3.Error as error:
                report.problems.append(str(error))
        return report

    def _is_still(self, row: IndexRow) -> bool:
        """Whether a row is there as it was read: another process may have replaced it."""
        try:
            return any(row == now for now in self._index.rows())
        except sqlite3.Error:
            return True

    def _is_good(self, row: IndexRow) -> bool:
        entry = self._entry_of(row)
        try:
            return entry is not None and self._payload(entry) is not None
        except OSError:
            return False

    def clear(self) -> None:
        """Forget everything, and give its bytes back to the disk before taking them again."""
        with self._writing:
            with self._lock:
                self._entries.clear()
            try:
                self._index.resize(0, VERSION)
                self._slots.reset(self.max_chunks)
                self._index.resize(self.max_chunks, VERSION)
            except _FAILURES as error:
                raise CacheFileError(f"{self.folder} could not be cleared: {error}") from error

    def stats(self) -> dict[str, Any]:
        """Sizes and counters at this moment."""
        with self._lock:
            used = len(self._entries)
            return {
                "folder": str(self.folder),
                "chunks": used,
                "max_chunks": self.max_chunks,
                "bytes": sum(entry.header.record_bytes for entry in self._entries.values()),
                "allocated_bytes": self.max_chunks * self.slot_bytes,
                "misses": {name: count for name, count in self.misses.items() if count},
                "refused": {name: count for name, count in self.refused.items() if count},
            }

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._entries

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def close(self) -> None:
        """Close the files. It can be called twice; afterwards nothing is found and nothing is written."""
        with self._writing:
            self._is_closed = True
            with self._lock:
                self._entries = {}
            self._open_files.close()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _row(slot: int, header: RecordHeader) -> IndexRow:
    return IndexRow(header.key, slot, header.raw, parent=str(header.meta["parent"]))


def _same_form(one: KVCodec, other: KVCodec) -> bool:
    """Whether two codecs keep the same bytes, wherever they lie."""
    return (
        one.bits == other.bits
        and one.layout.layers == other.layout.layers
        and [(s.dtype, s.rows, s.head_dim) for s in one.layout.slabs]
        == [(s.dtype, s.rows, s.head_dim) for s in other.layout.slabs]
    )
