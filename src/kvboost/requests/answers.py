"""Answers as they were generated, remembered by salt and text within a budget.

Encoding an answer's text again need not give the tokens that were generated, so their ids are kept. Knows
ids and texts, no tokenizer.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvboost.locks import fork_safe_lock

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
