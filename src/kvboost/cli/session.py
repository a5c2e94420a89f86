"""An engine for the length of one command: loaded with a spinner, quiet, closed at the end.

Turns what goes wrong while a model is loaded into one error. Knows no command.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from kvboost.engine import InferenceEngine


@contextmanager
def opened_engine(
    model: str, options: Mapping[str, Any], console: Console | None = None
) -> Iterator[InferenceEngine]:
    """Load `model` and yield its engine; with `console`, a spinner shows what takes time."""
    with _quiet():
        if console is None:
            engine = _load(model, options)
        else:
            with console.status(_loading_text(model)):
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
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _show_warning(message: Warning | str, *_where: Any, **_more: Any) -> None:
    click.secho(f"warning: {' '.join(str(message).split())}", fg="yellow", err=True)
