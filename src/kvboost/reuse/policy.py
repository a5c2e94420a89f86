"""When approximate reuse is allowed, how it is repaired, and what it is estimated to cost.

Combines the engine's options with what the model allows. Knows no store and no request, and no strategy by
name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kvboost.errors import InvalidRequestError
from kvboost.kv import rope
from kvboost.reuse import strategies
from kvboost.reuse.costs import CostEstimate, ForwardCosts
from kvboost.reuse.plan import ReusePlan
from kvboost.reuse.repair import RepairStrategy, positions_of
from kvboost.settings import EngineSettings

_MOST_KEPT = 64  # of the strategies that requests have asked for
BIT_EXACT_REASON = "exact reuse only: bit_exact"
NOT_CALIBRATED_REASON = "exact reuse only: not calibrated, run kvboost calibrate or engine.calibrate()"


@dataclass(frozen=True)
class Repair:
    """A ratio and the strategies that go with it: requests in other threads see all of it or nothing."""

    ratio: float | None
    label: str  # tells its approximate chains apart; empty where it is as the engine's options say
    no_ratio_reason: str
    costs: ForwardCosts
    for_moved_text: RepairStrategy
    for_prefix_chunks: RepairStrategy

    def strategy(self, plan: ReusePlan) -> RepairStrategy:
        """How the reused tokens of `plan` are repaired. Moved text has a strategy of its own."""
        return self.for_moved_text if plan.has_moved else self.for_prefix_chunks

    def estimate(self, plan: ReusePlan) -> CostEstimate:
        """What repairing the runs of `plan` would cost, against computing all that follows the exact ones."""
        return self.strategy(plan).cost(plan.repair_runs, plan.total, self.costs)

    def choice(self, plan: ReusePlan) -> str:
        """Why `plan` has approximate reuse or not, in words; empty if there was nothing to choose."""
        if plan.estimate is None:
            return ""
        if not plan.estimate.pays:
            return str(plan.estimate)
        reused = len(positions_of(plan.repair_runs, exact=False))
        return f"{plan.estimate}; {self.strategy(plan).describe(reused)} would be computed again"


class Approximation:
    """The policy of one engine."""

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        rotation: rope.KeyRotation | str,
        costs: ForwardCosts,
    ) -> None:
        self._settings = settings
        self.rotation = rotation if isinstance(rotation, rope.KeyRotation) else None
        self.unmovable = rotation if isinstance(rotation, str) else ""
        self._limit = rope.approximate_limit_tokens(model)
        self._costs = costs
        ratio = settings.recompute_ratio
        self._repair = self._with(
            settings, None if isinstance(ratio, str) else float(ratio), NOT_CALIBRATED_REASON
        )
        self._asked_for = lru_cache(_MOST_KEPT)(self._of)

    def use_ratio(self, ratio: float | None, no_ratio_reason: str) -> None:
        """Recompute this share from now on; None = no ratio is good enough, for `no_ratio_reason`.

        Requests that began with a ratio keep its strategies.
        """
        if ratio is None:
            self._repair = replace(self._repair, ratio=None, no_ratio_reason=no_ratio_reason)
        else:
            self._repair = self._with(self._settings, ratio, no_ratio_reason)

    def repair(self, ratio: float | None = None, selector: str | None = None) -> Repair:
        """The engine's repair as it is now, or with a ratio or selector of a request's own.

        An InvalidRequestError says what is wrong with these.
        """
        now = self._repair
        if ratio is None and selector is None:
            return now
        is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
        if ratio is not None and not (is_number and 0 <= ratio <= 1):
            raise InvalidRequestError(f"recompute_ratio must be a number from 0 to 1, got {ratio!r}")
        if not isinstance(selector, (str, type(None))):
            raise InvalidRequestError(f"selector must be text, got {selector!r}")
        return self._asked_for(now.ratio if ratio is None else float(ratio), now.no_ratio_reason, selector)

    def _of(self, ratio: float | None, no_ratio_reason: str, selector: str | None) -> Repair:
        given: dict[str, Any] = {}
        if ratio is not None:
            given = {"recompute_ratio": ratio, "max_kl": None, "min_facts": None}
        if selector is not None:
            given["selector"] = selector
        return self._with(replace(self._settings, **given), ratio, no_ratio_reason)

    def _with(self, settings: EngineSettings, ratio: float | None, no_ratio_reason: str) -> Repair:
        own = (self._settings.recompute_ratio, self._settings.selector)
        return Repair(
            ratio,
            "" if (ratio, settings.selector) == own else f"{settings.selector} {ratio or 0.0:g}",
            no_ratio_reason,
            self._costs,
            strategies.for_moved_text(settings, ratio or 0.0),
            strategies.for_prefix_chunks(settings, ratio or 0.0),
        )

    def refusal(self, total: int, repair: Repair | None = None, *, calibrating: bool = False) -> str:
        """Why a prompt of `total` tokens gets exact reuse only; empty if approximate reuse is allowed.

        While `calibrating`, a missing ratio is no reason.
        """
        if self._settings.bit_exact:
            return BIT_EXACT_REASON
        if self.unmovable:
            return self.unmovable
        if self._limit is not None and total > self._limit:
            return rope.WINDOW_REASON
        repair = repair or self._repair
        return repair.no_ratio_reason if repair.ratio is None and not calibrating else ""
