"""The folder of a disk tier: private, described in a file of its own, and opened by one process at a time.

The processes that use it see each other: one locked file for each. The system drops the lock when a process
ends, however it ends. Knows sizes and names, no chunks and no index.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from kvboost.disk.trust import ADVICE, check_file, check_folder, open_private, real_folder
from kvboost.errors import CacheFileError

DESCRIPTION = "tier.json"
INDEX = "index.sqlite"
SQLITE_FILES = (f"{INDEX}-wal", f"{INDEX}-shm", f"{INDEX}-journal")  # SQLite's own, beside the index
DAMAGED_INDEX = f"{INDEX}.damaged"
SLOTS = "slots.bin"
OPENING = "opening"
OWNERS = "owners"
_OPENED = (DESCRIPTION, INDEX, *SQLITE_FILES, SLOTS, OPENING)
_LEFT_OVER = re.compile(re.escape(DESCRIPTION) + r"\.[0-9a-f]{32}")  # of a process that died
_OWNER_NAME = re.compile("[0-9a-f]{32}")
_FORMAT = "kvboost-disk"
VERSION = 2
_VERSIONS = (1, 2)  # that are read; a folder keeps its own


class FolderDescription:
    """What the folder is to hold, and how that is said in it."""

    def __init__(self, folder: Path, slot_bytes: int, max_chunks: int, label: str) -> None:
        self._folder = folder
        self.slot_bytes = slot_bytes
        self.max_chunks = max_chunks
        self.label = label or str((read_description(folder) or {}).get("label", ""))
        self.version = VERSION

    def check(self) -> None:
        """Raise where the folder was made for something else; one of an earlier version stays so."""
        found = read_description(self._folder)
        if found is not None and found["version"] not in _VERSIONS:
            raise CacheFileError(
                f"{self._folder} has format version {found['version']}, this kvboost reads up to {VERSION}"
            )
        if found is not None and found["slot_bytes"] != self.slot_bytes:
            raise CacheFileError(
                f"{self._folder} was made with slot_bytes={found['slot_bytes']}, this needs "
                f"{self.slot_bytes}: use another folder, or clear this one"
            )
        if found is not None:
            self.version = int(found["version"])

    def write(self, owner: str) -> None:
        """Say it, where it is not said yet; `owner` names the temporary file."""
        fields = {
            "format": _FORMAT,
            "version": self.version,
            "slot_bytes": self.slot_bytes,
            "max_chunks": self.max_chunks,
            "label": self.label,
        }
        sealed = {**fields, "check": seal(fields)}
        if sealed != read_description(self._folder):
            temporary = self._folder / f"{DESCRIPTION}.{owner}"
            fd = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with open(fd, "w") as file:
                file.write(json.dumps(sealed))
            temporary.replace(self._folder / DESCRIPTION)


def read_description(folder: Path) -> dict[str, Any] | None:
    """What the folder's description says; None where there is none, or it is damaged."""
    try:
        with open(open_private(folder / DESCRIPTION, os.O_RDONLY)) as file:
            found = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    numbers = ("version", "slot_bytes", "max_chunks")
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        return None
    whole = all(type(found.get(name)) is int and found[name] >= 0 for name in numbers)
    if not whole or not isinstance(found.get("label"), str):
        return None
    return found if found.get("check") == seal(found) else None


def seal(fields: dict[str, Any]) -> str:
    """A checksum of all fields but itself."""
    others = {name: value for name, value in fields.items() if name != "check"}
    return str(xxhash.xxh3_64_hexdigest(json.dumps(others, sort_keys=True).encode()))


def make_private_folder(folder: str | os.PathLike[str]) -> Path:
    """The real path of a folder that nobody else can change, made if need be with mode 0700.

    `CacheFileError` where there is none, or others own it or may write to it.
    """
    try:
        real = real_folder(folder)
        missing = [path for path in (real, *real.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        real = real_folder(folder)  # somebody else may have made it meanwhile
        check_folder(real)
    except OSError as error:
        raise CacheFileError(f"{folder} cannot be made ({error.strerror}): {ADVICE}") from error
    return real


def check_contents(folder: Path) -> None:
    """Refuse a tier's folder where others can change it, or any file in it that is going to be opened."""
    try:
        check_folder(folder)
        for name in _OPENED:
            check_file(folder / name)
        owners = folder / OWNERS
        if os.path.lexists(owners):
            check_folder(owners)
            for name in os.listdir(owners):
                check_file(owners / name)
    except OSError as error:
        raise CacheFileError(f"{folder} cannot be used ({error.strerror}): {ADVICE}") from error


def can_be_written(folder: Path) -> bool:
    """Whether this process may make files in the folder."""
    effective = os.access in os.supports_effective_ids
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=effective)


def remove_leftovers(folder: Path) -> None:
    """Delete what nobody reads any more: an index that was set aside, and descriptions never put in place."""
    for name in os.listdir(folder):
        if name == DAMAGED_INDEX or _LEFT_OVER.fullmatch(name):
            with contextlib.suppress(OSError):  # they are only in the way
                (folder / name).unlink()


@contextlib.contextmanager
def alone(path: Path, *, wait_s: float) -> Iterator[None]:
    """Inside, no other process is; the system unlocks it where this one dies.

    `BlockingIOError` where another one is still inside after `wait_s` seconds.
    """
    fd = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        if not _is_locked_within(fd, wait_s):
            raise BlockingIOError(f"another process holds the lock on {path}")
        yield
    finally:
        os.close(fd)


def _is_locked_within(fd: int, wait_s: float) -> bool:
    until = time.monotonic() + wait_s
    while not (is_locked := _can_lock(fd)) and time.monotonic() < until:
        time.sleep(0.01)
    return is_locked


def _can_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- the processes that use it -------------------------------------------------------------------


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
        if not _can_lock(fd):
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
