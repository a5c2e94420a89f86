"""Writing records to slots that the index has set aside for them: first the bytes, then the entry.

Slots that could not be filled are given back, whatever went wrong. Knows the index and the slots, no folder.
"""

from __future__ import annotations

from collections import Counter

from kvboost.disk.index import DiskIndex, IndexRow
from kvboost.disk.records import row_of
from kvboost.disk.serde import Record
from kvboost.disk.slot_file import SlotFile

NO_LONGER = "its slot was given back meanwhile"


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
