"""Real English text for benchmarks, as token ids: Python's own language reference, always at hand.

Hands out a common beginning and pieces that nobody has seen before. Knows a tokenizer, no model.
"""

from __future__ import annotations

from typing import Any

from kvboost.errors import InvalidRequestError
from kvboost.proof.documents import plain_text

_LOOK_AHEAD = 2_048  # tokens


class TextSource:
    """Token ids of one long text; pieces are taken from behind its first `prefix_tokens`."""

    def __init__(self, tokenizer: Any, prefix_tokens: int) -> None:
        self._ids: list[int] = list(
            tokenizer(plain_text(), add_special_tokens=False, verbose=False)["input_ids"]
        )
        self._next = prefix_tokens
        self._of_prefixes = {self._ids[0]}  # no piece begins with these
        self._first_tokens = set(self._of_prefixes)
        self._check(prefix_tokens)

    def prefix(self, tokens: int) -> list[int]:
        """The first `tokens` ids; no fresh piece will begin with the id that follows them."""
        self._of_prefixes.add(self._ids[tokens])
        self._first_tokens.add(self._ids[tokens])
        return self._ids[:tokens]

    def fresh(self, tokens: int) -> list[int]:
        """A piece of `tokens` ids that begins with an id no other piece begins with.

        So two pieces behind the same prefix have nothing in common, and neither can serve the other. Where
        the text has no more such ids (bytes as tokens), ids come again, and pieces may share a token or two.
        """
        ahead = range(self._next, min(self._next + _LOOK_AHEAD, len(self._ids)))
        start = next((at for at in ahead if self._ids[at] not in self._first_tokens), None)
        if start is None:
            self._first_tokens = set(self._of_prefixes)
            start = next((at for at in ahead if self._ids[at] not in self._first_tokens), self._next)
        self._next = start + tokens
        self._check(self._next)
        self._first_tokens.add(self._ids[start])
        return self._ids[start : start + tokens]

    def _check(self, needed: int) -> None:
        if needed >= len(self._ids):
            raise InvalidRequestError(
                f"the benchmark's text has {len(self._ids)} tokens, more were asked for; "
                "choose smaller lengths or fewer rounds"
            )
