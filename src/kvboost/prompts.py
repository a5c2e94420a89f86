"""From what a caller passes (text, token ids, chat messages) to the token ids the model reads.

Re-encoding an answer's text need not give the tokens that were generated. The reader remembers the
ids of its own answers and splices them in where the same answer comes back in messages, so that
the next turn of a chat finds its KV again. Knows the tokenizer, no model and no cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvboost.errors import InvalidRequestError

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

_MAX_ANSWERS = 4_096
_MARK = "\u2063kvboost{}\u2063"  # stands for an answer while a template is rendered


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
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._special_ids = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._special_texts = tuple(str(token) for token in getattr(tokenizer, "all_special_tokens", ()))
        self._answers: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self._encoding = threading.Lock()  # fast tokenizers fail where two threads encode at once

    def read(self, prompt: Prompt, salt: str = "", *, warming: bool = False) -> TokenizedPrompt:
        """Tokenize `prompt`. With `warming`, leave out what only the end of a prompt has."""
        if isinstance(prompt, str):
            ids = self._encode(prompt, add_special_tokens=True)
            if warming:
                ids = self._without_trailing_special(ids, prompt)
            text = prompt
        elif _is_messages(prompt):
            ids, text = self._read_messages(_checked_messages(prompt), salt, warming)
        else:
            found = self._checked_ids(prompt)
            self._check(found)
            return TokenizedPrompt(found, lambda: str(self._tokenizer.decode(found.tolist())))
        if not text:  # a tokenizer may put special tokens around nothing
            ids = []
        tokens = np.asarray(ids, dtype=np.int64)
        self._check(tokens)
        return TokenizedPrompt(tokens, text)

    def read_continuation(self, prompt: Prompt, tokens: TokenizedPrompt, continuation: Prompt) -> list[int]:
        """The ids of `continuation` (text or ids) behind `prompt`, which reads as `tokens`.

        Text is encoded together with the prompt's, where that leaves the prompt's own tokens as they are.
        """
        ids: list[int]
        if not isinstance(continuation, str):
            ids = self._checked_ids(continuation).tolist()
        elif isinstance(prompt, str):
            joined = self._encode(prompt + continuation, add_special_tokens=True)
            joined = self._without_trailing_special(joined, prompt + continuation)
            size = len(tokens)
            kept = len(joined) > size and joined[:size] == tokens.token_ids.tolist()
            ids = joined[size:] if kept else self._encode(continuation, add_special_tokens=False)
        else:
            ids = self._encode(continuation, add_special_tokens=False)
        self._check(np.asarray(ids, dtype=np.int64), "continuation")
        return ids

    def remember_answer(self, text: str, token_ids: Sequence[int], salt: str) -> None:
        """Keep the ids of an answer for when its text comes back in messages."""
        ids = list(token_ids)
        while ids and ids[-1] in self._special_ids:
            ids.pop()
        if not ids or not text:
            return
        with self._lock:
            self._answers[salt, text] = tuple(ids)
            self._answers.move_to_end((salt, text))
            while len(self._answers) > _MAX_ANSWERS:
                self._answers.popitem(last=False)

    def forget_answers(self) -> None:
        """Drop all remembered answers."""
        with self._lock:
            self._answers.clear()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._encoding:
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(encoded["input_ids"])

    def _without_trailing_special(self, ids: list[int], text: str) -> list[int]:
        """Drop special tokens that the tokenizer put behind the text."""
        if text.endswith(self._special_texts):
            return ids  # the caller wrote them
        end = len(ids)
        while end > 1 and ids[end - 1] in self._special_ids:
            end -= 1
        return ids[:end]

    def _check(self, ids: np.ndarray, what: str = "prompt") -> None:
        if not len(ids):
            raise InvalidRequestError(f"the {what} is empty; it needs at least one token")
        if (largest := int(ids.max())) >= self._vocab_size:
            raise InvalidRequestError(
                f"token id {largest} is outside the model's vocabulary (0 to {self._vocab_size - 1}); "
                "do tokenizer and model belong together?"
            )

    def _checked_ids(self, prompt: Any) -> np.ndarray:
        try:
            values = np.asarray(prompt)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(f"a prompt must be text, token ids or messages: {error}") from error
        if values.size == 0:
            return np.zeros(0, dtype=np.int64)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise InvalidRequestError(
                "a prompt must be a string, a flat list of integer token ids, or a list of "
                f'{{"role", "content"}} messages; got {type(prompt).__name__} of {values.dtype}'
            )
        if values.min() < 0:
            raise InvalidRequestError(
                f"token id {values.min()} is outside the model's vocabulary (0 to {self._vocab_size - 1})"
            )
        return values.astype(np.int64)

    # --- chats -------------------------------------------------------------------------------

    def _read_messages(
        self, messages: list[dict[str, Any]], salt: str, warming: bool
    ) -> tuple[list[int], str]:
        text = self._render(messages, warming)
        answers = self._known_answers(messages, salt)
        if answers:
            spliced = self._splice(messages, answers, text, warming)
            if spliced is not None:
                return spliced, text
        return self._encode(text, add_special_tokens=False), text

    def _render(self, messages: list[dict[str, Any]], warming: bool) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "messages need a chat template, and this tokenizer has none; pass text instead"
            )
        continues = not warming and messages[-1]["role"] == "assistant"
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=not warming and not continues,
                    continue_final_message=continues,
                )
            )
        except Exception as error:  # templates raise what they like; the caller sees which message
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error

    def _known_answers(self, messages: list[dict[str, Any]], salt: str) -> dict[int, tuple[int, ...]]:
        with self._lock:
            return {
                index: self._answers[salt, message["content"]]
                for index, message in enumerate(messages)
                if message["role"] == "assistant" and (salt, message["content"]) in self._answers
            }

    def _splice(
        self,
        messages: list[dict[str, Any]],
        answers: dict[int, tuple[int, ...]],
        text: str,
        warming: bool,
    ) -> list[int] | None:
        """Token ids of `text` with remembered answers in their places; None where that is not safe."""
        marks = {index: _MARK.format(index) for index in answers}
        marked = self._render(
            [
                {**message, "content": marks.get(index, message["content"])}
                for index, message in enumerate(messages)
            ],
            warming,
        )
        ids: list[int] = []
        rest, filled = marked, marked
        for index, answer in sorted(answers.items()):
            if marked.count(marks[index]) != 1:
                return None  # left out or repeated
            before, _, rest = rest.partition(marks[index])
            filled = filled.replace(marks[index], messages[index]["content"])
            ids += self._encode(before, add_special_tokens=False) if before else []
            ids += answer
        if filled != text:
            return None  # the template looks into its messages or changes them
        ids += self._encode(rest, add_special_tokens=False) if rest else []
        if all(self._clean_break(piece, marked) for piece in marks.values()):
            return ids
        plain = self._tokenizer.decode(self._encode(text, add_special_tokens=False))
        return ids if self._tokenizer.decode(ids) == plain else None

    def _clean_break(self, mark: str, marked: str) -> bool:
        """Whether a special token follows the answer, so that encoding in pieces changes nothing."""
        after = marked.partition(mark)[2]
        return bool(after) and after.startswith(self._special_texts)


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _checked_messages(prompt: Any) -> list[dict[str, Any]]:
    messages = []
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InvalidRequestError(f'message {index} must be a mapping with "role" and "content"')
        if not isinstance(message["content"], str) or not isinstance(message["role"], str):
            raise InvalidRequestError(f"message {index} must have text as its role and content")
        messages.append(dict(message))
    return messages
