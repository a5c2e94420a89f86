"""A file of fixed-size slots, allocated in full before it is used. Knows bytes, no chunks and no index.

Reads and writes go through `preadv` and `pwritev`, not through a memory map: a bad sector or a truncated file
under a map kills the process, and a stuck page fault has no deadline.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from kvboost.errors import CacheFileError

MOST_SLOTS = 1 << 31


class SlotFile:
    """Slots of `slot_bytes` bytes each, of which `num_slots` are set aside at once."""

    def __init__(self, path: Path, slot_bytes: int, num_slots: int) -> None:
        self.path = path
        self.slot_bytes = slot_bytes
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise CacheFileError(
                f"{path} cannot be opened ({error.strerror}): use another folder, or give this process access"
            ) from error
        try:
            self._allocate(num_slots)
        except CacheFileError:
            self.close()
            raise

    def _allocate(self, num_slots: int) -> None:
        """Make the file exactly so long, with its blocks set aside where the system can do that."""
        size = self.slot_bytes * num_slots
        try:
            if os.fstat(self._fd).st_size > size:
                os.ftruncate(self._fd, size)
            if size and hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(self._fd, 0, size)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                        raise
            if os.fstat(self._fd).st_size < size:
                os.ftruncate(self._fd, size)
        except OSError as error:
            needed = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
            raise CacheFileError(
                f"{self.path} needs {needed} on disk and did not get them ({error.strerror}): free some, or "
                "lower the budget"
            ) from error

    def reset(self, num_slots: int) -> None:
        """Give all bytes back to the disk, and take `num_slots` slots anew."""
        self._allocate(0)
        self._allocate(num_slots)

    def was_replaced(self) -> bool:
        """Whether another file has taken this one's place."""
        try:
            found, mine = self.path.stat(), os.fstat(self._fd)
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
