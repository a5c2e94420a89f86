"""A file of fixed-size slots, allocated before they are used. Knows bytes, no chunks and no index.

Reads and writes go through `preadv` and `pwritev`, not through a memory map: a bad sector or a truncated file
under a map kills the process, and a stuck page fault has no deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from kvboost.disk.trust import open_private
from kvboost.errors import CacheFileError

MOST_SLOTS = 1 << 31


class SlotFile:
    """Slots of `slot_bytes` bytes each; those that were allocated have their blocks on disk."""

    def __init__(self, path: Path, slot_bytes: int, *, read_only: bool = False) -> None:
        self.path = path
        self.slot_bytes = slot_bytes
        try:
            self._fd = open_private(path, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise CacheFileError(
                f"{path} cannot be opened ({error.strerror}): use another folder, or give this process access"
            ) from error

    @property
    def size_bytes(self) -> int:
        """What is set aside on disk; 0 when it is closed."""
        return os.fstat(self._fd).st_size if self._fd >= 0 else 0

    def cut(self, num_slots: int) -> None:
        """Give back what lies behind so many slots; never makes it longer."""
        if self.size_bytes > self.slot_bytes * num_slots:
            os.ftruncate(self._fd, self.slot_bytes * num_slots)

    def allocate(self, num_slots: int, *, is_shared: bool = False) -> None:
        """Make the file exactly so long, with all its blocks set aside where the system can do that.

        With `is_shared`, what is there is left as it is: others may be writing to it.
        """
        size, before = self.slot_bytes * num_slots, self.size_bytes
        start = before if is_shared else 0
        try:
            if before > size:
                os.ftruncate(self._fd, size)
            if size > start and hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(self._fd, start, size - start)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                        raise
            if self.size_bytes < size:
                os.ftruncate(self._fd, size)
        except OSError as error:
            with contextlib.suppress(OSError):  # what was got of it is no use
                os.ftruncate(self._fd, min(before, size))
            raise CacheFileError(
                f"{self.path} needs {_in_words(size)} on disk and did not get them ({error.strerror}): free "
                "some, or lower the budget"
            ) from error

    def was_replaced(self) -> bool:
        """Whether another file has taken this one's place."""
        try:
            found, mine = os.lstat(self.path), os.fstat(self._fd)
        except OSError:
            return True
        return (found.st_ino, found.st_dev) != (mine.st_ino, mine.st_dev)

    def write(self, slot: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write `parts` one after the other, from byte `offset` of a slot on."""
        self._check(slot, offset, parts)
        _move_all(os.pwritev, self._fd, parts, slot * self.slot_bytes + offset)

    def read_into(self, slot: int, parts: Sequence[memoryview]) -> None:
        """Fill `parts` from the start of a slot; EOFError where the file ends before they are full."""
        self._check(slot, 0, parts)
        _move_all(os.preadv, self._fd, parts, slot * self.slot_bytes)

    def _check(self, slot: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        size = offset + sum(len(part) for part in parts)
        if not 0 <= slot < MOST_SLOTS or size > self.slot_bytes:
            raise ValueError(f"{size} bytes do not fit into slot {slot} of {self.slot_bytes} bytes")

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _in_words(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _move_all(call: object, fd: int, parts: Sequence[bytes | memoryview], at: int) -> None:
    """Repeat `preadv` or `pwritev` until all `parts` were moved: either may stop in the middle."""
    rest = [memoryview(part) for part in parts if len(part)]
    while rest:
        moved = call(fd, rest[:512], at)  # type: ignore[operator]
        if moved <= 0:
            raise EOFError("the file ends too early")
        at += moved
        while rest and moved >= len(rest[0]):
            moved -= len(rest[0])
            rest.pop(0)
        if moved:
            rest[0] = rest[0][moved:]
