"""Text to token ids and back: one thread at a time, long texts apart from short ones, within bounds.

Whatever a tokenizer raises becomes an `InvalidRequestError`. Knows the tokenizer, no chats and no answers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.errors import InvalidRequestError, PromptTooLongError
from kvboost.locks import fork_safe_lock

_LONG_TEXT = 65_536  # characters; encoding more takes a tenth of a second and more
_COMPARED = 2_000  # characters by which two tokenizers are compared
_COUNTED_FROM = 4  # characters per allowed token: a longer text is counted in slices before it is encoded
_SLICE = 16_384  # characters
_CUT_TOKENS = 128  # that a cut between two slices may add: far more than it does


@dataclass(frozen=True)
class ReadingBounds:
    """What reading a prompt may cost while others wait.

    More than `max_tokens` tokens are refused before all of them are made. `go_on` is called between the parts
    of the work, and raises to end it. With `apart`, short texts do not wait for this one.
    """

    max_tokens: int | None = None
    go_on: Callable[[], None] = lambda: None
    apart: bool = False


UNBOUNDED = ReadingBounds()


class ControlTokens:
    """Tokens that are no text of their own: special ones, and added ones, which are matched in text."""

    def __init__(self, tokenizer: Any) -> None:
        added = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self.special_ids = special | {token for token, what in added.items() if what.special}
        self.ids = self.special_ids | frozenset(added)
        names = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
        texts = sorted(names | {str(what.content) for what in added.values()} - {""}, key=len, reverse=True)
        self.texts = tuple(texts)
        self._longest = max(map(len, texts), default=0)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        # Otherwise they are matched in a normalized text or depend on their neighbours, and a look at a seam
        # cannot tell.
        self.may_strip = any(what.lstrip or what.rstrip for what in added.values())
        self.are_literal = not any(what.normalized or what.single_word for what in added.values())

    def of(self, ids: Sequence[int]) -> list[int]:
        """Those among `ids`, in order."""
        return [token for token in ids if token in self.ids]

    def cross(self, before: str, after: str) -> bool:
        """Whether one would be found across the seam of two texts."""
        if not before or not after or not self.texts:
            return False
        tail, head = before[-self._longest :], after[: self._longest]
        around = tail + head
        for start in range(len(tail)):
            found = self._pattern.match(around, start)
            if found is not None and found.end() > len(tail):
                return True
        return False


class TextEncoder:
    """Encodes with `tokenizer`, from any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.control = ControlTokens(tokenizer)
        self._short = _LockedTokenizer(tokenizer)
        self._long: _LockedTokenizer | None = None  # for long texts, so that short ones need not wait

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        what: str = "chat",
        bounds: ReadingBounds = UNBOUNDED,
    ) -> list[int]:
        """The ids of `text`; errors call it `what`."""
        check_text(text, f"the {what}")
        try:
            locked = self._for_long_text(text) if bounds.apart and len(text) > _LONG_TEXT else self._short
            return locked.encode(text, add_special_tokens=add_special_tokens)
        except MemoryError:
            raise
        except Exception as error:  # tokenizers raise what they like
            raise InvalidRequestError(f"the tokenizer refused the {what}: {error}") from error

    def _for_long_text(self, text: str) -> _LockedTokenizer:
        """A copy of the tokenizer, made anew if the caller has changed the tokenizer since."""
        if self._long is None or not self._long.is_like(self._short, text):
            self._long = self._short.copied()
        return self._long

    def check_length(self, text: str, bounds: ReadingBounds) -> None:
        """Refuse a text that is certain to have too many tokens, without encoding all of it."""
        bounds.go_on()
        most = bounds.max_tokens
        if most is None or len(text) <= _COUNTED_FROM * most or self.control.may_strip:
            return
        at_least = 0
        for start in range(0, len(text), _SLICE):
            bounds.go_on()
            part = self.encode(text[start : start + _SLICE], add_special_tokens=False)
            at_least += max(0, len(part) - _CUT_TOKENS)
            if at_least > most:
                raise PromptTooLongError(most)

    def spelled(self, token_ids: Sequence[int]) -> str:
        """The exact text of ids, with special tokens and every space."""
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def without_trailing_special(self, ids: list[int], text: str) -> list[int]:
        """`ids` of `text` without the special tokens that the tokenizer put behind it."""
        if text.endswith(self.control.texts):
            return ids  # the caller wrote them
        end = len(ids)
        while end > 1 and ids[end - 1] in self.control.special_ids:
            end -= 1
        return ids[:end]


class _LockedTokenizer:
    """A tokenizer for one thread at a time: fast ones fail if two threads encode at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = fork_safe_lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._lock:
            encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(encoded["input_ids"])

    def copied(self) -> _LockedTokenizer:
        with self._lock:
            return _LockedTokenizer(copy.deepcopy(self.tokenizer))

    def is_like(self, other: _LockedTokenizer, text: str) -> bool:
        """Whether both have the same tokens and parts, and encode the beginning of `text` alike."""
        return _traits(self.tokenizer) == _traits(other.tokenizer) and all(
            self.encode(text[:_COMPARED], add_special_tokens=special)
            == other.encode(text[:_COMPARED], add_special_tokens=special)
            for special in (False, True)
        )


def _traits(tokenizer: Any) -> tuple[Any, ...]:
    """What decides how a tokenizer encodes, apart from its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [repr(getattr(backend, name, None)) for name in ("normalizer", "pre_tokenizer", "post_processor")]
    return len(tokenizer), getattr(tokenizer, "split_special_tokens", None), *parts


def check_text(text: str, what: str) -> None:
    """Refuse strings with halves of surrogate pairs: nothing can encode them."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise InvalidRequestError(
            f"{what} has half of a surrogate pair ({half}) at character {error.start}, "
            "which no tokenizer can read; decode the bytes that it came from with errors='replace', or pass "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', errors='replace')"
        ) from error
