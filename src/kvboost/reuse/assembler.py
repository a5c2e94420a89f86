"""From matches to KV in place: what of a prompt is reused, and where it goes.

`plan` asks the cache manager what is there, `place` copies it into an arena and turns the keys of what
was moved, `assemble` does both into an arena of its own and describes the outcome. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from kvboost.choices import AssemblyMode, Origin
from kvboost.identity.namespace import Namespace
from kvboost.kv.arena import Arena
from kvboost.kv.codec import KeptChunk, StoredKV
from kvboost.kv.rope import KeyRotation
from kvboost.models import AssembledPrompt, ReusedRun, Span, TokenIds
from kvboost.reuse.costs import CostEstimate
from kvboost.store.manager import ROOT, ContentMatch, KVCacheManager, PrefixMatch
from kvboost.store.matching import ChainMatch, ChunkMatch

CHAIN_REASON = "repaired in an earlier request"
LOSSY_REASON = "prefix, overlap encoding"
QUANTIZED_REASON = "exact prefix, quantized"
TOO_SHORT = "too short"


@dataclass(frozen=True)
class ReusePlan:
    """What of a prompt of `total` tokens is reused, and why the rest is not.

    The first `prefix_end` tokens come from `match`, those up to `chain_end` from the approximate chain of
    an earlier request, and `content_runs` from anywhere. In overlap mode (`lossy_from`), prefix chunks that
    start behind that position are not exact. `refusal` says why nothing approximate was taken.
    """

    total: int
    match: PrefixMatch
    prefix_end: int
    reason: str
    content: ContentMatch = field(default_factory=ContentMatch)
    chain_end: int = 0
    lossy_from: int | None = None
    estimate: CostEstimate | None = None
    refusal: str = ""

    @property
    def pieces(self) -> list[ChunkMatch]:
        """The prefix matches, cut at `prefix_end`."""
        return _cut(self.match.matches, 0, self.prefix_end)

    def without(self, keys: set[str]) -> ReusePlan:
        """The plan without chunks that cannot be had, and what depends on them."""
        if not keys:
            return self
        first = next((p.start for p in self.pieces if p.chunk.chunk_id in keys), self.prefix_end)
        chain_lost = any(piece.chunk.chunk_id in keys for piece in self.content.chain.pieces)
        runs = tuple(
            run for run in self.content.runs if not any(piece.chunk.chunk_id in keys for piece in run)
        )
        chain = ChainMatch() if chain_lost or first < self.prefix_end else self.content.chain
        return replace(
            self,
            prefix_end=first,
            chain_end=0 if chain_lost or first < self.prefix_end else self.chain_end,
            content=replace(self.content, chain=chain, runs=runs),
        )

    @property
    def chain_pieces(self) -> list[ChunkMatch]:
        """What the chain borrows behind the prefix."""
        return _cut(self.content.chain.pieces, self.prefix_end, self.chain_end)

    @property
    def moved_pieces(self) -> list[ChunkMatch]:
        """What was found by content."""
        return [piece for run in self.content.runs for piece in run]

    def is_lossy(self, piece: ChunkMatch) -> bool:
        """Whether a prefix piece was encoded without all that stands before it."""
        return self.lossy_from is not None and piece.start > self.lossy_from

    @property
    def runs(self) -> tuple[ReusedRun, ...]:
        """All that is reused, as runs; chain and moved ones are not exact."""
        lossy = [piece for piece in self.pieces if self.is_lossy(piece)]
        exact_end = lossy[0].start if lossy else self.prefix_end
        runs = [ReusedRun(0, exact_end, 0, True)] if exact_end else []
        runs += [ReusedRun(piece.start, piece.end, 0, False) for piece in lossy]
        if self.chain_end > self.prefix_end:
            runs.append(ReusedRun(self.prefix_end, self.chain_end, 0, False))
        moved = (ReusedRun(run[0].start, run[-1].end, run[0].shift, False) for run in self.content.runs)
        return (*runs, *moved)

    @property
    def repair_runs(self) -> tuple[ReusedRun, ...]:
        """The runs as repair sees them: a chain was repaired once and is left alone."""
        chain = (self.prefix_end, self.chain_end)
        return tuple(run._replace(exact=run.exact or run[:2] == chain) for run in self.runs)

    @property
    def needs_repair(self) -> bool:
        return any(not run.exact for run in self.repair_runs)

    @property
    def has_moved(self) -> bool:
        """Whether something was found by content, and not as a prefix."""
        return bool(self.content.runs)

    @property
    def first_approximate(self) -> int:
        """Where exactness ends: all before it, reused or computed, is exact."""
        return min((run.start for run in self.runs if not run.exact), default=self.total)

    @property
    def reused(self) -> int:
        return sum(run.end - run.start for run in self.runs)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Stretches of the prompt that are not reused."""
        edges = [0, *(edge for run in self.runs for edge in (run.start, run.end)), self.total]
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]

    @property
    def contiguous_end(self) -> int:
        """How far the reused tokens reach without a gap from the start."""
        return max(self.prefix_end, self.chain_end)

    def spans(self, recomputed: np.ndarray | None = None) -> tuple[Span, ...]:
        """Every prompt token's origin, in order; `recomputed` `[n]` are positions computed again."""
        again = np.zeros(self.total, dtype=bool)
        if recomputed is not None:
            again[recomputed] = True
        spans: list[Span] = []
        for piece in self.pieces:
            if self.is_lossy(piece):
                spans += _approximate(piece.start, piece.end, piece.chunk.chunk_id, LOSSY_REASON, again)
            else:
                reason = QUANTIZED_REASON if piece.chunk.kv.codec.is_lossy else ""
                spans.append(Span(piece.start, piece.end, Origin.EXACT, reason, piece.chunk.chunk_id))
        if self.chain_end > self.prefix_end:
            donor = self.content.chain.keys[-1]
            spans.append(Span(self.prefix_end, self.chain_end, Origin.APPROXIMATE, CHAIN_REASON, donor))
        for piece in self.moved_pieces:
            reason = f"moved by {piece.shift:+d} positions" if piece.shift else "behind other text"
            spans += _approximate(piece.start, piece.end, piece.chunk.chunk_id, reason, again)
        return tuple(self._with_live(spans))

    def _with_live(self, spans: list[Span]) -> Iterator[Span]:
        """The spans with live ones in their gaps."""
        at = 0
        for span in [*spans, Span(self.total, self.total, Origin.LIVE)]:
            if span.start > at:
                yield Span(at, span.start, Origin.LIVE, self._why_live(at, span.start))
            if span.length:
                yield span
            at = span.end

    def _why_live(self, start: int, end: int) -> str:
        if not self.content.runs or start == self.prefix_end:
            return self.reason
        return "never stored" if end - start >= _MIN_GAP_TOKENS else TOO_SHORT


class PrefixPart(NamedTuple):
    """Exact pieces of a plan, and by how many slots their place differs from their position."""

    pieces: list[ChunkMatch]
    shift: int

    @classmethod
    def of(cls, plan: ReusePlan, start: int, end: int, slot: int) -> PrefixPart:
        """What `plan` has of positions `[start, end)`, of which the first goes to `slot`."""
        return cls(_cut(plan.pieces, start, end), slot - start)


Estimator = Callable[[ReusePlan], CostEstimate]
_MIN_GAP_TOKENS = 32  # a gap shorter than this could not have been found


def _cut(pieces: Sequence[ChunkMatch], start: int, end: int) -> list[ChunkMatch]:
    return [part for piece in pieces if (part := piece.within(start, end)) is not None]


def _approximate(start: int, end: int, donor: str, reason: str, again: np.ndarray) -> Iterator[Span]:
    """Spans of `[start, end)`, recomputed or approximate as `again` `[tokens]` says."""
    changes = np.flatnonzero(np.diff(again[start:end])) + start + 1
    edges = [start, *changes.tolist(), end]
    for first, last in pairwise(edges):
        yield Span(first, last, Origin.RECOMPUTED if again[first] else Origin.APPROXIMATE, reason, donor)


class PromptAssembler:
    """Finds and places reusable KV.

    `whole_chunks_of` limits reuse to whole chunks of that many tokens (bit-exact mode). Approximate reuse
    needs a `rotation` to move keys with; without one, and with `AssemblyMode.PREFIX_ONLY`, there is exact
    reuse only. The first `sink_tokens` positions are never approximate. `lossy_from` is the position
    behind which prefix chunks are lossy (overlap mode).
    """

    def __init__(
        self,
        cache_manager: KVCacheManager,
        mode: AssemblyMode | str = AssemblyMode.CHUNK_REUSE,
        *,
        whole_chunks_of: int | None = None,
        rotation: KeyRotation | None = None,
        sink_tokens: int = 0,
        lossy_from: int | None = None,
    ) -> None:
        self._manager = cache_manager
        self.mode = AssemblyMode(mode)
        self._whole_chunks_of = whole_chunks_of
        self._rotation = rotation
        self._sink_tokens = sink_tokens
        self._lossy_from = lossy_from

    @contextmanager
    def planned(
        self,
        token_ids: np.ndarray,
        namespace: Namespace,
        limit: int,
        *,
        mode: AssemblyMode | None = None,
        estimate: Estimator | None = None,
        refusal: str = "",
    ) -> Iterator[ReusePlan]:
        """What can be reused among the first `limit` tokens; held until the block ends.

        With `estimate`, approximate reuse is left out where it would not pay; with a `refusal`, always.
        """
        plan = self._plan(token_ids, namespace, limit, mode, estimate, refusal, hold=True)
        try:
            yield plan
        finally:
            self._manager.release_content(plan.content, used=plan.reused > plan.prefix_end)
            self._manager.release(plan.match, used_tokens=plan.prefix_end)

    def plan(
        self,
        token_ids: np.ndarray,
        namespace: Namespace,
        limit: int,
        *,
        mode: AssemblyMode | None = None,
        estimate: Estimator | None = None,
        refusal: str = "",
    ) -> ReusePlan:
        """What could be reused among the first `limit` tokens. Changes nothing."""
        return self._plan(token_ids, namespace, limit, mode, estimate, refusal, hold=False)

    def _plan(
        self,
        token_ids: np.ndarray,
        namespace: Namespace,
        limit: int,
        mode: AssemblyMode | None,
        estimate: Estimator | None,
        refusal: str,
        *,
        hold: bool,
    ) -> ReusePlan:
        match = self._manager.match_prefix(token_ids, namespace, hold=hold)
        exact = self._prefix_plan(match, len(token_ids), limit, refusal)
        if (mode or self.mode) is AssemblyMode.PREFIX_ONLY or self._rotation is None or refusal:
            return exact
        start = max(exact.prefix_end, self._sink_tokens)
        if limit - start < self._manager.min_run_tokens:
            return exact
        content = self._manager.match_content(token_ids, namespace, start=start, end=limit, hold=hold)
        plan = replace(exact, content=content, chain_end=min(content.chain.length, limit))
        if estimate is None or not plan.needs_repair:
            return plan
        cost = estimate(plan)
        if cost.pays:
            return replace(plan, estimate=cost)
        exact_end = next((piece.start for piece in plan.pieces if plan.is_lossy(piece)), plan.prefix_end)
        if exact_end < plan.prefix_end:
            nothing = replace(content, chain=ChainMatch(), runs=())  # still held, until it is released
            reason = "computed: reuse would not pay"
            return replace(exact, prefix_end=exact_end, reason=reason, content=nothing, estimate=cost)
        return replace(plan, content=replace(content, runs=()), estimate=cost)  # a chain needs no repair

    def _prefix_plan(self, match: PrefixMatch, total: int, limit: int, refusal: str) -> ReusePlan:
        reused = min(match.length, limit)
        if self._whole_chunks_of is not None:
            reused -= reused % self._whole_chunks_of
        reason = match.miss_reason
        if reused < match.length:
            reason = (
                "computed: generation needs it"
                if reused == total - 1
                else "computed: only whole blocks are bit-exact"
            )
        return ReusePlan(total, match, reused, reason, lossy_from=self._lossy_from, refusal=refusal)

    def chunks_needed(self, plan: ReusePlan, exact_already: int = 0, any_already: int = 0) -> list[KeptChunk]:
        """The chunks that `place` will copy from."""
        pieces = [
            *_cut(plan.pieces, exact_already, plan.prefix_end),
            *_cut(plan.chain_pieces, max(plan.prefix_end, any_already), plan.chain_end),
            *plan.moved_pieces,
        ]
        return list({piece.chunk.chunk_id: piece.chunk for piece in pieces}.values())

    def place(
        self,
        plan: ReusePlan,
        arena: Arena,
        exact_already: int = 0,
        any_already: int = 0,
        loaded: Mapping[str, StoredKV] | None = None,
    ) -> None:
        """Copy the planned KV into `arena` and turn the keys of what moved.

        Of the prompt's first tokens it holds `exact_already` as exact and `any_already` as this chain by now.
        `loaded` has the KV of chunks that lie on disk.
        """
        loaded = loaded or {}
        for piece in _cut(plan.pieces, exact_already, plan.prefix_end):
            _copy(piece, arena, loaded)
        chain_start = max(plan.prefix_end, any_already)
        self._place_moved(_cut(plan.chain_pieces, chain_start, plan.chain_end), arena, loaded)
        for overlay in plan.content.chain.overlays if plan.chain_end > chain_start else ():
            inside = (overlay.positions >= chain_start) & (overlay.positions < plan.chain_end)
            columns = torch.from_numpy(np.flatnonzero(inside))
            own = overlay.kv.decoded(len(overlay.positions))
            parts = [part.index_select(1, columns.to(part.device)) for part in own]
            arena.place_at(parts, torch.from_numpy(overlay.positions[inside]))
        self._place_moved(plan.moved_pieces, arena, loaded)
        if plan.needs_repair:
            # What is not filled yet is masked, but a mask does not stop the NaN of an earlier request.
            for start, end in plan.gaps:
                arena.clear(start, end)
        arena.set_length(plan.contiguous_end)

    def place_parts(
        self, parts: Sequence[PrefixPart], arena: Arena, loaded: Mapping[str, StoredKV] | None = None
    ) -> None:
        """Copy exact pieces into the slots of `arena` that are theirs."""
        for part in parts:
            for piece in part.pieces:
                _copy(piece, arena, loaded or {}, part.shift)

    def _place_moved(
        self, pieces: Sequence[ChunkMatch], arena: Arena, loaded: Mapping[str, StoredKV]
    ) -> None:
        for piece in pieces:
            _copy(piece, arena, loaded)
        for start, end, shift in _stretches(pieces):
            if shift:
                assert self._rotation is not None
                self._rotation.rotate_(arena.slabs, arena.layout, start, end, shift)

    def assemble(self, token_ids: TokenIds, namespace: Namespace = ROOT) -> AssembledPrompt:
        """Gather the KV that is stored for `token_ids`, all of them if it is there."""
        ids = np.asarray(token_ids, dtype=np.int64)
        total = len(ids)
        with self.planned(ids, namespace, limit=total) as whole_plan:
            needed = [chunk for chunk in self.chunks_needed(whole_plan) if not chunk.kv.is_loaded]
            loaded = self._manager.load(needed) if needed and self._manager.load is not None else {}
            plan = whole_plan.without({chunk.chunk_id for chunk in needed} - loaded.keys())
            pieces = [*plan.pieces, *plan.chain_pieces, *plan.moved_pieces]
            past = None
            if plan.reused:
                arena = Arena(pieces[0].chunk.kv.codec.layout, total)
                self.place(plan, arena, loaded=loaded)
                arena.set_length(total)
                where = torch.from_numpy(np.concatenate([np.arange(run.start, run.end) for run in plan.runs]))
                past = tuple(
                    (key.index_select(2, where.to(key.device)), value.index_select(2, where.to(value.device)))
                    for key, value in arena.as_past_key_values()
                )
            live = np.ones(total, dtype=bool)
            for run in plan.runs:
                live[run.start : run.end] = False
            return AssembledPrompt(
                full_token_ids=ids.tolist(),
                cached_past_kv=past,
                cached_length=plan.reused,
                live_token_ids=ids[live].tolist(),
                live_position_ids=np.flatnonzero(live).tolist(),
                chunk_boundaries=[(piece.start, piece.end) for piece in pieces],
                cache_hit_ratio=plan.reused / total if total else 0.0,
                has_approximate=plan.has_moved or plan.chain_end > plan.prefix_end,
                runs=plan.runs,
            )


def _copy(piece: ChunkMatch, arena: Arena, loaded: Mapping[str, StoredKV], shift: int = 0) -> None:
    kv = piece.chunk.kv if piece.chunk.kv.is_loaded else loaded[piece.chunk.chunk_id]
    kv.place(arena, piece.start + shift, piece.offset, piece.offset + piece.end - piece.start)


def _stretches(pieces: Sequence[ChunkMatch]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring pieces with one shift, as (start, end, shift)."""
    start = end = shift = 0
    for piece in pieces:
        if piece.start == end and piece.shift == shift and end > start:
            end = piece.end
            continue
        if end > start:
            yield start, end, shift
        start, end, shift = piece.start, piece.end, piece.shift
    if end > start:
        yield start, end, shift
