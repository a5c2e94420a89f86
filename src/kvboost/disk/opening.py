"""Opening the folder of a disk tier: trust first, then the index and the slots, made anew where need be.

A folder that this process may not write to is opened to be read, and nothing in it is changed. An index that
is damaged is set aside and made anew from the slots. Knows files, no chunks in use.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvboost.disk.folder import (
    DAMAGED_INDEX,
    INDEX,
    OPENING,
    OWNERS,
    SLOTS,
    SQLITE_FILES,
    FolderDescription,
    Owner,
    alone,
    can_be_written,
    check_contents,
    read_description,
)
from kvboost.disk.index import DiskIndex
from kvboost.disk.records import rows_in
from kvboost.disk.slot_file import SlotFile
from kvboost.disk.trust import ADVICE, open_private
from kvboost.errors import CacheFileError

Fit = Callable[[DiskIndex], None]
OpenFolder = tuple[DiskIndex, SlotFile, contextlib.ExitStack]  # the last one closes the files
_WAIT_S = 10.0  # for another process that opens the folder
_DAMAGE_CODES = (1, 11, 26)  # SQLITE_ERROR (statements that its tables do not allow), _CORRUPT, _NOTADB
_DAMAGE_WORDS = ("malformed", "not a database", "no such ", "unsupported file format")


class _WrongIndex(sqlite3.DatabaseError):
    """The index can be read, and is not as it should be."""


def open_folder(folder: Path, description: FolderDescription, *, grows: bool) -> OpenFolder:
    """Open the index and the slots, making what is missing; nothing is touched if they do not fit.

    All of `max_chunks` slots are set aside at once, unless the folder `grows`.
    """
    check_contents(folder)
    try:
        if not can_be_written(folder):
            return _open_to_read(folder, description)
        return _open_to_write(folder, description, grows=grows)
    except (OSError, sqlite3.Error) as error:
        raise CacheFileError(f"{folder} cannot be used ({error}): {ADVICE}") from error


def _open_to_write(folder: Path, description: FolderDescription, *, grows: bool) -> OpenFolder:
    with contextlib.ExitStack() as opened, alone(folder / OPENING, wait_s=_WAIT_S):
        owner = Owner(folder / OWNERS)
        opened.callback(owner.close)
        description.check()
        slots = SlotFile(folder / SLOTS, description.slot_bytes)
        opened.callback(slots.close)
        fit = partial(_fit, slots=slots, description=description, grows=grows, has_company=owner.has_company)
        index = _open_index(folder / INDEX, owner, fit)
        opened.callback(index.close)
        description.write(owner.name)
        if not index.is_complete():
            index.complete(rows_in(slots) if index.counts()[0] == 0 else ())
        return index, slots, opened.pop_all()


def _open_to_read(folder: Path, description: FolderDescription) -> OpenFolder:
    if read_description(folder) is None:
        raise CacheFileError(f"{folder} cannot be written to, and holds no disk cache: {ADVICE}")
    description.check()
    with contextlib.ExitStack() as opened:
        slots = SlotFile(folder / SLOTS, description.slot_bytes, read_only=True)
        opened.callback(slots.close)
        index = DiskIndex(folder / INDEX, None)
        opened.callback(index.close)
        if problems := index.problems():
            raise CacheFileError(
                f"{folder / INDEX} is damaged ({problems[0]}) and cannot be made anew: allow this process to "
                "write there, or use another folder"
            )
        return index, slots, opened.pop_all()


def _fit(
    index: DiskIndex, slots: SlotFile, description: FolderDescription, *, grows: bool, has_company: bool
) -> None:
    """Make slots and index agree on how many slots there are.

    More than `max_chunks` are given back, but not while another process uses the folder: it may be writing
    to them. One that `grows` gets no longer here: what its file lost may be another model's by now.
    """
    max_chunks = description.max_chunks
    with index.transaction():
        index.set_meta(version=description.version)
        in_file = slots.size_bytes // slots.slot_bytes
        known = index.meta().get("num_slots", in_file)
        kept = known if has_company else min(known, max_chunks)
        there = min(kept, in_file) if grows else max(min(kept, in_file), max_chunks)
        # First: an index that cannot be written to must cost no slots. Entries of slots that the file lost
        # stay, so that they are found to be damaged, and counted.
        index.set_slots(there, entries_below=max(there, kept))
        if grows:
            slots.cut(there)
        else:
            slots.allocate(there)


def _open_index(path: Path, owner: Owner, fit: Fit) -> DiskIndex:
    """The index; a new one, to be filled from the slots, if it was damaged or gone."""
    try:
        return _checked_index(path, owner, fit)
    except (sqlite3.DatabaseError, UnicodeError) as error:
        if "locked" in str(error):
            raise CacheFileError(
                f"{path} is locked by another program ({error}): end it, or use another folder"
            ) from error
        if not _is_damage(error, path):  # a full disk, say: what is there is good
            raise
        warnings.warn(f"{path} is damaged ({error}); it is made anew from the slots", stacklevel=6)
        for name in SQLITE_FILES:
            with contextlib.suppress(FileNotFoundError):
                path.with_name(name).unlink()
        path.replace(path.with_name(DAMAGED_INDEX))
        return _checked_index(path, owner, fit)


def _is_damage(error: sqlite3.DatabaseError | UnicodeError, path: Path) -> bool:
    """Whether an error says that the index itself is wrong, not that it cannot be read or written now."""
    if isinstance(error, UnicodeError | _WrongIndex):
        return True
    code = getattr(error, "sqlite_errorcode", None)  # since Python 3.11
    if code is not None and code & 0xFF in _DAMAGE_CODES:
        return True
    if any(words in str(error) for words in _DAMAGE_WORDS):
        return True
    return "readonly" in str(error) and _has_unknown_format(path)


def _has_unknown_format(path: Path) -> bool:
    """Whether the two format bytes of a database were changed: SQLite then takes it for read-only."""
    with open(open_private(path, os.O_RDONLY), "rb") as file:
        formats = file.read(20)[18:]
    return any(one not in (1, 2) for one in formats)


def _checked_index(path: Path, owner: Owner, fit: Fit) -> DiskIndex:
    """The index, if it is whole and can be written to; otherwise an error says what it is."""
    index = DiskIndex(path, owner)
    try:
        if problems := index.problems():
            raise _WrongIndex(problems[0])
        fit(index)
    except BaseException:
        index.close()
        raise
    return index
