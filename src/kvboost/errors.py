"""Exceptions of kvboost. Every message says what was expected, what came, and what to change.

KVBoostError
├── InvalidRequestError (ValueError)       a prompt or option that cannot be served
│   └── PromptTooLongError                 a prompt of more tokens than fit
├── UnsupportedModelError (ValueError)     a model whose KV cannot be reused safely
├── UnstorableKVError (ValueError)         KV that the chosen encoding cannot hold
├── PartialResultsError                    some of many prompts failed; it carries the other results
├── BuiltinModelMissingError               the built-in model is not installed
└── CacheFileError                         a saved cache that cannot be used

ApproximateReuseWarning (UserWarning)     an engine reused text approximately for the first time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KVBoostError(Exception):
    """Base of all errors that kvboost raises on purpose."""


class InvalidRequestError(KVBoostError, ValueError):
    """A prompt or an option that cannot be served; nothing was computed or stored."""


class PromptTooLongError(InvalidRequestError):
    """A prompt of more than `max_tokens` tokens, told before all of them were made."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(f"the prompt has more than the {max_tokens} tokens that fit; shorten it")
        self.max_tokens = max_tokens


class UnsupportedModelError(KVBoostError, ValueError):
    """The model keeps its KV in a way that kvboost cannot reuse safely."""


class UnstorableKVError(KVBoostError, ValueError):
    """KV that the chosen encoding cannot hold, such as NaN in integers; the message is the reason."""


class PartialResultsError(KVBoostError):
    """Some of many prompts failed; `results` has the others in their places, `failures` why, by index."""

    def __init__(self, results: list[Any], failures: dict[int, Exception]) -> None:
        self.results = results
        self.failures = failures
        first = min(failures)
        error = failures[first]
        super().__init__(
            f"{len(failures)} of {len(results)} prompts failed; prompt {first}: "
            f"{type(error).__name__}: {error} (the other answers are in the error's results)"
        )


class ApproximateReuseWarning(UserWarning):
    """Text was reused approximately, for the first time on this engine.

    It comes when the answers are there and stored. `results` has them: as an error, too, it loses nothing.
    """

    def __init__(self, message: str, results: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


class BuiltinModelMissingError(KVBoostError):
    """The package that carries the built-in model, or a package that reads it, is not installed."""


class CacheFileError(KVBoostError):
    """A saved cache file that is damaged or belongs to another model."""
