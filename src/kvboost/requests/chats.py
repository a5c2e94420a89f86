"""Chat messages to token ids: the template's text, with remembered answers in their places.

Encoding an answer's text again need not give the tokens that were generated, so their ids are kept, by salt
and text within a budget. Whatever is spliced, the ids spell the template's text and have exactly the control
tokens (special ones, and others that are matched in text) that encoding it gives. Knows the tokenizer and its
template, no model.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvboost.errors import InvalidRequestError
from kvboost.locks import fork_safe_lock
from kvboost.requests.encoding import ReadingBounds, TextEncoder, check_text

_MARK = "\u2063kvboost{}\u2063"  # stands for an answer while a template is rendered
_MARKS = re.compile(_MARK.format("([0-9]+)"))
_SEAM_TOKENS = 8  # compared on each side of a seam: are both sides spelled as they are alone?
_MAX_ANSWERS = 4_096
_MAX_ANSWER_BYTES = 64 << 20  # of all remembered answers: their ids, their texts and what keeps them
_ENTRY_BYTES = 400


@dataclass
class Answer:
    """An answer as it was generated; `is_spelled`: do its ids spell its text? None = not known yet."""

    token_bytes: bytes  # 4 for each id
    size_bytes: int
    is_spelled: bool | None = None

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.token_bytes, dtype=np.int32).tolist()
        return ids


class RememberedAnswers:
    """Answers by salt and text. Thread-safe.

    When there are too many, or they are too large, the salt that has the most loses its least recently used
    one. So no tenant can push out the answers of another.
    """

    def __init__(self) -> None:
        self._by_salt: dict[str, OrderedDict[str, Answer]] = {}
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._lock = fork_safe_lock(around_data=True)
        self._total = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return self._total

    def get(self, salt: str, text: str) -> Answer | None:
        """The answer, which counts as used."""
        with self._lock:
            answers = self._by_salt.get(salt)
            if answers is None or text not in answers:
                return None
            answers.move_to_end(text)
            return answers[text]

    def put(self, salt: str, text: str, ids: Sequence[int]) -> None:
        """Keep an answer in place of an earlier one with this text."""
        packed = np.asarray(ids, dtype=np.int32).tobytes()
        size = len(packed) + sys.getsizeof(text) + sys.getsizeof(salt) + _ENTRY_BYTES
        if size > _MAX_ANSWER_BYTES:
            return
        with self._lock:
            self._drop(salt, text)
            self._by_salt.setdefault(salt, OrderedDict())[text] = Answer(packed, size)
            self._book(salt, 1, size)
            while len(self) > _MAX_ANSWERS:
                self._drop_oldest(max(self._counts, key=self._counts.__getitem__))
            while self.size_bytes > _MAX_ANSWER_BYTES:
                self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            for salt in list(self._by_salt):
                while salt in self._by_salt:
                    self._drop_oldest(salt)

    def _drop_oldest(self, salt: str) -> None:
        self._drop(salt, next(iter(self._by_salt[salt])))

    def _drop(self, salt: str, text: str) -> None:
        answers = self._by_salt.get(salt)
        answer = answers.pop(text, None) if answers is not None else None
        if answer is not None:
            self._book(salt, -1, -answer.size_bytes)

    def _book(self, salt: str, count: int, size: int) -> None:
        self._counts[salt] += count
        self._bytes[salt] += size
        self._total += count
        self.size_bytes += size
        if not self._counts[salt]:
            del self._by_salt[salt], self._counts[salt], self._bytes[salt]


class ChatReader:
    """Reads messages with `encoder`, and splices in what is found in `answers`."""

    def __init__(self, encoder: TextEncoder, answers: RememberedAnswers) -> None:
        self._encoder = encoder
        self._answers = answers
        self._tokenizer = encoder.tokenizer
        self._control = encoder.control
        self._spelled = encoder.spelled

    def read(
        self, chat: Sequence[Any], salt: str, warming: bool, bounds: ReadingBounds
    ) -> tuple[list[int], str]:
        """The ids of messages, and the template's text. With `warming`, no answer is asked for."""
        messages = _checked_messages(chat)
        bounds.go_on()
        text = self._render(messages, warming)
        self._encoder.check_length(text, bounds)
        answers = self._known_answers(messages, salt, bounds)
        if answers:
            spliced = self._splice(messages, answers, text, warming, bounds)
            if spliced is not None:
                return spliced, text
        return self._encoder.encode(text, add_special_tokens=False, bounds=bounds), text

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
        except Exception as error:  # templates raise what they like
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error

    def _known_answers(
        self, messages: list[dict[str, Any]], salt: str, bounds: ReadingBounds
    ) -> dict[int, list[int]]:
        """The ids of the messages that are remembered answers, by message number."""
        found = {}
        for index, message in enumerate(messages):
            text = message["content"]
            answer = self._answers.get(salt, text) if message["role"] == "assistant" else None
            if answer is None:
                continue
            ids = answer.token_ids
            if answer.is_spelled is None:
                bounds.go_on()
                answer.is_spelled = self._can_stand_for(ids, text)
            if answer.is_spelled:
                found[index] = ids
        return found

    def _can_stand_for(self, ids: list[int], text: str) -> bool:
        """Whether `ids` spell `text`, with the control tokens that encoding it gives and no hidden token."""
        known = len(self._tokenizer)
        if any(token >= known for token in ids) or None in self._tokenizer.convert_ids_to_tokens(ids):
            return False  # decodes to nothing
        plain = self._encoder.encode(text, add_special_tokens=False)
        return self._control.of(ids) == self._control.of(plain) and self._spelled(ids) == text

    def _splice(
        self,
        messages: list[dict[str, Any]],
        answers: dict[int, list[int]],
        text: str,
        warming: bool,
        bounds: ReadingBounds,
    ) -> list[int] | None:
        """Token ids of `text` with remembered answers in their places; None if that is not safe."""
        bounds.go_on()
        marked = self._render(
            [
                {**message, "content": _MARK.format(index) if index in answers else message["content"]}
                for index, message in enumerate(messages)
            ],
            warming,
        )
        parts = _MARKS.split(marked)
        if parts[1::2] != [str(index) for index in answers]:
            return None  # left out, repeated, in another order, or a message has a mark of its own
        parts[1::2] = [messages[index]["content"] for index in answers]
        if "".join(parts) != text:
            return None  # the template looks into its messages or changes them
        pieces = []
        for part in parts[::2]:
            bounds.go_on()
            pieces.append(self._encoder.encode(part, add_special_tokens=False, bounds=bounds) if part else [])
        own = list(answers.values())
        ids = list(pieces[0])
        for answer, piece in zip(own, pieces[1:], strict=True):
            ids += answer
            ids += piece
        bounds.go_on()
        return ids if self._are_clean(parts, pieces, own) or self._is_same(ids, text, bounds) else None

    def _is_same(self, ids: list[int], text: str, bounds: ReadingBounds) -> bool:
        """Whether `ids` equal an encoding of `text`, apart from where ordinary tokens end."""
        plain = self._encoder.encode(text, add_special_tokens=False, bounds=bounds)
        return self._control.of(ids) == self._control.of(plain) and self._spelled(ids) == self._spelled(plain)

    def _are_clean(self, parts: list[str], pieces: list[list[int]], answers: list[list[int]]) -> bool:
        """Whether a look at the seams alone shows that encoding in pieces changes nothing.

        `parts` are texts, with answers at the odd places; `pieces` are the ids of the others. A control token
        must follow each answer, none may arise at a seam, and each answer must begin as it does alone.
        """
        if not self._control.are_literal:
            return False
        seams = zip(parts[::2], parts[1::2], parts[2::2], strict=False)
        for before, answer, after in seams:
            if not after.startswith(self._control.texts):
                return False
            if self._control.cross(before, answer) or self._control.cross(answer, after):
                return False
        return all(
            self._is_seamless(piece[-_SEAM_TOKENS:], answer[:_SEAM_TOKENS])
            for piece, answer in zip(pieces, answers, strict=False)
        )

    def _is_seamless(self, before: list[int], after: list[int]) -> bool:
        """Whether both spell the same text together as they do alone."""
        return not before or self._spelled(before + after) == self._spelled(before) + self._spelled(after)


def _checked_messages(prompt: Any) -> list[dict[str, Any]]:
    """Copies of messages that have text as role and content; others are refused by number."""
    messages = []
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InvalidRequestError(f'message {index} must be a mapping with "role" and "content"')
        if not isinstance(message["content"], str) or not isinstance(message["role"], str):
            raise InvalidRequestError(f"message {index} must have text as its role and content")
        for part in ("role", "content"):
            check_text(message[part], f"the {part} of message {index}")
        messages.append(dict(message))
    return messages
