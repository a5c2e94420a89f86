"""From what a caller passes (text, token ids, chat messages) to the token ids the model reads.

The reader remembers its own answers, so that the next turn of a chat finds its KV again: `chats` keeps them,
and puts them where the same answer comes back in messages. Knows the tokenizer, no model and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvboost.errors import InvalidRequestError
from kvboost.requests.chats import ChatReader, RememberedAnswers
from kvboost.requests.encoding import UNBOUNDED, ReadingBounds, TextEncoder, check_text

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


class TokenizedPrompt:
    """`token_ids` `[tokens]` int64, and the text they stand for, which is made when it is asked for."""

    def __init__(self, token_ids: np.ndarray, text: str | Callable[[], str]) -> None:
        self.token_ids = token_ids
        self._text = text

    @property
    def text(self) -> str:
        if not isinstance(self._text, str):
            self._text = self._text()
        return self._text

    def __len__(self) -> int:
        return len(self.token_ids)


class PromptReader:
    """Tokenizes prompts and remembers answers, per salt and bounded."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._encoder = TextEncoder(tokenizer)
        self.answers = RememberedAnswers()
        self._chats = ChatReader(self._encoder, self.answers)

    def read(
        self,
        prompt: Prompt | TokenizedPrompt,
        salt: str = "",
        *,
        warming: bool = False,
        bounds: ReadingBounds = UNBOUNDED,
    ) -> TokenizedPrompt:
        """Tokenize `prompt`, once. With `warming`, leave out what only the end of a prompt has."""
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        if isinstance(prompt, str):
            self._encoder.check_length(prompt, bounds)
            ids = self._encoder.encode(prompt, add_special_tokens=True, what="prompt", bounds=bounds)
            if warming:
                ids = self._encoder.without_trailing_special(ids, prompt)
            text = prompt
        elif isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            ids, text = self._chats.read(prompt, salt, warming, bounds)
        else:
            found = self._checked_ids(prompt)
            self._check(found)
            return TokenizedPrompt(found, lambda: str(self.tokenizer.decode(found.tolist())))
        if not text:  # a tokenizer may put special tokens around nothing
            ids = []
        tokens = np.asarray(ids, dtype=np.int64)
        self._check(tokens)
        return TokenizedPrompt(tokens, text)

    def read_piece(self, text: Any, what: str, bounds: ReadingBounds = UNBOUNDED) -> np.ndarray:
        """The ids `[tokens]` of text or ids that stand among others: without special tokens around them."""
        if isinstance(text, str):
            self._encoder.check_length(text, bounds)
            text = self._encoder.encode(text, add_special_tokens=False, what=what, bounds=bounds)
        ids = self._checked_ids(text, what)
        self._check(ids, what)
        return ids

    def read_continuation(self, prompt: Prompt, tokens: TokenizedPrompt, continuation: Prompt) -> list[int]:
        """The ids of `continuation` (text or ids) behind `prompt`, which reads as `tokens`.

        Text is encoded together with the prompt's, where that leaves the prompt's own tokens as they are.
        """
        ids: list[int] = []
        what = "continuation"
        if not isinstance(continuation, str):
            ids = self._checked_ids(continuation).tolist()
        else:
            check_text(continuation, f"the {what}")
            if isinstance(prompt, str):
                joined = self._encoder.encode(prompt + continuation, add_special_tokens=True, what=what)
                joined = self._encoder.without_trailing_special(joined, prompt + continuation)
                size = len(tokens)
                kept = len(joined) > size and joined[:size] == tokens.token_ids.tolist()
                ids = joined[size:] if kept else []
            ids = ids or self._encoder.encode(continuation, add_special_tokens=False, what=what)
        self._check(np.asarray(ids, dtype=np.int64), what)
        return ids

    def remember_answer(self, text: str, token_ids: Sequence[int], salt: str) -> None:
        """Keep the ids of an answer for when its text comes back in messages.

        One with special tokens inside is not kept: its text does not show them.
        """
        ids = list(token_ids)
        special = self._encoder.control.special_ids
        while ids and ids[-1] in special:
            ids.pop()
        if ids and text and special.isdisjoint(ids):
            self.answers.put(salt, text, ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated ids, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _check(self, ids: np.ndarray, what: str = "prompt") -> None:
        if not len(ids):
            raise InvalidRequestError(f"the {what} is empty; it needs at least one token")
        if (largest := int(ids.max())) >= self._vocab_size:
            raise InvalidRequestError(
                f"token id {largest} is outside the model's vocabulary (0 to {self._vocab_size - 1}); "
                "do tokenizer and model belong together?"
            )

    def _checked_ids(self, prompt: Any, what: str = "prompt") -> np.ndarray:
        try:
            values = np.asarray(prompt)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(f"a {what} cannot be read as text or token ids: {error}") from error
        if values.size == 0:
            return np.zeros(0, dtype=np.int64)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            messages = ', or a list of {"role", "content"} messages' if what == "prompt" else ""
            raise InvalidRequestError(
                f"a {what} must be a string, or a flat list of integer token ids{messages}; "
                f"got {type(prompt).__name__} of {values.dtype}"
            )
        if values.min() < 0:
            raise InvalidRequestError(
                f"token id {values.min()} is outside the model's vocabulary (0 to {self._vocab_size - 1})"
            )
        return values.astype(np.int64)
