"""From matches to KV in place.

`plan` asks the cache manager what is stored of a prompt. `place` copies that into an arena and re-rotates the
keys of moved text. `assemble` does both in an arena of its own and describes the result. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvboost.choices import AssemblyMode
from kvboost.identity.namespace import Namespace
from kvboost.kv.arena import Arena
from kvboost.kv.codec import KeptChunk, Placement, StoredKV, place_all
from kvboost.kv.rope import KeyRotation
from kvboost.models import AssembledPrompt, TokenIds
from kvboost.reuse.plan import GENERATION_REASON, UNPAID_REASON, PlanPart, ReusePlan
from kvboost.store.forest import ROOT
from kvboost.store.manager import KVCacheManager
from kvboost.store.matching import ChainMatch, ChunkMatch, PrefixMatch

if TYPE_CHECKING:
    from kvboost.reuse.policy import Repair


class Lookup(NamedTuple):
    """What to look for: tokens `[n]` of a namespace, of which the first `limit` may be reused.

    Approximate reuse is left out where `repair` does not pay; with a `refusal`, always. A `mode` of None is
    that of the assembler.
    """

    token_ids: np.ndarray
    namespace: Namespace
    limit: int
    mode: AssemblyMode | None = None
    repair: Repair | None = None
    refusal: str = ""


class PromptAssembler:
    """Finds and places reusable KV.

    `whole_chunks_of` limits reuse to whole chunks of that many tokens (bit-exact mode). Approximate reuse
    needs a `rotation` to move keys; without one, or with `AssemblyMode.PREFIX_ONLY`, all reuse is exact. The
    first `sink_tokens` positions are never approximate. In overlap mode, prefix chunks that start after
    `lossy_from` are not exact.
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
    def planned(self, lookup: Lookup) -> Iterator[ReusePlan]:
        """What can be reused. It cannot be evicted until the block ends."""
        plan = self.plan(lookup, hold=True)
        try:
            yield plan
        finally:
            self._manager.release_content(plan.content, used=plan.reused > plan.prefix_end)
            self._manager.release(plan.match, used_tokens=plan.prefix_end)

    def plan(self, lookup: Lookup, *, hold: bool = False) -> ReusePlan:
        """What could be reused. Changes nothing, unless it is told to hold what it finds."""
        token_ids, namespace, limit, mode, repair, refusal = lookup
        if repair is not None:
            namespace = replace(namespace, repaired=repair.label)
        match = self._manager.match_prefix(token_ids, namespace, hold=hold)
        exact = replace(self._prefix_plan(match, len(token_ids), limit, refusal), repair=repair)
        if (mode or self.mode) is AssemblyMode.PREFIX_ONLY or self._rotation is None or refusal:
            return exact
        start = max(exact.prefix_end, self._sink_tokens)
        if limit - start < self._manager.min_run_tokens:
            return exact
        content = self._manager.match_content(token_ids, namespace, start=start, end=limit, hold=hold)
        plan = replace(exact, content=content, chain_end=min(content.chain.length, limit))
        if repair is None or not plan.needs_repair:
            return plan
        cost = repair.estimate(plan)
        if cost.pays:
            return replace(plan, estimate=cost)
        exact_end = next((piece.start for piece in plan.pieces if plan.is_lossy(piece)), plan.prefix_end)
        if exact_end < plan.prefix_end:
            nothing = replace(content, chain=ChainMatch(), runs=())  # held until released
            return replace(exact, prefix_end=exact_end, reason=UNPAID_REASON, content=nothing, estimate=cost)
        # The chain stays: it needs no repair.
        return replace(plan, content=replace(content, runs=()), reason=UNPAID_REASON, estimate=cost)

    def _prefix_plan(self, match: PrefixMatch, total: int, limit: int, refusal: str) -> ReusePlan:
        reused = min(match.length, limit)
        if self._whole_chunks_of is not None:
            reused -= reused % self._whole_chunks_of
        reason = match.miss_reason
        if reused < match.length:
            reason = GENERATION_REASON if reused == total - 1 else "computed: only whole blocks are bit-exact"
        return ReusePlan(total, match, reused, reason, lossy_from=self._lossy_from, refusal=refusal)

    def place(
        self,
        plan: ReusePlan,
        arena: Arena,
        exact_already: int = 0,
        any_already: int = 0,
        loaded: Mapping[str, StoredKV] | None = None,
    ) -> None:
        """Copy the planned KV into `arena` and re-rotate the keys of what moved.

        `arena` already holds exact KV of the first `exact_already` tokens, and KV of this chain up to
        `any_already`. `loaded` has the KV of chunks that are on disk only.
        """
        self.place_parts(parts_of(plan, exact_already, any_already), arena, loaded)
        self.settle(plan, arena)

    @staticmethod
    def settle(plan: ReusePlan, arena: Arena) -> None:
        """Make an arena in which `plan` was placed ready for repair and prefill."""
        if plan.needs_repair:
            # Gaps are masked, but a mask does not keep out a NaN that an earlier request left there.
            for start, end in plan.gaps:
                arena.clear(start, end)
        arena.set_length(plan.contiguous_end)

    def place_parts(
        self, parts: Sequence[PlanPart], arena: Arena, loaded: Mapping[str, StoredKV] | None = None
    ) -> None:
        """Copy parts of plans into their slots of `arena`, and re-rotate the keys of what moved."""
        for part in parts:
            place_all((_placement(piece, loaded or {}, part.shift) for piece in part.pieces), arena)
            moved = [
                (start + part.shift, end + part.shift, shift)
                for start, end, shift in _stretches(part.pieces)
                if shift
            ]
            if moved:
                assert self._rotation is not None
                self._rotation.rotate_all_(arena.slabs, arena.layout, moved)
            for overlay in part.overlays:
                inside = (overlay.positions >= part.start) & (overlay.positions < part.end)
                columns = torch.from_numpy(np.flatnonzero(inside))
                own = overlay.kv.decoded(len(overlay.positions))
                kv = [each.index_select(1, columns.to(each.device)) for each in own]
                arena.place_at(kv, torch.from_numpy(overlay.positions[inside] + part.shift))

    def assemble(self, token_ids: TokenIds, namespace: Namespace = ROOT) -> AssembledPrompt:
        """Gather the KV that is stored for `token_ids`, up to the last one."""
        ids = np.asarray(token_ids, dtype=np.int64)
        total = len(ids)
        with self.planned(Lookup(ids, namespace, total)) as whole_plan:
            needed = [chunk for chunk in chunks_of(parts_of(whole_plan)) if not chunk.kv.is_loaded]
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


def parts_of(plan: ReusePlan, exact_already: int = 0, any_already: int = 0) -> list[PlanPart]:
    """All that `plan` reuses, at its positions, without what an arena has of it already.

    That is exact KV of the first `exact_already` tokens, and KV of the same chain up to `any_already`.
    """
    chain_start = max(plan.prefix_end, min(any_already, plan.chain_end))
    return [
        PlanPart.exact(plan, exact_already, plan.prefix_end, exact_already),
        PlanPart.any_kind(plan, chain_start, plan.total, chain_start),
    ]


def chunks_of(parts: Sequence[PlanPart]) -> list[KeptChunk]:
    """The chunks that parts copy from, each once."""
    return list({piece.chunk.chunk_id: piece.chunk for part in parts for piece in part.pieces}.values())


def _placement(piece: ChunkMatch, loaded: Mapping[str, StoredKV], shift: int) -> Placement:
    kv = piece.chunk.kv if piece.chunk.kv.is_loaded else loaded[piece.chunk.chunk_id]
    return Placement(kv, piece.start + shift, piece.offset, piece.offset + piece.end - piece.start)


def _stretches(pieces: Sequence[ChunkMatch]) -> Iterator[tuple[int, int, int]]:
    """Adjacent pieces with the same shift, joined, as (start, end, shift)."""
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
