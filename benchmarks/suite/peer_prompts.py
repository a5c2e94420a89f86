"""How much `bench peers` asks, and the prompts: new ones, whose text gives back their tokens.

Knows the tokenizer, and nobody who answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.bench.text import TextSource

_TRIES = 40  # tails drawn until one reads back


@dataclass(frozen=True)
class PeerSettings:
    """How much is measured. Plain generate is slow, so it takes part in fewer rounds."""

    lengths: tuple[int, ...] = (1_024, 2_048, 4_096)
    rounds: int = 10
    plain_rounds: int = 3
    new_tokens: int = 16
    tail_tokens: int = 20
    quality_prompts: int = 2  # per length, answered by all, not timed
    reordered: int = 6  # prompts of known documents in another order
    ratios: tuple[float, ...] = (0.05, 0.15, 0.3)  # shares of them that our selectors compute again
    profiled: int = 3  # requests of ours per length whose time is taken apart
    documents: int = 8
    document_tokens: int = 512
    pause_s: float = 0.3  # before every turn: the threads of the one before may still spin
    deadline_s: float = 600.0  # for one request to a peer
    seed: int = 0


class Prompts:
    """Prompts that nobody has seen, chosen so that their text gives back their tokens.

    Some peers take text only: so they read the same tokens as the others.
    """

    def __init__(self, tokenizer: Any, settings: PeerSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._text = TextSource(tokenizer, max(settings.lengths))
        self._random = random.Random(settings.seed)
        self.count = self.count_that_reads_back = 0

    def prefix(self, tokens: int) -> list[int]:
        return self._text.prefix(tokens)

    def behind(self, prefix: list[int]) -> list[int]:
        """`prefix` and a tail that is new."""
        prompt: list[int] = []
        reads_back = False
        for _ in range(_TRIES):
            prompt = prefix + self._text.fresh(self._settings.tail_tokens)
            if reads_back := self._reads_back(prompt):
                break
        self.count += 1
        self.count_that_reads_back += reads_back
        return prompt

    def documents(self) -> list[list[int]]:
        """New documents, each of which reads back by itself where that can be had."""
        return [self._document() for _ in range(self._settings.documents)]

    def in_another_order(self, documents: Sequence[list[int]]) -> list[int]:
        """The documents one behind the other in a random order, and a new tail."""
        order = self._random.sample(documents, len(documents))
        return self.behind([token for document in order for token in document])

    def _document(self) -> list[int]:
        piece: list[int] = []
        for _ in range(_TRIES):
            piece = self._text.fresh(self._settings.document_tokens)
            if self._reads_back(piece):
                break
        return piece

    def _reads_back(self, token_ids: list[int]) -> bool:
        text = self._tokenizer.decode(token_ids)
        return bool(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] == token_ids)
