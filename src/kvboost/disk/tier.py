"""Chunks on disk: a folder with a slot file and an index, which never serves a wrong tensor.

A chunk is written to a free slot first (`records`) and then entered in the index. It is read back with
its header, compared with the index, and its checksum covers key, description, tokens and payload. Whatever
goes wrong is a miss with a counted reason. Several processes may use one folder, and any of them may die at
any moment. Knows chunks and files, no model; what an open folder is made of, `opening` knows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from kvboost.disk import serde
from kvboost.disk.chunk_tier import CORRUPT, GONE, OTHER_FORM, ChunkTier
from kvboost.disk.folder import (
    DESCRIPTION,
    INDEX,
    SLOTS,
    FolderDescription,
    check_contents,
    make_private_folder,
    read_description,
    remove_leftovers,
)
from kvboost.disk.opening import open_folder
from kvboost.disk.records import (
    CheckReport,
    DiskEntries,
    DiskEntry,
    Progress,
    check_records,
    payload_of,
    write_claimed,
)
from kvboost.disk.room import NO_ROOM, Growth, Room, give_back, note_use
from kvboost.disk.serde import Record, RecordHeader
from kvboost.disk.trust import real_folder
from kvboost.errors import CacheFileError
from kvboost.kv.codec import KeptChunk, KVCodec
from kvboost.locks import fork_safe_rlock
from kvboost.models import CachedChunk

__all__ = ["CORRUPT", "GONE", "INDEX", "SLOTS", "CheckReport", "DiskEntry", "DiskTier"]
_log = logging.getLogger(__name__)
READ_ONLY = "read-only folder"
_FAILURES = (OSError, sqlite3.Error, UnicodeError, CacheFileError)


class DiskTier(ChunkTier):
    """A folder of at most `max_chunks` chunks, in slots of `slot_bytes` that are there from the start.

    Others must neither own it nor be able to write to it. Where this process may not write to it either,
    what it holds is read and nothing is changed.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        max_chunks: int = 256,
        slot_bytes: int = 10_485_760,
        *,
        codec: KVCodec | None = None,
        label: str = "",
        grows: bool = False,
        room: Room | None = None,
    ) -> None:
        """Open or make the folder. With a `codec`, chunks of any other form are not read.

        `label` says to people whose chunks these are. With `grows`, slots are set aside in steps as they
        are needed, not all at the start, and with a `room` only what other models leave.
        """
        for name, value, least in (
            ("max_chunks", max_chunks, 0),
            ("slot_bytes", slot_bytes, serde.ALIGNMENT),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CacheFileError(f"{name} must be at least {least}, got {value!r}")
        self.folder = make_private_folder(cache_dir)
        self.name = str(self.folder)
        self.max_chunks = max_chunks
        self.slot_bytes = slot_bytes
        self.misses: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._codec = codec
        self._writing = fork_safe_rlock()
        self._entries = DiskEntries(slot_bytes)
        self._lost: list[str] = []  # keys of chunks whose slots the file has lost, until `check` reports them
        self._is_closed = False
        self._room = room
        self._growth = Growth(self.folder, max_chunks, room) if grows else None
        self._description = FolderDescription(self.folder, slot_bytes, max_chunks, label)
        self._open()
        if self.is_read_only:
            _log.info("%s cannot be written to: what it holds is read, and nothing is saved", self.folder)
        self._note_use()
        if self._growth is not None and not self.is_read_only:
            self._growth.settle()
        self._load()

    @classmethod
    def existing(cls, folder: str | os.PathLike[str]) -> DiskTier:
        """The tier that was made in `folder`, with the sizes that it was made with; nothing is dropped."""
        real = real_folder(folder)
        check_contents(real)
        found = read_description(real)
        if found is None:
            raise CacheFileError(f"{folder} holds no disk cache: there is no readable {DESCRIPTION} in it")
        slot_bytes = max(found["slot_bytes"], 1)
        there = os.lstat(real / SLOTS).st_size // slot_bytes if os.path.lexists(real / SLOTS) else 0
        return cls(real, max(found["max_chunks"], there), found["slot_bytes"], grows=True)

    @property
    def label(self) -> str:
        """Whose chunks these are, in words."""
        return self._description.label

    @property
    def is_read_only(self) -> bool:
        """Whether this process may not write to the folder: then it serves reads, and nothing is changed."""
        return self._index.is_read_only

    # --- opening -----------------------------------------------------------------------------

    def _open(self) -> None:
        opened = open_folder(self.folder, self._description, grows=self._growth is not None)
        self._index, self._slots, self._files = opened

    def _load(self) -> None:
        """Take over what the index says; damaged entries are dropped."""
        try:
            rows = self._index.rows()
        except sqlite3.Error as error:
            self.misses[f"index: {error}"] += 1
            return
        in_file = self._slots.size_bytes // self.slot_bytes
        entries: dict[str, DiskEntry] = {}
        damaged = []
        for row in rows:
            entry = self._entries.of_row(row)
            if entry is None:
                damaged.append(row)
            elif entry.slot >= in_file:  # the file has lost it
                damaged.append(row)
                self._lost.append(row.key)
            else:
                entries[row.key] = entry
        self._entries.replace(entries)
        if damaged:
            self.misses[CORRUPT] += len(damaged)
            with contextlib.suppress(sqlite3.Error):
                self._index.remove_rows(damaged)

    def refresh(self) -> bool:
        """Notice what other processes have written; True where something changed."""
        with self._writing:
            if self._is_closed:
                return False
            try:
                if self._index.was_replaced() or self._slots.was_replaced():
                    self._files.close()
                    self._open()
                elif not self._index.has_changed():
                    return False
            except _FAILURES as error:
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
        wanted = self._fitting(records)
        with self._writing:
            if self._is_closed:
                self.refused["closed"] += len(records)
                return [False] * len(records)
            if self.is_read_only:
                found = [record.header.key in self._entries for record in records]
                self.refused[READ_ONLY] += found.count(False)
                return found
            try:
                self._write(wanted)
            except _FAILURES as error:
                self.refused[f"{type(error).__name__}: {error}"] += 1
            return [record.header.key in self._entries for record in records]

    def _fitting(self, records: Sequence[Record]) -> dict[str, Record]:
        """Those that can stand in this folder, as they are written there; the others are counted."""
        found = {}
        for record in records:
            try:
                written = record.of_version_1() if self._description.version == 1 else record
            except CacheFileError as error:
                self.refused[str(error)] += 1
                continue
            if written.header.record_bytes <= self.slot_bytes:
                found[written.header.key] = written
            else:
                self.refused["larger than a slot"] += 1
        return found

    def _write(self, wanted: dict[str, Record]) -> None:
        self._follow()
        if self._growth is not None:
            new = sum(key not in self._entries for key in wanted)
            self._growth.make_room(self._index, self._slots, new, self.refused)
        parents = [str(record.header.meta["parent"]) for record in wanted.values()]
        claimed, evicted = self._index.claim(list(wanted), parents)
        self._entries.evict(evicted)
        slots = {slot: wanted[key] for key, slot in claimed.items()}
        written = write_claimed(self._index, self._slots, slots, self.refused)
        self._entries.update({row.key: DiskEntry(row.slot, wanted[row.key].header) for row in written})
        for key in wanted.keys() - claimed.keys():
            if key in self._entries:
                continue
            row_of_another = self._index.row(key)
            entry = self._entries.of_row(row_of_another) if row_of_another is not None else None
            if entry is not None:
                self._entries.update({key: entry})
            else:
                self.refused[NO_ROOM if self._growth is None else self._growth.why_no_room] += 1
        self._note_use()

    def _follow(self) -> None:
        """Open what has taken the place of the files that are open, or that had to be closed."""
        if self._index.was_replaced() or self._slots.was_replaced():
            self.refresh()

    def _note_use(self) -> None:
        """Let other models of the same room see that this one is used."""
        if self._room is not None and not self.is_read_only:
            note_use(self.folder)

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
        return self._entries.get(key)

    def entries(self) -> list[DiskEntry]:
        """All that is known to be on disk, without reading any of it."""
        return self._entries.all()

    def headers(self) -> list[RecordHeader]:
        """The headers of `entries`."""
        return [entry.header for entry in self._entries.all()]

    def load(self, entry: DiskEntry, device: str | torch.device = "cpu") -> KeptChunk | None:
        """Read a chunk and check it over; None, with a counted reason, where it is not what it should be."""
        found = self._read_checked(entry, device)
        return found if isinstance(found, KeptChunk) else None

    def load_or_reason(self, key: str) -> KeptChunk | str:
        """The chunk of that key, checked over; if it cannot be had, the reason, which is counted too."""
        entry = self.entry(key)
        if entry is None:
            self.misses[GONE] += 1
            return GONE
        return self._read_checked(entry, "cpu")

    def _read_checked(self, entry: DiskEntry, device: str | torch.device) -> KeptChunk | str:
        found: DiskEntry | str = entry
        for _ in range(2):  # another process may have moved it in between
            if isinstance(found, str):
                break
            if not found.header.is_chunk_of(self._codec):
                found = OTHER_FORM
                break
            try:
                tensors = payload_of(self._slots, found)
            except OSError as error:
                found = f"{type(error).__name__}: {error}"
                break
            if tensors is not None:
                return found.header.chunk(tuple(tensor.to(device) for tensor in tensors), self._codec)
            found = self._moved(found)
        reason = found if isinstance(found, str) else GONE
        self.misses[reason] += 1
        return reason

    def _moved(self, entry: DiskEntry) -> DiskEntry | str:
        """Where a chunk is now whose slot holds something else; a reason where it is gone or damaged."""
        key = entry.header.key
        self._entries.drop_entry(entry)
        try:
            row = self._index.row(key)
            if row is None:
                return GONE
            now = self._entries.of_row(row)
            if now is None or (now.slot, now.header.raw) == (entry.slot, entry.header.raw):
                self._index.remove_rows([row])
                return CORRUPT
        except _FAILURES:
            return CORRUPT
        self._entries.update({key: now})
        return now

    def read_tensors(self, key: str) -> dict[str, torch.Tensor] | None:
        """The tensors of a record of any kind by name, checked; None where they cannot be had."""
        entry = self.entry(key)
        with contextlib.suppress(OSError):
            tensors = payload_of(self._slots, entry) if entry is not None else None
            if entry is not None and tensors is not None:
                return {spec.name: each for spec, each in zip(entry.header.specs, tensors, strict=True)}
        return None

    def take_evicted(self) -> list[str]:
        """The keys that made room for others since this was asked last."""
        return self._entries.take_evicted()

    def touch(self, keys: Sequence[str]) -> None:
        """Count chunks as used just now."""
        with contextlib.suppress(*_FAILURES):
            self._index.touch(keys)
            self._note_use()

    def remove(self, keys: Sequence[str]) -> None:
        """Forget chunks."""
        if self.is_read_only:
            return
        self._entries.drop(keys)
        with contextlib.suppress(*_FAILURES):
            self._index.remove(keys)

    # --- the whole ---------------------------------------------------------------------------

    def check(self, *, repair: bool = False, progress: Progress = lambda _done, _total: None) -> CheckReport:
        """Read every chunk and check it over; with `repair`, drop those that are damaged."""
        if repair:
            self._check_writable()
        report, damaged = check_records(self._index, self._slots, progress)
        report.slots = max(self.max_chunks, report.slots)
        report.corrupt += self._lost
        self._lost = []
        if repair and damaged:
            self._entries.drop(row.key for row in damaged)
            try:
                self._index.remove_rows(damaged)
            except sqlite3.Error as error:
                report.problems.append(str(error))
        return report

    def clear(self) -> None:
        """Forget everything, and give its bytes back to the disk; unless it grows, they are taken again."""
        self._check_writable()
        with self._writing:
            if self._is_closed:
                raise CacheFileError(f"{self.folder} could not be cleared: it was closed before")
            self._follow()
            self._entries.replace({})
            try:
                self._index.clear()  # first: slots that are given back must not count any more
                give_back(self._index, self._slots)
                remove_leftovers(self.folder)
                if self._growth is None:
                    with self._index.transaction():
                        self._slots.allocate(self.max_chunks)
                        self._index.set_slots(self.max_chunks)
            except _FAILURES as error:
                raise CacheFileError(f"{self.folder} could not be cleared: {error}") from error

    def _check_writable(self) -> None:
        if self.is_read_only:
            raise CacheFileError(f"{self.folder} cannot be changed: give this process access to it")

    def stats(self) -> dict[str, Any]:
        """Sizes and counters at this moment."""
        chunks, record_bytes = self._entries.sizes()
        return {
            "folder": str(self.folder),
            "chunks": chunks,
            "max_chunks": self.max_chunks,
            "bytes": record_bytes,
            "allocated_bytes": self._slots.size_bytes,
            "read_only": self.is_read_only,
            "misses": {name: count for name, count in self.misses.items() if count},
            "refused": {name: count for name, count in self.refused.items() if count},
        }

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """Close the files. It can be called twice; afterwards nothing is found and nothing is written."""
        with self._writing:
            self._is_closed = True
            self._entries.replace({})
            self._files.close()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
