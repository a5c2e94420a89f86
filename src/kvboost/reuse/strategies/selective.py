"""Selective recompute: compute the tokens at every seam again.

A seam is where a run of reused tokens starts after text other than it was computed after. Knows no store
and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvboost.errors import InvalidRequestError
from kvboost.kv.arena import Arena
from kvboost.models import AssembledPrompt, ReusedRun
from kvboost.reuse.costs import CostEstimate, ForwardCosts
from kvboost.reuse.repair import RepairStrategy, apply_strategy, positions_of, runs_of

SIDES = ("after", "before")


@dataclass(frozen=True)
class SelectiveRecompute(RepairStrategy):
    """Computes `recompute_overlap` tokens at each seam again, with the cached context before them visible.

    `side` says which: the first ones "after" the seam, which may hold an attention sink that is no longer
    first (better, see docs/how-reuse-works.md), or the last ones "before" it. Without seams nothing
    happens, or with `skip_if_no_seams=False` the last `recompute_overlap` reused tokens are recomputed.
    """

    recompute_overlap: int = 16
    skip_if_no_seams: bool = True
    device: str = "cpu"
    side: str = "after"

    def __post_init__(self) -> None:
        if self.recompute_overlap < 0:
            raise InvalidRequestError(f"recompute_overlap must be at least 0, got {self.recompute_overlap}")
        if self.side not in SIDES:
            raise InvalidRequestError(f'side must be "after" or "before", got {self.side!r}')

    def choose(
        self,
        model: Any,  # noqa: ARG002  # the seams alone decide
        token_ids: np.ndarray,  # noqa: ARG002
        arena: Arena,  # noqa: ARG002
        runs: Sequence[ReusedRun],
    ) -> np.ndarray:
        """Sorted positions `[n]` at the seams of the runs that are not exact."""
        overlap = self.recompute_overlap
        seams = [run.start for run in runs if not run.exact and run.start > 0]
        if not seams and not self.skip_if_no_seams and runs:
            return np.arange(max(runs[-1].start, runs[-1].end - overlap), runs[-1].end)
        reach = (0, overlap) if self.side == "after" else (-overlap, 0)
        near = [np.arange(max(0, seam + reach[0]), seam + reach[1]) for seam in seams]
        if not near:
            return np.zeros(0, dtype=np.int64)
        return np.intersect1d(np.concatenate(near), positions_of(runs, exact=False))

    def cost(self, runs: Sequence[ReusedRun], total: int, costs: ForwardCosts) -> CostEstimate:
        """The seams of every chunk, which need no search."""
        return costs.estimate(runs, total, costs.seam_share(self.recompute_overlap))

    def describe(self, reused: int) -> str:
        """Says where, since the number of seams is not known yet."""
        return f"of {reused:,} approximate tokens those at the seams"

    def apply(self, assembled: AssembledPrompt, model: Any) -> AssembledPrompt:
        """`assembled` with the KV at its seams computed again, `[1, kv_heads, n, head_dim]` per layer."""
        seams = any(not run.exact for run in runs_of(assembled))
        if not seams and self.skip_if_no_seams:
            return assembled
        return apply_strategy(self, assembled, model)
