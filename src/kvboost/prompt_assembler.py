"""From matches to KV in place: what of a prompt is reused, and where it goes.

`plan` asks the cache manager what is there, `place` copies it into an arena, `assemble` does both
into an arena of its own and describes the outcome. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvboost.arena import Arena, KVLayout
from kvboost.cache_manager import ROOT, ChunkMatch, KVCacheManager, PrefixMatch
from kvboost.models import AssembledPrompt, AssemblyMode, Origin, Span, TokenIds
from kvboost.namespace import Namespace


@dataclass(frozen=True)
class ReusePlan:
    """The first `reused` tokens of `total` come from `match`; the rest is computed, for `reason`."""

    match: PrefixMatch
    reused: int
    total: int
    reason: str

    @property
    def pieces(self) -> list[ChunkMatch]:
        """The matches, cut at `reused`."""
        return [
            ChunkMatch(m.chunk, m.start, min(m.end, self.reused), m.offset, m.approximate)
            for m in self.match.matches
            if m.start < self.reused
        ]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Every prompt token's origin: exact pieces, then what is live."""
        spans = [Span(p.start, p.end, Origin.EXACT, donor=p.chunk.chunk_id) for p in self.pieces]
        if self.reused < self.total:
            spans.append(Span(self.reused, self.total, Origin.LIVE, self.reason))
        return tuple(spans)


class PromptAssembler:
    """Finds and places reusable KV.

    `whole_chunks_of` limits reuse to whole chunks of that many tokens (bit-exact mode).
    """

    def __init__(
        self,
        cache_manager: KVCacheManager,
        mode: AssemblyMode | str = AssemblyMode.CHUNK_REUSE,
        *,
        whole_chunks_of: int | None = None,
    ) -> None:
        self._manager = cache_manager
        self.mode = AssemblyMode(mode)
        self._whole_chunks_of = whole_chunks_of

    @contextmanager
    def planned(self, token_ids: np.ndarray, namespace: Namespace, limit: int) -> Iterator[ReusePlan]:
        """What can be reused among the first `limit` tokens; held until the block ends."""
        match = self._manager.match_prefix(token_ids, namespace, hold=True)
        plan = self._plan_of(match, len(token_ids), limit)
        try:
            yield plan
        finally:
            self._manager.release(match, used_tokens=plan.reused)

    def plan(self, token_ids: np.ndarray, namespace: Namespace, limit: int) -> ReusePlan:
        """What could be reused among the first `limit` tokens. Changes nothing."""
        return self._plan_of(self._manager.match_prefix(token_ids, namespace), len(token_ids), limit)

    def _plan_of(self, match: PrefixMatch, total: int, limit: int) -> ReusePlan:
        reused = min(match.length, limit)
        if self._whole_chunks_of is not None:
            reused -= reused % self._whole_chunks_of
        if reused < match.length:
            reason = (
                "computed: generation needs it"
                if reused == total - 1
                else "computed: only whole blocks are bit-exact"
            )
            return ReusePlan(match, reused, total, reason)
        return ReusePlan(match, reused, total, match.miss_reason)

    def place(self, plan: ReusePlan, arena: Arena, already: int = 0) -> None:
        """Copy the planned KV into `arena`, which holds the first `already` tokens of it by now."""
        for piece in plan.pieces:
            start = max(piece.start, already)
            if start >= piece.end or piece.chunk.packed is None:
                continue
            first = start - piece.start + piece.offset
            parts = [part[:, first : first + piece.end - start] for part in piece.chunk.packed]
            arena.place(parts, start)
        arena.set_length(plan.reused)

    def assemble(self, token_ids: TokenIds, namespace: Namespace = ROOT) -> AssembledPrompt:
        """Gather the KV that is stored for `token_ids`, all of them if it is there."""
        ids = np.asarray(token_ids, dtype=np.int64)
        total = len(ids)
        with self.planned(ids, namespace, limit=total) as plan:
            past = None
            if plan.reused:
                layout = KVLayout.of(plan.pieces[0].chunk.past_key_values)
                arena = Arena(layout, plan.reused)
                self.place(plan, arena)
                past = arena.as_past_key_values()
            return AssembledPrompt(
                full_token_ids=ids.tolist(),
                cached_past_kv=past,
                cached_length=plan.reused,
                live_token_ids=ids[plan.reused :].tolist(),
                live_position_ids=list(range(plan.reused, total)),
                chunk_boundaries=[(piece.start, piece.end) for piece in plan.pieces],
                cache_hit_ratio=plan.reused / total if total else 0.0,
                runs=((0, plan.reused, 0, True),) if plan.reused else (),
            )
