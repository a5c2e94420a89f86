"""Where a tokenized text is cut into chunks. Holds no KV and knows no store.

With fixed cuts, and with sentence ends given as token ids, two texts with a common start are cut
alike over it (but for a last short chunk), so that they can share chunks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvboost.choices import ChunkStrategy
from kvboost.errors import InvalidRequestError

ChunkSpan = tuple[int, int, list[int]]


class ChunkRegistry:
    """Cuts token ids into chunks of about `chunk_size`.

    FIXED cuts at multiples of `chunk_size`; with `boundary_window=w` each cut slides by at most
    `w` tokens to the nearest sentence end, and stays where there is none. SEMANTIC cuts at the last
    paragraph or sentence end that fits into `chunk_size`. DOCUMENT makes one chunk. The last
    chunk may be shorter; with SEMANTIC one shorter than `min_chunk_tokens` joins its neighbour.
    """

    def __init__(
        self,
        chunk_size: int = 128,
        strategy: ChunkStrategy | str = ChunkStrategy.FIXED,
        min_chunk_tokens: int = 32,
        *,
        boundary_window: int = 0,
    ) -> None:
        if chunk_size < 1:
            raise InvalidRequestError(f"chunk_size must be at least 1, got {chunk_size}")
        if min_chunk_tokens < 1:
            raise InvalidRequestError(f"min_chunk_tokens must be at least 1, got {min_chunk_tokens}")
        if not 0 <= boundary_window < chunk_size:
            raise InvalidRequestError(
                f"chunk_boundary_window must be from 0 to chunk_size - 1 ({chunk_size - 1}), "
                f"got {boundary_window}"
            )
        self.chunk_size = chunk_size
        self.strategy = ChunkStrategy(strategy)
        self.min_chunk_tokens = min_chunk_tokens
        self.boundary_window = boundary_window

    @property
    def needs_boundaries(self) -> bool:
        """Whether `split` can make use of sentence ends."""
        return self.strategy is ChunkStrategy.SEMANTIC or self.boundary_window > 0

    def split(
        self,
        token_ids: Sequence[int],
        text: str = "",
        boundary_tokens: Collection[int] | None = None,
    ) -> list[ChunkSpan]:
        """Cut `token_ids` into `(start, end, ids)` triples that cover it without gaps.

        `boundary_tokens` are the ids that end a sentence or paragraph. Without them, and with
        `text`, sentence ends are placed by their share of the text's length.
        """
        ids = list(token_ids)
        cuts = self.cuts(ids, text, boundary_tokens)
        return [(start, end, ids[start:end]) for start, end in zip([0, *cuts], cuts, strict=False)]

    def cuts(
        self,
        token_ids: Sequence[int],
        text: str = "",
        boundary_tokens: Collection[int] | None = None,
    ) -> list[int]:
        """The end of every chunk, in order; the last one is `len(token_ids)`."""
        total = len(token_ids)
        if total == 0:
            return []
        if self.strategy is ChunkStrategy.DOCUMENT:
            return [total]
        if not self.needs_boundaries:
            return [*range(self.chunk_size, total, self.chunk_size), total]
        ends = _sentence_ends(token_ids, text, boundary_tokens)
        if self.strategy is ChunkStrategy.SEMANTIC:
            return self._semantic_cuts(total, ends)
        return self._windowed_cuts(total, ends)

    def _windowed_cuts(self, total: int, ends: list[int]) -> list[int]:
        cuts: list[int] = []
        for target in range(self.chunk_size, total, self.chunk_size):
            low = bisect_left(ends, target - self.boundary_window)
            high = bisect_right(ends, target + self.boundary_window)
            near = min(ends[low:high], key=lambda end: (abs(end - target), end), default=target)
            if near < total and near > (cuts[-1] if cuts else 0):
                cuts.append(near)
        return [*cuts, total]

    def _semantic_cuts(self, total: int, ends: list[int]) -> list[int]:
        cuts: list[int] = []
        start = 0
        while total - start > self.chunk_size:
            limit = start + self.chunk_size
            last = bisect_right(ends, limit) - 1
            cut = ends[last] if last >= 0 and ends[last] >= start + self.min_chunk_tokens else limit
            cuts.append(cut)
            start = cut
        if cuts and total - start < self.min_chunk_tokens:
            cuts.pop()  # the short rest joins the chunk before it
        return [*cuts, total]


def _sentence_ends(token_ids: Sequence[int], text: str, boundary_tokens: Collection[int] | None) -> list[int]:
    """Positions just after a sentence end, ascending."""
    if boundary_tokens is not None:
        wanted = np.fromiter(boundary_tokens, dtype=np.int64, count=len(boundary_tokens))
        found = np.isin(np.asarray(token_ids, dtype=np.int64), wanted)
        ends: list[int] = (np.nonzero(found)[0] + 1).tolist()
        return ends
    if not text:
        return []
    scale = len(token_ids) / len(text)
    marks = {round((i + 1) * scale) for i, char in enumerate(text) if char in ".!?\n"}
    return sorted(mark for mark in marks if mark > 0)


def boundary_token_ids(vocab_size: int, decode: Callable[[list[int]], str]) -> frozenset[int]:
    """Ids of all tokens whose text ends a sentence or a line."""
    return frozenset(
        token for token in range(vocab_size) if decode([token]).rstrip(" ").endswith((".", "!", "?", "\n"))
    )
