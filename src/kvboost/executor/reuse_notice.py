"""Says once per engine that text was reused approximately, when the answers are there and stored.

Knows results, and nothing of how they came about.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvboost.batching.many import Outcome
from kvboost.errors import ApproximateReuseWarning
from kvboost.locks import fork_safe_lock
from kvboost.models import GenerationResult

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class ReuseNotice:
    """The one warning of an engine; `overlap` says that its chunks see little of the text before them."""

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap
        self._lock = fork_safe_lock(around_data=True)
        self._is_told = False
        self._num_paused = 0

    def told(self, result: GenerationResult) -> GenerationResult:
        """`result`, after a warning where it is the first that needs one."""
        self.warn([result])
        return result

    def over(self, outcomes: Iterator[Outcome[Result]]) -> Iterator[Outcome[Result]]:
        """The outcomes of a call, then the warning; where some failed, it is only logged."""
        found: dict[int, Any] = {}
        has_failed = False
        for outcome in outcomes:
            if isinstance(outcome.result, Exception):
                has_failed = True
            else:
                found[outcome.index] = outcome.result
            yield outcome
        (self.log if has_failed else self.warn)([found[index] for index in sorted(found)])

    def warn(self, results: Sequence[Any]) -> None:
        """Warn of the approximate reuse in `results`, at the line that called kvboost."""
        if message := self._take_message(results):
            warnings.warn(ApproximateReuseWarning(message, results), stacklevel=_frames_inside())

    def log(self, results: Sequence[Any]) -> None:
        """Log it instead: for threads in which no warning may become an error."""
        if message := self._take_message(results):
            _log.warning(message)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is said, and nothing counts as said: for whoever reports on the reuse itself."""
        with self._lock:
            self._num_paused += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_paused -= 1

    def silence(self) -> None:
        """Say nothing from now on: nobody asks this engine for answers."""
        self._is_told = True

    def _take_message(self, results: Sequence[Any]) -> str:
        """What to say of `results`; empty where there is nothing to say, or it was said."""
        if self._is_told:
            return ""
        approximate = sum(result.approximate_tokens for result in results)
        if not approximate:
            return ""
        with self._lock:
            if self._is_told or self._num_paused:
                return ""
            self._is_told = True
        total = sum(result.prompt_tokens for result in results)
        return f"{approximate:,} of {total:,} prompt tokens were reused approximately: {self._advice()}"

    def _advice(self) -> str:
        why, exact = "it was found at another place, and only a part of it was computed again", ""
        if self._overlap:
            why, exact = "it was read with little of the text before it (overlap_k)", "overlap_k=0 and "
        return (
            f"their KV was in the cache, but {why}, so answers may differ from those of a full prefill. "
            f'For exact ones, use {exact}mode="prefix_cache" (--mode prefix_cache); results count both in '
            "exact_tokens and approximate_tokens. How far off it is, and how to choose: docs/limits.md. "
            "An engine says this once."
        )


def _frames_inside() -> int:
    """The `stacklevel`, for the function that calls this, of the first frame outside kvboost."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kvboost":
        frame, level = frame.f_back, level + 1
    return level
