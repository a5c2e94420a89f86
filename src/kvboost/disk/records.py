"""Records in a slot file: written, found by the rows of the index or in the slots themselves, checked over.

First the bytes are written, then the entry in the index; slots that could not be filled are given back,
whatever went wrong. Whatever is read is checked; what does not fit is None. Knows bytes, tensors and the
index, no folder.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from kvboost.disk import serde
from kvboost.disk.index import DiskIndex, IndexRow
from kvboost.disk.serde import Record, RecordHeader
from kvboost.disk.slot_file import MOST_SLOTS, SlotFile
from kvboost.locks import fork_safe_rlock

Progress = Callable[[int, int], None]
NO_LONGER = "its slot was given back meanwhile"


@dataclass(frozen=True)
class DiskEntry:
    """A chunk on disk: its slot, and all that its header says."""

    slot: int
    header: RecordHeader


def entry_of(row: IndexRow, slot_bytes: int) -> DiskEntry | None:
    """What a row of the index says, checked; None where it is damaged."""
    if not isinstance(row.header, bytes) or not isinstance(row.slot, int):
        return None
    header = serde.read_header(row.header)
    if header is None or len(header.raw) != len(row.header) or header.key != row.key:
        return None
    fits = 0 <= row.slot < MOST_SLOTS and header.record_bytes <= slot_bytes
    return DiskEntry(row.slot, header) if fits else None


def row_of(slot: int, header: RecordHeader) -> IndexRow:
    """The row of the index for a record that is written."""
    return IndexRow(header.key, slot, header.raw, parent=str(header.meta["parent"]))


def payload_of(slots: SlotFile, entry: DiskEntry) -> tuple[torch.Tensor, ...] | None:
    """The tensors of an entry; None where its slot holds something else by now."""
    header = entry.header
    tensors = header.tensors()
    payload = [serde.buffer_of(tensor) for tensor in tensors]
    found = bytearray(header.payload_start)
    try:
        slots.read_into(entry.slot, [memoryview(found), *payload])
    except EOFError:
        return None
    is_whole = bytes(found[: len(header.raw)]) == header.raw and header.matches(payload)
    return tensors if is_whole else None


def rows_in(slots: SlotFile) -> list[IndexRow]:
    """A row for every slot of the file that holds a whole record."""
    rows: dict[str, IndexRow] = {}
    for slot in range(slots.size_bytes // slots.slot_bytes):
        with contextlib.suppress(OSError, EOFError):
            header = _header_in(slots, slot)
            if header is not None and payload_of(slots, DiskEntry(slot, header)) is not None:
                rows[header.key] = row_of(slot, header)
    return list(rows.values())


def _header_in(slots: SlotFile, slot: int) -> RecordHeader | None:
    start = bytearray(min(serde.ALIGNMENT, slots.slot_bytes))
    slots.read_into(slot, [memoryview(start)])
    size = serde.header_size(bytes(start))
    if size > len(start):
        if size > slots.slot_bytes:
            return None
        start = bytearray(size)
        slots.read_into(slot, [memoryview(start)])
    header = serde.read_header(bytes(start))
    return header if header is not None and header.record_bytes <= slots.slot_bytes else None


def write_claimed(
    index: DiskIndex, slots: SlotFile, claimed: dict[int, Record], refused: Counter[str]
) -> list[IndexRow]:
    """Write records to the slots claimed for them, sync them and enter them; returns what was entered.

    Failures are counted in `refused`.
    """
    written: list[IndexRow] = []
    failed: list[int] = []
    try:
        for slot, record in claimed.items():
            header = record.header
            try:
                slots.write(slot, header.payload_start, record.payload)
                slots.write(slot, 0, [header.raw])
                written.append(row_of(slot, header))
            except (OSError, EOFError) as error:
                failed.append(slot)
                refused[f"{type(error).__name__}: {error}"] += 1
        slots.sync()
    except BaseException:
        failed = list(claimed)
        written = []
        raise
    finally:
        try:
            if written:
                entered = index.publish(written)
                refused[NO_LONGER] += len(written) - len(entered)
                written = entered
        finally:
            if failed:
                index.give_up(failed)
    return written


class DiskEntries:
    """The chunks that this process knows to be on disk, by key, in slots of `slot_bytes`.

    Thread-safe; its lock is never held over I/O.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._lock = fork_safe_rlock()
        self._entries: dict[str, DiskEntry] = {}
        self._evicted: list[str] = []  # keys that made room since `take_evicted` was called last

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._entries

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def get(self, key: str) -> DiskEntry | None:
        """The entry of a chunk, if it is known."""
        with self._lock:
            return self._entries.get(key)

    def all(self) -> list[DiskEntry]:
        """All entries at this moment."""
        with self._lock:
            return list(self._entries.values())

    def of_row(self, row: IndexRow) -> DiskEntry | None:
        """What a row of the index says, checked unless it is known already; None if it is damaged."""
        known = self.get(row.key)
        if known is not None and (known.slot, known.header.raw) == (row.slot, row.header):
            return known
        return entry_of(row, self._slot_bytes)

    def sizes(self) -> tuple[int, int]:
        """How many entries there are, and the bytes of their records."""
        with self._lock:
            return len(self._entries), sum(entry.header.record_bytes for entry in self._entries.values())

    def replace(self, entries: dict[str, DiskEntry]) -> None:
        """Know these, and no others."""
        with self._lock:
            self._entries = entries

    def update(self, entries: Mapping[str, DiskEntry]) -> None:
        """Know these too."""
        with self._lock:
            self._entries.update(entries)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget the entries of these chunks."""
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)

    def drop_entry(self, entry: DiskEntry) -> None:
        """Forget this very entry; one that has taken its place stays."""
        key = entry.header.key
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]

    def evict(self, keys: list[str]) -> None:
        """Forget chunks that made room for others, and note them for `take_evicted`."""
        with self._lock:
            self._evicted += keys
            self.drop(keys)

    def take_evicted(self) -> list[str]:
        """The keys that made room since this was called last."""
        with self._lock:
            taken, self._evicted = self._evicted, []
            return taken


@dataclass
class CheckReport:
    """What a look at every slot found."""

    slots: int = 0  # as many as there may be; those that are not set aside yet are free
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


def check_records(
    index: DiskIndex, slots: SlotFile, progress: Progress
) -> tuple[CheckReport, list[IndexRow]]:
    """Read every record and check it over; also the rows of those that are damaged. Changes nothing."""
    report = CheckReport()
    damaged: list[IndexRow] = []
    try:
        report.slots = index.num_slots()
        report.problems = index.problems()
        rows = index.rows()
        report.writing = index.counts()[1]
    except sqlite3.Error as error:
        report.problems.append(str(error))
        return report, damaged
    for number, row in enumerate(rows):
        progress(number, len(rows))
        if _is_good(row, slots):
            report.good += 1
        elif _is_still(row, index):
            report.corrupt.append(row.key)
            damaged.append(row)
    progress(len(rows), len(rows))
    return report, damaged


def _is_good(row: IndexRow, slots: SlotFile) -> bool:
    entry = entry_of(row, slots.slot_bytes)
    try:
        return entry is not None and payload_of(slots, entry) is not None
    except OSError:
        return False


def _is_still(row: IndexRow, index: DiskIndex) -> bool:
    """Whether a row is there as it was read: another process may have replaced it."""
    try:
        return any(row == now for now in index.rows())
    except sqlite3.Error:
        return True
