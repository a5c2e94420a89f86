"""How much a model's folder may take on disk: slots grow step by step, as far as budget and disk allow.

A step is set aside in full before it counts. One that fails is counted and said once, and not tried again for
a while. All models of one disk cache folder share its bytes: slots grow one process at a time, and only as
far as the slot files of all models stay under the limit. Where there is no room, models that no process has
open make some, those used longest ago first. Knows folders, the index and the slot file, no chunks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections import Counter
from pathlib import Path

from kvboost.disk.folder import (
    DESCRIPTION,
    INDEX,
    OPENING,
    OWNERS,
    SLOTS,
    SQLITE_FILES,
    alone,
    any_alive,
    check_contents,
    read_description,
    remove_leftovers,
)
from kvboost.disk.index import DiskIndex
from kvboost.disk.slot_file import SlotFile
from kvboost.disk.trust import check_folder
from kvboost.errors import CacheFileError

_log = logging.getLogger(__name__)
GROWING = "growing"
_WAIT_S = 5.0
_NO_LIMIT = 1 << 62
NO_ROOM = "no room"
TAKEN = "no room: other models fill disk_cache_bytes"
_LEAST_STEP = 8  # slots
_STEP_SHARE = 4  # a step is a fourth of what is there
_MOST_STEP_BYTES = 1 << 30
_REST_S = 30.0  # after the disk was full
_ROOM_REST_S = 1.0  # after other models had everything
_RESERVE_BYTES = 8 << 20  # of the file system, left to the index: it grows by what its log, of 4 MB, holds


class Room:
    """What `folder`, with a folder for each model in it, may take: `max_bytes`, or None for any number."""

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def folder_of(self, name: str) -> Path:
        """The folder of one model in it, there or not; a link in its place is refused."""
        found = self.folder / name
        if os.path.lexists(found):
            check_folder(found)
        return found

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Inside, nobody else grows; `BlockingIOError` where somebody does so for too long."""
        return alone(self.folder / GROWING, wait_s=_WAIT_S)

    def left_bytes(self) -> int:
        """What the slot files of all models leave of the limit. Only while it is locked."""
        if self._max_bytes is None:
            return _NO_LIMIT
        return self._max_bytes - sum(_slot_bytes_in(folder) for folder in self._folders())

    def take_over(self, needed_bytes: int, own: Path) -> int:
        """Drop what unused models keep until so much is left, or there are none; returns what is left.

        Only while it is locked.
        """
        others = [folder for folder in self._folders() if folder != own and _slot_bytes_in(folder)]
        for folder in sorted(others, key=_last_use):
            if self.left_bytes() >= needed_bytes:
                break
            with contextlib.suppress(OSError, CacheFileError):  # not ours to take, or in use
                _drop_if_unused(folder)
        return self.left_bytes()

    def _folders(self) -> list[Path]:
        with os.scandir(self.folder) as found:
            return [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]


def note_use(folder: Path) -> None:
    """Remember that a model's folder is used now."""
    with contextlib.suppress(OSError):
        os.utime(folder / DESCRIPTION, follow_symlinks=False)


def _last_use(folder: Path) -> float:
    try:
        return os.lstat(folder / DESCRIPTION).st_mtime
    except OSError:
        return 0.0


def _slot_bytes_in(folder: Path) -> int:
    try:
        return os.lstat(folder / SLOTS).st_size
    except OSError:
        return 0


def _drop_if_unused(folder: Path) -> None:
    """Delete the slots and the index of a model that no process has open; its description stays."""
    check_contents(folder)
    if read_description(folder) is None:
        return
    with alone(folder / OPENING, wait_s=0.0):
        if any_alive(folder / OWNERS):
            return
        remove_leftovers(folder)
        for name in (*SQLITE_FILES, INDEX, SLOTS):
            with contextlib.suppress(FileNotFoundError):
                (folder / name).unlink()


class Growth:
    """Lets the slots of `folder` grow to `max_chunks`, and with a `room` only as far as that is left."""

    def __init__(self, folder: Path, max_chunks: int, room: Room | None) -> None:
        self.why_no_room = NO_ROOM  # for a chunk that finds no slot
        self._folder = folder
        self._max_chunks = max_chunks
        self._room = room
        self._rests_until = 0.0

    def make_room(self, index: DiskIndex, slots: SlotFile, wanted: int, refused: Counter[str]) -> None:
        """Set slots aside so that `wanted` more chunks find some, as far as that is possible.

        A step that fails is counted in `refused`.
        """
        if self._missing(index, wanted) <= 0 or time.monotonic() < self._rests_until:
            return
        try:
            with self._room.locked() if self._room is not None else contextlib.nullcontext():
                if (missing := self._missing(index, wanted)) > 0:  # another process may have grown it
                    self._grow(index, slots, missing)
        except (OSError, sqlite3.Error, CacheFileError) as error:
            with contextlib.suppress(OSError, sqlite3.Error):
                give_back(index, slots)
            self._rest(_REST_S, f"{NO_ROOM}: {error}")
            refused[self.why_no_room] += 1
            _log.warning("%s does not grow for %.0f seconds: %s", self._folder, _REST_S, error)

    def settle(self) -> None:
        """After opening: where models take more than the budget, as a lower one is new, unused ones go."""
        if self._room is None:
            return
        with contextlib.suppress(OSError, CacheFileError), self._room.locked():  # growing tries it again
            if self._room.left_bytes() < 0:
                self._room.take_over(0, self._folder)

    def _missing(self, index: DiskIndex, wanted: int) -> int:
        """How many slots more are needed and allowed."""
        there = index.num_slots()
        free = there - sum(index.counts())
        return min(wanted - free, self._max_chunks - there)

    def _grow(self, index: DiskIndex, slots: SlotFile, missing: int) -> None:
        give_back(index, slots)
        there = index.num_slots()
        step = min(max(_LEAST_STEP, there // _STEP_SHARE), max(1, _MOST_STEP_BYTES // slots.slot_bytes))
        step = min(max(step, missing), self._max_chunks - there)
        if self._room is not None:
            left = self._room.left_bytes()
            if left < missing * slots.slot_bytes:
                left = self._room.take_over(missing * slots.slot_bytes, self._folder)
            step = min(step, left // slots.slot_bytes)
        if step <= 0:
            self._rest(_ROOM_REST_S, TAKEN)
            return
        step = min(step, _free_bytes(self._folder) // slots.slot_bytes)
        if step <= 0:
            raise CacheFileError(f"the disk has no more than {_RESERVE_BYTES >> 20} MB left: free some of it")
        with index.transaction():
            there = index.num_slots()  # nobody else grows, but it may have been cleared
            try:
                slots.allocate(there + step, is_shared=True)
            except CacheFileError:
                step = min(step, missing)  # a smaller step may fit
                slots.allocate(there + step, is_shared=True)
            index.set_slots(there + step)
        self.why_no_room = NO_ROOM

    def _rest(self, seconds: float, why: str) -> None:
        self._rests_until = time.monotonic() + seconds
        self.why_no_room = why


def give_back(index: DiskIndex, slots: SlotFile) -> None:
    """Cut off what the index does not count: a step that failed, or of a process that died in it."""
    with index.transaction():
        slots.cut(index.num_slots())


def _free_bytes(folder: Path) -> int:
    """What slots may still take of the file system."""
    found = os.statvfs(folder)
    if found.f_blocks == 0:  # one that does not tell
        return _MOST_STEP_BYTES
    return found.f_bavail * found.f_frsize - _RESERVE_BYTES
