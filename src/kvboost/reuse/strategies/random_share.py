"""A random share of the reused tokens: what any rule has to beat. Knows no store and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvboost.kv.arena import Arena
from kvboost.models import ReusedRun
from kvboost.reuse.costs import CostEstimate, ForwardCosts
from kvboost.reuse.repair import RepairStrategy, positions_of

_SEED = 20_240_501


@dataclass(frozen=True)
class RandomRecompute(RepairStrategy):
    """Computes a random share of the reused tokens again."""

    ratio: float

    def choose(
        self,
        model: Any,  # noqa: ARG002
        token_ids: np.ndarray,
        arena: Arena,  # noqa: ARG002
        runs: Sequence[ReusedRun],
    ) -> np.ndarray:
        """Sorted random positions `[n]`, the same for the same prompt."""
        reused = positions_of(runs, exact=False)
        random = np.random.default_rng([_SEED, len(token_ids), int(token_ids.sum())])
        chosen = random.choice(reused, size=round(self.ratio * len(reused)), replace=False)
        return np.sort(chosen)

    def cost(self, runs: Sequence[ReusedRun], total: int, costs: ForwardCosts) -> CostEstimate:
        """The share, which needs no search."""
        return costs.estimate(runs, total, self.ratio)
