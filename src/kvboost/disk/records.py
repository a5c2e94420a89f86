"""Records in a slot file: found by the rows of the index, or by looking at the slots themselves.

Whatever is read is checked over; what does not fit is None. Changes nothing. Knows bytes and tensors, no
folder.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from kvboost.disk import serde
from kvboost.disk.index import IndexRow
from kvboost.disk.serde import RecordHeader
from kvboost.disk.slot_file import MOST_SLOTS, SlotFile


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
