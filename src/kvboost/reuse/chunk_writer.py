"""Storing what a request computed: exact text, text computed on approximate KV, and approximate chains.

Runs after the first token, and is the one way from arenas into the store: what was computed is kept only if
the model is still what it was when the request began, and if the arena holds as many tokens as were
computed. Nothing that was computed while looking at approximate KV is stored as exact: it goes under a root
of its own, where only its content is found, and the prompt as a whole goes into an approximate chain that
borrows what is stored already. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvboost.identity.namespace import Namespace
from kvboost.kv.arena import Arena
from kvboost.kv.codec import KVCodec
from kvboost.kv.layout import Packed
from kvboost.models import Borrow, CompositeChunk
from kvboost.requests.prepared import CHANGED_REASON
from kvboost.reuse.plan import ReusePlan
from kvboost.store.chunking import ChunkRegistry
from kvboost.store.manager import KVCacheManager, StoreReport
from kvboost.store.matching import ChunkMatch


class ChunkWriter:
    """Puts KV from arenas into the store. A failure costs the chunks, never the answer.

    `current` gives the namespace of a salt for the model as it is now; `stored` is told of all that is kept.
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
        """Whether the model is not what it was when `namespace` was read."""
        now = self._current(namespace.salt)
        return now.key != namespace.content_key or bool(now.gated or namespace.gated)

    def refuse(self, reason: str) -> StoreReport:
        """Book a text that must not be stored."""
        report = self._manager.count_failure(reason)
        report.is_refused = True
        return report

    def keep(
        self,
        token_ids: np.ndarray,
        arena: Arena,
        namespace: Namespace,
        *,
        position_offset: int = 0,
        first: int = 0,
    ) -> StoreReport:
        """Store `token_ids` `[tokens]`, which stand in `arena` from position `first` on.

        They were computed at positions from `position_offset` on.
        """

        return self.keep_from(token_ids, _from(arena, first), namespace, position_offset=position_offset)

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
        except (RuntimeError, MemoryError) as error:  # out of memory: the answer is there all the same
            return self._manager.count_failure(f"{type(error).__name__} while storing")

    def keep_approximate(
        self,
        token_ids: np.ndarray,
        arena: Arena,
        namespace: Namespace,
        plan: ReusePlan,
        recomputed: np.ndarray,
    ) -> StoreReport:
        """Store a prompt with its answer, `token_ids` `[tokens]`, of which `plan` was reused.

        `recomputed` `[n]` are the reused positions whose KV is not what was found.
        """
        exact_end = min(plan.first_approximate, len(token_ids))
        exact_report = self.keep(token_ids[:exact_end], arena, namespace)
        if exact_report.is_refused:
            return exact_report
        exact = self._manager.match_prefix(token_ids[:exact_end], namespace)
        borrows = [*exact.matches, *plan.chain_pieces, *plan.moved_pieces]
        for start, end in self._live_spans(plan, exact_end, len(token_ids)):
            span = token_ids[start:end]
            report = self._keep_from(span, _from(arena, start), namespace.tainted(), start)
            found = self._manager.match_prefix(span, namespace.tainted()).matches
            # The same words may be there from another request, with what stood around them there.
            own = [match for match in found if match.chunk.chunk_id in report.stored_keys]
            borrows += [_moved(match, start) for match in own]
        self._keep_chain(token_ids, arena, namespace, borrows, plan, recomputed)
        return exact_report

    def _live_spans(self, plan: ReusePlan, start: int, end: int) -> list[tuple[int, int]]:
        """Stretches of `[start, end)` that were computed anew and are long enough to be found again."""
        edges = [start]
        for run in plan.runs:
            edges += [max(run.start, start), max(run.end, start)]
        edges.append(end)
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return [(first, last) for first, last in gaps if last - first >= self._manager.min_run_tokens]

    def _keep_chain(
        self,
        token_ids: np.ndarray,
        arena: Arena,
        namespace: Namespace,
        borrows: list[ChunkMatch],
        plan: ReusePlan,
        recomputed: np.ndarray,
    ) -> None:
        own = np.ones(len(token_ids), dtype=bool)
        for piece in borrows:
            own[piece.start : piece.end] = False
        own[recomputed] = True
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
                lambda positions: arena.gathered(torch.from_numpy(positions)),
                namespace,
            )
        except (RuntimeError, MemoryError) as error:
            self._manager.count_failure(f"{type(error).__name__} while storing")


def _from(arena: Arena, first: int) -> Callable[[int, int], Packed]:
    """KV `[heads, tokens, head_dim]` of an arena's positions, counted from `first` on."""
    return lambda start, end: arena.between(first + start, first + end)


def _moved(match: ChunkMatch, by: int) -> ChunkMatch:
    """A match of a part of the prompt, in the prompt's own positions."""
    return ChunkMatch(match.chunk, match.start + by, match.end + by, match.offset, approximate=True)
