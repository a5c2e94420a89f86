"""Checkouts to compare: a folder as it is, or a revision in a temporary worktree of its own.

Knows git and folders, nothing of what is run in them.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class CheckoutError(Exception):
    """A side is neither a folder with a checkout nor a revision."""


@dataclass(frozen=True)
class Checkout:
    """One side: "old" or "new", what the user called it, its folder, and its commit if it is a revision."""

    side: str
    given: str
    folder: Path
    commit: str | None

    @property
    def source(self) -> Path:
        """What goes on the path of Python."""
        return self.folder / "src"

    def as_record(self) -> dict[str, str | None]:
        return {"given": self.given, "commit": self.commit}


def is_checkout(folder: Path) -> bool:
    """Whether a folder holds the project."""
    return (folder / "src" / "kvboost" / "__init__.py").is_file()


@contextmanager
def opened(repository: Path, old: str, new: str) -> Iterator[tuple[Checkout, Checkout]]:
    """Both sides; worktrees that were made for them are removed at the end, whatever happens."""
    commits = {given: _commit_of(repository, given) for given in (old, new)}
    temporary = Path(tempfile.mkdtemp(prefix="kvboost-ab-"))
    try:
        sides = [
            _open_one(repository, side, given, commits[given], temporary / side)
            for side, given in (("old", old), ("new", new))
        ]
        yield sides[0], sides[1]
    finally:
        _remove(repository, temporary)


def _commit_of(repository: Path, given: str) -> str | None:
    """The commit that `given` names; None where it is a folder with a checkout."""
    if is_checkout(Path(given)):
        return None
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{given}^{{commit}}")
    if found.returncode == 0:
        return found.stdout.strip()
    if Path(given).is_dir():
        raise CheckoutError(f"{given} is a folder without src/kvboost: expected a checkout of the project")
    raise CheckoutError(f"{given} is neither a folder nor a revision that git knows in {repository}")


def _open_one(repository: Path, side: str, given: str, commit: str | None, folder: Path) -> Checkout:
    if commit is None:
        return Checkout(side, given, Path(given).resolve(), None)
    made = _git(repository, "worktree", "add", "--detach", "--quiet", str(folder), commit)
    if made.returncode != 0:
        raise CheckoutError(f"git cannot check out {given}: {' '.join(made.stderr.split())}")
    if not is_checkout(folder):
        raise CheckoutError(f"{given} has no src/kvboost")
    return Checkout(side, given, folder.resolve(), commit)


def _remove(repository: Path, temporary: Path) -> None:
    """Take away the folder and what git knows of the worktrees in it, even of one that is not finished."""
    for folder in temporary.iterdir():
        _git(repository, "worktree", "remove", "--force", "--force", str(folder))
    shutil.rmtree(temporary, ignore_errors=True)


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(repository), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise CheckoutError("git is not installed: give folders instead of revisions") from error
