"""The folder behind `--cache`: where a saved cache comes from and goes to.

Knows when a folder may be used and what to say about loading it; the format is snapshot's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvboost.errors import CacheFileError

if TYPE_CHECKING:
    from kvboost.engine import InferenceEngine

FOLDER = click.Path(file_okay=False, path_type=Path)


def holds_cache(folder: Path) -> bool:
    """Whether a cache was saved in `folder`. An error where none could be: better now than after the work."""
    from kvboost.disk.snapshot import HEADER

    if (folder / HEADER).is_file():
        return True
    if folder.is_dir() and any(folder.iterdir()):
        raise CacheFileError(f"{folder} holds other files and no saved cache; give an empty or a new folder")
    return False


def unlimited(engine_options: dict[str, Any]) -> dict[str, Any]:
    """The options without a limit on chunks where none was given.

    What does not fit would be gone when the cache is saved over the old one.
    """
    return {"max_chunks": None, **engine_options}


def load_cache(engine: InferenceEngine, folder: Path, *, progress: bool | None = None) -> int:
    """Load what is saved in `folder`; returns the number of chunks. What was left out is said."""
    report = engine.load(folder, progress=progress)
    if report.corrupt:
        warn(f"{report.corrupt} chunks of {folder} are damaged, or follow one that is, and were left out")
    if report.no_room:
        warn(f"{report.no_room} chunks of {folder} had no room: see --max-chunks and --max-cache-bytes")
    return report.loaded


def warn(message: str) -> None:
    """A line on stderr."""
    click.secho(f"warning: {message}", fg="yellow", err=True)
