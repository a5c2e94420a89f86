"""The folder of a disk tier: private, described in a file of its own, and opened by one process at a time.

Knows sizes and names, no chunks and no index.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from kvboost.errors import CacheFileError

DESCRIPTION = "tier.json"
ADVICE = "use another folder, or give this process access to it"
_FORMAT = "kvboost-disk"
_VERSION = 1


class FolderDescription:
    """What the folder is to hold, and how that is said in it."""

    def __init__(self, folder: Path, slot_bytes: int, max_chunks: int, label: str) -> None:
        self._folder = folder
        self._slot_bytes = slot_bytes
        self._max_chunks = max_chunks
        self.label = label or str((read_description(folder) or {}).get("label", ""))

    def check(self) -> None:
        """Raise where the folder was made for something else."""
        found = read_description(self._folder)
        if found is not None and found["version"] != _VERSION:
            raise CacheFileError(
                f"{self._folder} has format version {found['version']}, this kvboost reads version {_VERSION}"
            )
        if found is not None and found["slot_bytes"] != self._slot_bytes:
            raise CacheFileError(
                f"{self._folder} was made with slot_bytes={found['slot_bytes']}, this needs "
                f"{self._slot_bytes}: use another folder, or clear this one"
            )

    def write(self, owner: str) -> None:
        """Say it, where it is not said yet; `owner` names the temporary file."""
        fields = {
            "format": _FORMAT,
            "version": _VERSION,
            "slot_bytes": self._slot_bytes,
            "max_chunks": self._max_chunks,
            "label": self.label,
        }
        sealed = {**fields, "check": seal(fields)}
        if sealed != read_description(self._folder):
            temporary = self._folder / f"{DESCRIPTION}.{owner}"
            temporary.write_text(json.dumps(sealed))
            temporary.chmod(0o600)
            temporary.replace(self._folder / DESCRIPTION)


def read_description(folder: Path) -> dict[str, Any] | None:
    """What the folder's description says; None where there is none, or it is damaged."""
    try:
        found = json.loads((folder / DESCRIPTION).read_text())
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


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner can look into; a clear error where that cannot be."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        if not folder.is_dir():
            raise CacheFileError(f"{folder} is a file; a disk cache needs a folder: use another name")
    except OSError as error:
        raise CacheFileError(f"{folder} cannot be made ({error.strerror}): {ADVICE}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise CacheFileError(f"{folder} cannot be written to: {ADVICE}")


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Inside, no other process is; the system unlocks it where this one dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
