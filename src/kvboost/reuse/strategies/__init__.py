"""Repair strategies, one per file: which of the reused tokens are computed again.

This is where names become strategies: options, trials and benchmarks look them up here. Imports a strategy
only when it is built, so that the command line can list the names without loading torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from kvboost.choices import RecomputeStrategy

if TYPE_CHECKING:
    from kvboost.reuse.repair import RepairStrategy
    from kvboost.settings import EngineSettings

Builder: TypeAlias = "Callable[[EngineSettings, float], RepairStrategy]"  # the float is the recompute ratio


def _selective(side: str) -> Builder:
    def build(settings: EngineSettings, _ratio: float) -> RepairStrategy:
        from kvboost.reuse.strategies.selective import SelectiveRecompute

        return SelectiveRecompute(settings.recompute_overlap, side=side)

    return build


def _cacheblend(selector: str, fixed_ratio: float | None = None) -> Builder:
    def build(_settings: EngineSettings, ratio: float) -> RepairStrategy:
        from kvboost.reuse.strategies.cacheblend import CacheBlendRecompute

        # The caller has asked for this ratio, so min_deviation must not lower it.
        return CacheBlendRecompute(ratio if fixed_ratio is None else fixed_ratio, 0.0, selector=selector)

    return build


def _random(_settings: EngineSettings, ratio: float) -> RepairStrategy:
    from kvboost.reuse.strategies.random_share import RandomRecompute

    return RandomRecompute(ratio)


STRATEGIES: Mapping[str, Builder] = {
    "nothing": _cacheblend("guided", 0.0),
    "selective": _selective("after"),
    "selective_before": _selective("before"),
    "deviation": _cacheblend("deviation"),
    "guided": _cacheblend("guided"),
    "random": _random,
    "all": _cacheblend("guided", 1.0),
}


def for_moved_text(settings: EngineSettings, ratio: float) -> RepairStrategy:
    """How text found by content is repaired: as the option `selector` says."""
    return STRATEGIES[settings.selector](settings, ratio)


def for_prefix_chunks(settings: EngineSettings, ratio: float) -> RepairStrategy:
    """How prefix chunks of overlap mode are repaired: as the option `recompute_strategy` says."""
    chosen = RecomputeStrategy(settings.recompute_strategy)
    if chosen is RecomputeStrategy.CACHEBLEND:
        return for_moved_text(settings, ratio)
    name = "nothing" if chosen is RecomputeStrategy.NONE else chosen.value
    return STRATEGIES[name](settings, ratio)
