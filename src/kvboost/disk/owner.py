"""The processes that use a folder of a disk tier, as they see each other: one locked file for each.

The system drops the lock when a process ends, however it ends. Knows names and locks, nothing of the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from pathlib import Path

from kvboost.disk.trust import check_folder, open_private

_OWNER_NAME = re.compile("[0-9a-f]{32}")


def is_alive(folder: Path, name: object) -> bool:
    """Whether the process behind `name` still runs; removes what it left where it does not."""
    if not isinstance(name, str) or _OWNER_NAME.fullmatch(name) is None:
        return False
    try:
        fd = open_private(folder / name, os.O_RDWR)
    except FileNotFoundError:
        return False
    except PermissionError:  # of root, say: nobody can tell, so it is left alone
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        (folder / name).unlink()
    return False


def any_alive(folder: Path) -> bool:
    """Whether any process uses the folder; removes what dead ones left."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    alive = [name for name in names if is_alive(folder, name)]  # all are asked: dead ones are removed
    return bool(alive)


class Owner:
    """This process, as others can see it.

    It must be made while no other process makes one or looks for dead ones. `has_company` says whether
    another one was alive then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = uuid.uuid4().hex
        self._pid = os.getpid()
        folder.mkdir(mode=0o700, exist_ok=True)
        check_folder(folder)
        self.has_company = any_alive(folder)
        self._fd = open_private(folder / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def is_alive(self, name: object) -> bool:
        """Whether the process behind `name` still runs; removes what it left where it does not."""
        return name == self.name or is_alive(self._folder, name)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if os.getpid() == self._pid:  # a forked child does not speak for its parent
                with contextlib.suppress(OSError):
                    (self._folder / self.name).unlink()
            os.close(fd)
