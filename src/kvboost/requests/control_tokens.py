"""The tokens that a tokenizer matches in text: special ones and added ones. Knows no prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


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
