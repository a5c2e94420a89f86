"""The bytes that all models of one disk cache folder may take together.

Slots grow one process at a time, and only as far as the slot files of all models stay under the limit. Where
there is no room, models that no process has open make some, those used longest ago first. Knows folders and
file sizes, no index and no chunks.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvboost.disk.folder import (
    DESCRIPTION,
    INDEX,
    OPENING,
    OWNERS,
    SLOTS,
    SQLITE_FILES,
    alone,
    check_contents,
    read_description,
    remove_leftovers,
)
from kvboost.disk.owner import any_alive
from kvboost.disk.trust import check_folder
from kvboost.errors import CacheFileError

GROWING = "growing"
_WAIT_S = 5.0
_NO_LIMIT = 1 << 62


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
