"""The warning of engines that reuse text approximately, where a test means them to."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from kvboost import ApproximateReuseWarning


@contextlib.contextmanager
def approximate_reuse_expected() -> Iterator[list[ApproximateReuseWarning]]:
    """Inside, the warning is no error, and none comes without need; yields those that came."""
    caught: list[ApproximateReuseWarning] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", ApproximateReuseWarning)
        shown = warnings.showwarning

        def note(message: Any, *where: Any, **more: Any) -> None:
            if isinstance(message, ApproximateReuseWarning):
                caught.append(message)
            else:
                shown(message, *where, **more)

        warnings.showwarning = note
        yield caught
    for warning in caught:
        assert any(result.approximate_tokens for result in warning.results)
