"""An engine for the length of one command: loaded with a spinner, quiet, closed; and the folder of --cache.

Turns what goes wrong while a model is loaded into one error. Knows when a folder may be used and what to say
about loading it; the format is snapshot's. Knows no command.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvboost.errors import ApproximateReuseWarning, CacheFileError, KVBoostError

if TYPE_CHECKING:
    from kvboost.engine import InferenceEngine

FOLDER = click.Path(file_okay=False, path_type=Path)


@contextmanager
def opened_engine(
    model: str, options: Mapping[str, Any], console: Console | None = None
) -> Iterator[InferenceEngine]:
    """Load `model` and yield its engine; with `console`, a spinner shows what takes time."""
    with _quiet():
        with nullcontext() if console is None else console.status(_loading_text(model)):
            engine = _load(model, options)
        with engine:
            yield engine


def _load(model: str, options: Mapping[str, Any]) -> InferenceEngine:
    from kvboost.engine import InferenceEngine

    try:
        return InferenceEngine.from_pretrained(model, **options)
    except KVBoostError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, AssertionError) as error:  # what loading raises
        raise KVBoostError(f"cannot load {model}: {error}") from error


def _loading_text(model: str) -> str:
    from kvboost.loading.embedded import BUILTIN_NAME, checkpoint_folder

    if model == BUILTIN_NAME and not checkpoint_folder().is_dir():
        return "converting the built-in model (only the first time, about 20 seconds)"
    return f"loading {model}"


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and chatter of transformers inside; Python warnings as one line each."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            warnings.simplefilter("always", ApproximateReuseWarning)  # a line, never an error
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _show_warning(message: Warning | str, *_where: Any, **_more: Any) -> None:
    warn(" ".join(str(message).split()))


@contextmanager
def warnings_afterwards() -> Iterator[None]:
    """Show the Python warnings of the block when it is over, not in the middle of a line."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            shown = [each.message for each in caught]
    for message in shown:
        _show_warning(message)


# --- the folder behind --cache ---------------------------------------------------------------------


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
