"""When approximate reuse is allowed, how it is repaired, and what it is estimated to cost.

Gathers what the engine's options and the model itself say about it. Knows no store and no request.
"""

from __future__ import annotations

import math
from typing import Any

from kvboost.choices import RecomputeStrategy
from kvboost.kv import rope
from kvboost.reuse.costs import CostEstimate, ForwardCosts
from kvboost.reuse.plan import ReusePlan
from kvboost.reuse.repair import RepairStrategy, positions_of
from kvboost.reuse.strategies.cacheblend import CacheBlendRecompute
from kvboost.reuse.strategies.selective import SelectiveRecompute
from kvboost.settings import EngineSettings

BIT_EXACT_REASON = "exact reuse only: bit_exact"
NOT_CALIBRATED_REASON = "exact reuse only: not calibrated, run kvboost calibrate or engine.calibrate()"


class Approximation:
    """The policy of one engine. `ratio` is the share computed again; None = none is good enough."""

    def __init__(self, model: Any, settings: EngineSettings, rotation: rope.KeyRotation | str) -> None:
        self._settings = settings
        self.rotation = rotation if isinstance(rotation, rope.KeyRotation) else None
        self.unmovable = rotation if isinstance(rotation, str) else ""
        self._limit = rope.approximate_limit_tokens(model)
        self._costs = ForwardCosts(model)
        ratio = settings.recompute_ratio
        self.ratio: float | None = None if isinstance(ratio, str) else float(ratio)
        self.no_ratio_reason = NOT_CALIBRATED_REASON

    def refusal(self, total: int, *, calibrating: bool = False) -> str:
        """Why a prompt of `total` tokens gets exact reuse only; "" = it does not.

        While `calibrating`, that there is no ratio yet is no reason.
        """
        if self._settings.bit_exact:
            return BIT_EXACT_REASON
        if self.unmovable:
            return self.unmovable
        if self._limit is not None and total > self._limit:
            return rope.WINDOW_REASON
        return self.no_ratio_reason if self.ratio is None and not calibrating else ""

    def strategy(self, plan: ReusePlan) -> RepairStrategy | None:
        """How the reused tokens of `plan` are repaired. What was moved always goes through CacheBlend."""
        kind = RecomputeStrategy(self._settings.recompute_strategy)
        if plan.has_moved or kind is RecomputeStrategy.CACHEBLEND:
            # The ratio is a promise here, so no threshold cuts it.
            return CacheBlendRecompute(self.ratio or 0.0, 0.0, selector=self._settings.selector)
        if kind is RecomputeStrategy.SELECTIVE:
            return SelectiveRecompute(self._settings.recompute_overlap)
        return None

    def choice(self, plan: ReusePlan) -> str:
        """Why approximate reuse is used in `plan` or not, in words; "" where there is nothing to choose."""
        if plan.estimate is None:
            return ""
        if not plan.estimate.pays:
            return str(plan.estimate)
        reused = len(positions_of(plan.repair_runs, exact=False))
        strategy = self.strategy(plan)
        again = math.ceil((self.ratio or 0.0) * reused) if isinstance(strategy, CacheBlendRecompute) else None
        how = "at the seams" if again is None else f"{again:,}"
        return f"{plan.estimate}; of {reused:,} approximate tokens {how} would be computed again"

    def touches_all(self, plan: ReusePlan) -> bool:
        """Whether repair leaves other KV than it found on tokens that it did not choose."""
        strategy = self.strategy(plan)
        return isinstance(strategy, CacheBlendRecompute) and strategy.selector == "deviation"

    def estimate(self, plan: ReusePlan) -> CostEstimate:
        """What repairing the runs of `plan` would cost, against computing all behind the exact ones."""
        strategy = self.strategy(plan)
        runs, total = plan.repair_runs, plan.total
        if isinstance(strategy, CacheBlendRecompute):
            return self._costs.estimate(runs, total, strategy.recompute_ratio, strategy.selector)
        seam = strategy.recompute_overlap if isinstance(strategy, SelectiveRecompute) else 0
        return self._costs.estimate(runs, total, min(1.0, seam / self._settings.chunk_size), None)
