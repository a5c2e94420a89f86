"""Storing what a request computed. This is the only way from an arena into the store.

It runs after the first token, and stores nothing if the model has changed since the request began. Text
that attended to approximate KV is never stored as exact: it is stored as tainted, where it is found by
content only, and the whole prompt becomes an approximate chain that borrows chunks stored already. Knows no
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KVCodec
from kvboost.kv.layout import Packed
from kvboost.models import Borrow, CompositeChunk
from kvboost.requests.prepared import CHANGED_REASON
from kvboost.reuse.plan import ReusePlan
from kvboost.store.chunking import ChunkRegistry
from kvboost.store.inserter import StoreReport
from kvboost.store.manager import KVCacheManager
from kvboost.store.matching import ChunkMatch


class KVSource(Protocol):
    """KV of a text by its positions: an arena that holds nothing else, or a sequence's part of one."""

    def between(self, start: int, end: int) -> Packed:
        """KV `[heads, tokens, head_dim]` of positions `[start, end)`."""

    def gathered(self, positions: torch.Tensor) -> Packed:
        """KV `[heads, n, head_dim]` of positions `[n]`, sorted."""


class ChunkWriter:
    """Puts KV from arenas into the store. A failure loses the chunks, never the answer.

    `current` gives the namespace of a salt for the model as it is now; `stored` is called before KV is kept.
    """

    def __init__(
        self,
        cache_manager: KVCacheManager,
        registry: ChunkRegistry,
        codec: KVCodec,
        *,
        current: Callable[[str], Namespace],
        stored: Callable[[], None],
        text_of: Callable[[Sequence[int]], str],
        boundary_tokens: frozenset[int] | None = None,
    ) -> None:
        self._manager = cache_manager
        self._registry = registry
        self._codec = codec
        self._current = current
        self._stored = stored
        self._text_of = text_of
        self._boundary_tokens = boundary_tokens

    def cuts(self, token_ids: np.ndarray) -> list[int]:
        """Where the chunks of `token_ids` end."""
        return self._registry.cuts(token_ids.tolist(), boundary_tokens=self._boundary_tokens)

    def _has_changed(self, namespace: Namespace) -> bool:
        """Whether the model has changed since `namespace` was read."""
        now = self._current(namespace.salt)
        return now.key != namespace.content_key or bool(now.gated or namespace.gated)

    def refuse(self, reason: str) -> StoreReport:
        """Count a text that must not be stored."""
        report = self._manager.count_failure(reason)
        report.is_refused = True
        return report

    def keep(
        self, token_ids: np.ndarray, kv: KVSource, namespace: Namespace, *, position_offset: int = 0
    ) -> StoreReport:
        """Store `token_ids` `[tokens]`, computed at positions from `position_offset` on."""
        return self.keep_from(token_ids, kv.between, namespace, position_offset=position_offset)

    def keep_from(
        self,
        token_ids: np.ndarray,
        between: Callable[[int, int], Packed],
        namespace: Namespace,
        *,
        position_offset: int = 0,
    ) -> StoreReport:
        """Store `token_ids` `[tokens]`; `between(start, end)` gives KV `[heads, tokens, head_dim]`."""
        if self._has_changed(namespace):
            return self.refuse(CHANGED_REASON)
        self._stored()
        return self._keep_from(token_ids, between, namespace, position_offset)

    def _keep_from(
        self,
        token_ids: np.ndarray,
        between: Callable[[int, int], Packed],
        namespace: Namespace,
        position_offset: int,
    ) -> StoreReport:
        try:
            return self._manager.store_prefix(
                token_ids,
                self.cuts(token_ids),
                self._codec,
                between,
                namespace,
                text_of=self._text_of,
                position_offset=position_offset,
            )
        except (RuntimeError, MemoryError) as error:  # out of memory must not cost the answer
            return self._manager.count_failure(f"{type(error).__name__} while storing")

    def keep_approximate(
        self,
        token_ids: np.ndarray,
        kv: KVSource,
        namespace: Namespace,
        plan: ReusePlan,
        recomputed: np.ndarray,
    ) -> StoreReport:
        """Store a prompt and its answer, `token_ids` `[tokens]`, that reused `plan`.

        `recomputed` `[n]` are the reused positions that repair computed again.
        """
        if plan.repair is not None:
            namespace = replace(namespace, repaired=plan.repair.label)
        exact_end = min(plan.first_approximate, len(token_ids))
        exact_report = self.keep(token_ids[:exact_end], kv, namespace)
        if exact_report.is_refused:
            return exact_report
        exact = self._manager.match_prefix(token_ids[:exact_end], namespace)
        borrows = [*exact.matches, *plan.chain_pieces, *plan.moved_pieces]
        for start, end in self._live_spans(plan, exact_end, len(token_ids)):
            span = token_ids[start:end]
            report = self._keep_from(span, _from(kv, start), namespace.tainted(), start)
            found = self._manager.match_prefix(span, namespace.tainted()).matches
            # An equal text of another request is no source: its KV saw other text before it.
            own = [match for match in found if match.chunk.chunk_id in report.stored_keys]
            borrows += [_moved(match, start) for match in own]
        self._keep_chain(token_ids, kv, namespace, borrows, plan, recomputed)
        return exact_report

    def _live_spans(self, plan: ReusePlan, start: int, end: int) -> list[tuple[int, int]]:
        """Spans of `[start, end)` that were computed here and are long enough to be found by content."""
        edges = [start]
        for run in plan.runs:
            edges += [max(run.start, start), max(run.end, start)]
        edges.append(end)
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return [(first, last) for first, last in gaps if last - first >= self._manager.min_run_tokens]

    def _keep_chain(
        self,
        token_ids: np.ndarray,
        kv: KVSource,
        namespace: Namespace,
        borrows: list[ChunkMatch],
        plan: ReusePlan,
        recomputed: np.ndarray,
    ) -> None:
        own = np.ones(len(token_ids), dtype=bool)
        for piece in borrows:
            own[piece.start : piece.end] = False
        own[plan.changed(recomputed)] = True
        for overlay in plan.content.chain.overlays:
            own[overlay.positions[overlay.positions < plan.chain_end]] = True
        composite = CompositeChunk(
            tuple(Borrow(piece.start, piece.end, piece.chunk.chunk_id, piece.offset) for piece in borrows),
            np.flatnonzero(own),
        )
        try:
            self._manager.store_chain(
                token_ids,
                composite,
                self._codec,
                lambda positions: kv.gathered(torch.from_numpy(positions)),
                namespace,
                sources={piece.chunk.chunk_id: piece.chunk for piece in borrows},
            )
        except (RuntimeError, MemoryError) as error:
            self._manager.count_failure(f"{type(error).__name__} while storing")


def _from(kv: KVSource, first: int) -> Callable[[int, int], Packed]:
    """KV `[heads, tokens, head_dim]` of positions, counted from `first` on."""
    return lambda start, end: kv.between(first + start, first + end)


def _moved(match: ChunkMatch, by: int) -> ChunkMatch:
    """A match in a part of the prompt that starts at `by`, in positions of the prompt."""
    return ChunkMatch(match.chunk, match.start + by, match.end + by, match.offset, approximate=True)
