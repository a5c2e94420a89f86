"""What of a prompt is reused, and why the rest is not: the outcome of a look-up, before anything is copied.

Knows which chunks were found and where their tokens go. Knows no arena and no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvboost.choices import Origin
from kvboost.models import ReusedRun, Span
from kvboost.reuse.costs import CostEstimate
from kvboost.reuse.repair import RepairStrategy, positions_of
from kvboost.store.matching import ChainMatch, ChunkMatch, ContentMatch, Overlay, PrefixMatch

if TYPE_CHECKING:
    from kvboost.reuse.policy import Repair

CHAIN_REASON = "repaired in an earlier request"
LOSSY_REASON = "prefix, overlap encoding"
QUANTIZED_REASON = "exact prefix, quantized"
TOO_SHORT = "too short"
REMOTE = "remote"  # from a store that several machines share
GENERATION_REASON = "computed: generation needs it"
UNPAID_REASON = "computed: reuse would not pay"
_MIN_GAP_TOKENS = 32  # text in a shorter gap cannot be found by content


@dataclass(frozen=True)
class ReusePlan:
    """What of a prompt of `total` tokens is reused, and why the rest is not.

    The first `prefix_end` tokens come from `match`, those up to `chain_end` from the approximate chain of
    an earlier request, and the runs of `content` from anywhere. In overlap mode, prefix chunks that start
    after `lossy_from` are not exact. `refusal` says why approximate reuse is not allowed, `repair` how it is
    repaired where it is.
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
    repair: Repair | None = None

    @cached_property
    def pieces(self) -> list[ChunkMatch]:
        """The prefix matches, cut at `prefix_end`."""
        return cut_pieces(self.match.matches, 0, self.prefix_end)

    def without(self, keys: set[str]) -> ReusePlan:
        """The plan without the chunks `keys`, which could not be loaded, and without what depends on them."""
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

    @cached_property
    def chain_pieces(self) -> list[ChunkMatch]:
        """What the approximate chain borrows after the prefix."""
        return cut_pieces(self.content.chain.pieces, self.prefix_end, self.chain_end)

    @cached_property
    def moved_pieces(self) -> list[ChunkMatch]:
        """The matches that were found by content."""
        return [piece for run in self.content.runs for piece in run]

    def is_lossy(self, piece: ChunkMatch) -> bool:
        """Whether a prefix piece was computed without seeing all tokens before it."""
        return self.lossy_from is not None and piece.start > self.lossy_from

    @cached_property
    def runs(self) -> tuple[ReusedRun, ...]:
        """All that is reused, as runs. Those of a chain and those found by content are not exact."""
        lossy = [piece for piece in self.pieces if self.is_lossy(piece)]
        exact_end = lossy[0].start if lossy else self.prefix_end
        runs = [ReusedRun(0, exact_end, 0, True)] if exact_end else []
        runs += [ReusedRun(piece.start, piece.end, 0, False) for piece in lossy]
        if self.chain_end > self.prefix_end:
            runs.append(ReusedRun(self.prefix_end, self.chain_end, 0, False))
        moved = (ReusedRun(run[0].start, run[-1].end, run[0].shift, False) for run in self.content.runs)
        return (*runs, *moved)

    @cached_property
    def repair_runs(self) -> tuple[ReusedRun, ...]:
        """The runs as repair sees them: a chain was repaired in an earlier request and counts as exact."""
        chain = (self.prefix_end, self.chain_end)
        return tuple(run._replace(exact=run.exact or run[:2] == chain) for run in self.runs)

    @cached_property
    def needs_repair(self) -> bool:
        """Whether a run is neither exact nor repaired already."""
        return any(not run.exact for run in self.repair_runs)

    @cached_property
    def strategy(self) -> RepairStrategy:
        """How its runs are repaired."""
        if self.repair is None:
            raise ValueError("this plan was made without a way to repair it")
        return self.repair.strategy(self)

    def changed(self, recomputed: np.ndarray) -> np.ndarray:
        """Reused positions `[n]` whose KV is another after a repair that computed `recomputed` `[m]`."""
        if self.needs_repair and self.strategy.rewrites_all:
            return positions_of(self.repair_runs, exact=False)
        return recomputed

    @property
    def has_moved(self) -> bool:
        """Whether text was found by content."""
        return bool(self.content.runs)

    @cached_property
    def first_approximate(self) -> int:
        """The first position whose KV is not exact; everything before it is, reused or computed."""
        return min((run.start for run in self.runs if not run.exact), default=self.total)

    @cached_property
    def reused(self) -> int:
        """Tokens that are reused."""
        return sum(run.end - run.start for run in self.runs)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Half-open spans of the prompt that are not reused."""
        edges = [0, *(edge for run in self.runs for edge in (run.start, run.end)), self.total]
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]

    @property
    def contiguous_end(self) -> int:
        """Where the first gap starts."""
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
                reason = _with_way(QUANTIZED_REASON if piece.chunk.kv.codec.is_lossy else "", piece)
                spans.append(Span(piece.start, piece.end, Origin.EXACT, reason, piece.chunk.chunk_id))
        if self.chain_end > self.prefix_end:
            donor = self.content.chain.keys[-1]
            spans.append(Span(self.prefix_end, self.chain_end, Origin.APPROXIMATE, CHAIN_REASON, donor))
        for piece in self.moved_pieces:
            reason = f"moved by {piece.shift:+d} positions" if piece.shift else "behind other text"
            reason = _with_way(reason, piece)
            spans += _approximate(piece.start, piece.end, piece.chunk.chunk_id, reason, again)
        return tuple(self._with_live(spans))

    def _with_live(self, spans: list[Span]) -> Iterator[Span]:
        """The spans, with live ones in the gaps between them."""
        at = 0
        for span in [*spans, Span(self.total, self.total, Origin.LIVE)]:
            if span.start > at:
                yield Span(at, span.start, Origin.LIVE, self._why_live(at, span.start))
            if span.length:
                yield span
            at = span.end

    def _why_live(self, start: int, end: int) -> str:
        if start >= self.chain_end > self.prefix_end:  # the prefix's reason is that of an earlier token
            return GENERATION_REASON if start == self.total - 1 else "never stored"
        if not self.content.runs or start == self.prefix_end:
            return self.reason
        return "never stored" if end - start >= _MIN_GAP_TOKENS else TOO_SHORT


class PlanPart(NamedTuple):
    """Pieces of a plan, and the overlays of its chain at positions `[start, end)`.

    Their slots in an arena are their positions plus `shift`.
    """

    pieces: list[ChunkMatch]
    shift: int = 0
    overlays: tuple[Overlay, ...] = ()
    start: int = 0
    end: int = 0

    @classmethod
    def exact(cls, plan: ReusePlan, start: int, end: int, slot: int) -> PlanPart:
        """The prefix in `[start, end)`, placed from `slot` on."""
        return cls(cut_pieces(plan.pieces, start, end), slot - start)

    @classmethod
    def any_kind(cls, plan: ReusePlan, start: int, end: int, slot: int) -> PlanPart:
        """Prefix, chain and moved text in `[start, end)`, placed from `slot` on."""
        pieces = cut_pieces([*plan.pieces, *plan.chain_pieces, *plan.moved_pieces], start, end)
        chain_start, chain_end = max(start, plan.prefix_end), min(end, plan.chain_end)
        overlays = plan.content.chain.overlays if chain_start < chain_end else ()
        return cls(pieces, slot - start, overlays, chain_start, chain_end)


def cut_pieces(pieces: Sequence[ChunkMatch], start: int, end: int) -> list[ChunkMatch]:
    """The parts of `pieces` that lie in `[start, end)`."""
    return [part for piece in pieces if (part := piece.within(start, end)) is not None]


def _with_way(reason: str, piece: ChunkMatch) -> str:
    """The reason, with how its KV came here where that was for this request."""
    if not piece.chunk.is_news:
        return reason
    way = f"{REMOTE}, {piece.chunk.fetched_ms:.0f} ms"
    return f"{reason}, {way}" if reason else way


def _approximate(start: int, end: int, donor: str, reason: str, again: np.ndarray) -> Iterator[Span]:
    """Spans of `[start, end)`: recomputed where `again` `[tokens]` is set, else approximate."""
    changes = np.flatnonzero(np.diff(again[start:end])) + start + 1
    edges = [start, *changes.tolist(), end]
    for first, last in pairwise(edges):
        yield Span(first, last, Origin.RECOMPUTED if again[first] else Origin.APPROXIMATE, reason, donor)
