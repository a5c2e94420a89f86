"""A look at every record of a disk tier. Changes nothing; knows the index and the slots, no chunks in use."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field

from kvboost.disk.index import DiskIndex, IndexRow
from kvboost.disk.records import entry_of, payload_of
from kvboost.disk.slot_file import SlotFile

Progress = Callable[[int, int], None]


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
    """Read every record and check it over; also the rows of those that are damaged."""
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
