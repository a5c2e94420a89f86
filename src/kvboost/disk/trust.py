"""Files and folders that nobody else can change, checked before anything in them is believed or touched.

Trusted owners are this process's user and root. Knows the file system, nothing of what the files hold.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path

from kvboost.errors import CacheFileError

ADVICE = "use another folder, or give this process access to it"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_IS_LINK = (errno.ELOOP, errno.EMLINK)  # what O_NOFOLLOW says of a link
# O_NONBLOCK: a FIFO must not hang the open. Windows has none of these, and needs O_BINARY.
_CAREFUL = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_MOST_LINKS = 40


def real_folder(folder: str | os.PathLike[str]) -> Path:
    """The real path of a folder that a user names, which need not be there; trusted links are followed.

    `CacheFileError` where somebody else could put another folder in its place: a link or a folder on the way
    belongs to another user, or everybody may write to it and it is not sticky. A folder on the way that a
    group may write to is allowed (project folders usually are): what a member puts there belongs to
    that member, and is refused for that.
    """
    try:
        return _walk(folder)
    except OSError as error:
        raise CacheFileError(f"{folder} cannot be used ({error.strerror}): {ADVICE}") from error


def _walk(folder: str | os.PathLike[str]) -> Path:
    here, rest, links = Path("/"), list(reversed((Path.cwd() / folder).parts[1:])), 0
    while rest:
        _check_way(here)
        part = rest.pop()
        if part == "..":
            here = here.parent
            continue
        try:
            found = os.lstat(here / part)
        except (FileNotFoundError, NotADirectoryError):
            return Path(os.path.normpath(here.joinpath(part, *reversed(rest))))
        if not stat.S_ISLNK(found.st_mode):
            here = here / part
            continue
        _check_owner(here / part, found)
        links += 1
        if links > _MOST_LINKS:
            raise CacheFileError(f"{folder} leads in a circle of links: use another folder")
        rest += reversed((here / os.readlink(here / part)).parts[1:])
        here = Path("/")
    return here


def _check_way(folder: Path) -> None:
    """Refuse a folder on the way in which somebody else could exchange what leads on."""
    found = os.lstat(folder)
    _check_owner(folder, found)
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise CacheFileError(
            f"everybody may exchange what is in {folder} (mode {_mode(found)}): run `chmod o-w "
            f"{shlex.quote(str(folder))}`, or use a disk cache folder elsewhere"
        )


def check_folder(folder: Path) -> None:
    """Refuse what is no folder, or one that others own or may write to; a link is no folder."""
    found = os.lstat(folder)
    if stat.S_ISLNK(found.st_mode):
        raise CacheFileError(f"{folder} is a link: use a folder that is none, or remove the link")
    if not stat.S_ISDIR(found.st_mode):
        raise CacheFileError(f"{folder} is a file; a disk cache needs a folder: use another name")
    _check_private(folder, found)


def check_file(path: Path) -> bool:
    """Refuse anything but a file that nobody else can change; whether there is one at all."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    _check_private_file(path, found)
    return True


def open_private(path: Path, flags: int) -> int:
    """Open a file that nobody else can change, or make it with mode 0600; all else is refused untouched."""
    fd = _open(path, flags, 0o600)
    try:
        _check_private_file(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file, whoever owns it, or make it; links are not followed, and nothing hangs."""
    fd = _open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CacheFileError(f"{path} is no regular file: remove it, or use another folder")
    return fd


def _open(path: Path, flags: int, mode: int) -> int:
    try:
        return os.open(path, flags | _CAREFUL, mode)
    except OSError as error:
        if error.errno in _IS_LINK:
            raise CacheFileError(f"{path} is a link: remove it, or use another folder") from error
        raise


def _check_private_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = "a link" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise CacheFileError(f"{path} is {what}: remove it, or use another folder")
    if found.st_nlink > 1:
        raise CacheFileError(
            f"{path} has another name (a hard link), under which it could be changed: remove one of them, "
            "or use another folder"
        )
    _check_private(path, found)


def _check_private(path: Path, found: os.stat_result) -> None:
    _check_owner(path, found)
    if found.st_mode & _OTHERS_WRITE:
        raise CacheFileError(
            f"others may write to {path} (mode {_mode(found)}), so what it holds need not be this model's: "
            "use a folder of your own, or, if nobody else has been at this one, run "
            f"`chmod go-w {shlex.quote(str(path))}`"
        )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise CacheFileError(
            f"{path} belongs to user {found.st_uid}, who could put anything in it, and this process runs as "
            f"user {os.geteuid()}: use a folder of your own"
        )


def _mode(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):04o}"
