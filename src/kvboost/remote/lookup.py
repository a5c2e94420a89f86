"""What to ask a shared store about a prompt, and what its answers mean.

All of it is one question, so one round trip: is the chunk there that ends at each cut of the prompt, what was
read last behind each of them, and where do sampled windows of the prompt stand? Knows names and token ids, no
store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvboost.models import chained_hash_from_bytes, token_bytes
from kvboost.remote import fingerprints, parts
from kvboost.remote.fingerprints import TailPlace, WindowPlace
from kvboost.remote.keys import RemoteKeys, part
from kvboost.store.content_index import WINDOW_TOKENS

PEEK_BYTES = 128  # holds the header of a part, and a place
MIN_TOKENS = 32  # less than that is not worth a question
_MIN_NEW = 8  # nor is a record with fewer tokens that no other has


class Wanted(NamedTuple):
    """A record that the store should have: its first token would stand at `start` of the prompt."""

    digest: str
    start: int
    tokens: int
    record_bytes: int = 0  # 0 = not known yet
    parent: str = ""

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class Found:
    """Records of a prompt: `exact` ones follow each other behind what is known; `moved` stand anywhere."""

    exact: list[Wanted] = field(default_factory=list)
    moved: list[Wanted] = field(default_factory=list)

    @property
    def exact_end(self) -> int:
        return self.exact[-1].end if self.exact else 0


def chain_digests(ids: np.ndarray, cuts: Sequence[int], root: str) -> list[str]:
    """The chain digests of a text that is cut at `cuts`, as the store's tree has them."""
    raw, digests, start = token_bytes(ids), [], 0
    for cut in cuts:
        root = chained_hash_from_bytes(raw[4 * start : 4 * cut], root)
        digests.append(root)
        start = cut
    return digests


class Question:
    """What is asked about the tokens `ids` `[tokens]` behind the first `known` of `digests`.

    `digests` belong to `cuts`. With `every`, also where windows of the first `limit` tokens stand.
    """

    def __init__(
        self,
        keys: RemoteKeys,
        ids: np.ndarray,
        cuts: Sequence[int],
        digests: Sequence[str],
        root: str,
        known: int,
        limit: int,
        every: int | None,
    ) -> None:
        self._ids, self._limit = ids, limit
        self._start = cuts[known - 1] if known else 0
        borders = [0, *cuts][known:]
        self._spans = list(zip(borders, cuts[known:], strict=False))
        self._digests = list(digests[known:])
        self._records = [keys.record(digest) for digest in self._digests]
        self._borders = borders
        parents = [root, *digests][known:]
        tails = [keys.tail(digest) for digest in parents]
        self._every = every or 0
        self._windows: list[int] = []
        windows: list[str] = []
        if every is not None:
            first = max(0, self._start - fingerprints.context_tokens(every))
            for at, value in fingerprints.sample(ids[first:limit], every):
                self._windows.append(first + at)
                windows.append(keys.window(value))
        self.names = [*(part(name, 0) for name in self._records), *tails, *windows]

    def answered(self, values: Sequence[bytes | None]) -> Found:
        """What the first bytes of all `names` say."""
        count = len(self._records)
        exact = self._chain(values[:count])
        tail = TailPlace.from_bytes(values[count + len(exact)])
        end = exact[-1].end if exact else self._start
        if tail is not None and tail.may_begin(self._ids[end:]):
            exact.append(Wanted(tail.digest, end, tail.tokens))
        moved = self._moved(values[count + len(self._borders) :], exact)
        return Found(exact, moved)

    def _chain(self, values: Sequence[bytes | None]) -> list[Wanted]:
        chain: list[Wanted] = []
        for name, digest, span, value in zip(self._records, self._digests, self._spans, values, strict=True):
            header = parts.read_start(value, name)
            if header is None:
                break
            chain.append(Wanted(digest, span[0], span[1] - span[0], header.record_bytes))
        return chain

    def _moved(self, values: Sequence[bytes | None], exact: Sequence[Wanted]) -> list[Wanted]:
        """Records with sampled windows of the prompt, as few texts as cover what they can, in order."""
        hits: dict[Wanted, list[int]] = defaultdict(list)  # where the windows begin
        for at, value in zip(self._windows, values, strict=True):
            place = WindowPlace.from_bytes(value)
            if place is None:
                continue
            start = at - place.offset
            # Text in common reaches beyond its first and last samples, by less than `every` tokens.
            if place.offset > 1 - WINDOW_TOKENS - self._every:
                hits[Wanted(place.digest, start, place.tokens, 0, place.parent)].append(at)
            if place.offset < self._every and place.parent_tokens:
                hits[Wanted(place.parent, start - place.parent_tokens, place.parent_tokens)].append(at)
        covered = np.zeros(self._limit, dtype=bool)
        covered[: exact[-1].end if exact else self._start] = True
        there = {wanted.digest for wanted in exact}
        chosen: list[Wanted] = []
        for text in _texts(hits):
            first, last = text.first - self._every + 1, text.last + WINDOW_TOKENS + self._every - 1
            for wanted in text.records:
                hopeful = covered[max(0, wanted.start, first) : max(0, min(wanted.end, last))]
                if wanted.digest not in there and np.count_nonzero(~hopeful) >= _MIN_NEW:
                    there.add(wanted.digest)
                    chosen.append(wanted)
            covered[max(0, text.first) : text.last + WINDOW_TOKENS] = True
        return sorted(chosen, key=lambda wanted: wanted.start)


class _Text(NamedTuple):
    """Records that follow each other in one stored text, and where windows that show it begin."""

    records: list[Wanted]
    windows: set[int]

    @property
    def first(self) -> int:
        return min(self.windows)

    @property
    def last(self) -> int:
        return max(self.windows)


def _texts(hits: dict[Wanted, list[int]]) -> list[_Text]:
    """Records that follow each other in one stored text, together; the text with most windows first."""
    merged: dict[tuple[str, int], Wanted] = {}
    windows: dict[tuple[str, int], list[int]] = defaultdict(list)
    for wanted, found in hits.items():
        place = wanted.digest, wanted.start
        windows[place] += found
        if place not in merged or wanted.parent:
            merged[place] = wanted
    text_of: dict[tuple[str, int], _Text] = {}
    texts: list[_Text] = []
    ends = {(wanted.digest, wanted.end): wanted for wanted in merged.values()}
    for wanted in sorted(merged.values(), key=lambda each: each.start):
        before = ends.get((wanted.parent, wanted.start))
        text = text_of.get((before.digest, before.start)) if before is not None else None
        if text is None:
            text = _Text([], set())
            texts.append(text)
        text.records.append(wanted)
        text.windows.update(windows[wanted.digest, wanted.start])
        text_of[wanted.digest, wanted.start] = text
    return sorted(texts, key=lambda text: -len(text.windows))
