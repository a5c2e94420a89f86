"""The policy of approximate reuse, seen from other threads while it changes."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.reuse import strategies
from kvboost.reuse.strategies.cacheblend import CacheBlendRecompute
from tests.fixture_types import MakeEngine


class MovedText:
    """A plan, as far as a strategy is chosen for it."""

    has_moved = True


def ratio_of(approximation: Any) -> float:
    strategy = approximation.repair().strategy(MovedText())
    assert isinstance(strategy, CacheBlendRecompute)
    return strategy.recompute_ratio


def test_a_ratio_and_its_strategies_come_together(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes while a calibration is taken over never reuses moved text without repair."""
    approximation = make_engine(recompute_ratio="auto", max_kl=0.1).core.parts.approximation
    seen = []
    build = strategies.for_prefix_chunks

    def looked_at(*args: Any) -> Any:
        seen.append((approximation.refusal(100), ratio_of(approximation)))
        return build(*args)

    monkeypatch.setattr(strategies, "for_prefix_chunks", looked_at)
    approximation.use_ratio(0.4, "")
    assert [refusal != "" for refusal, _ in seen] == [True]
    assert (approximation.refusal(100), ratio_of(approximation)) == ("", 0.4)


def test_who_began_with_a_ratio_keeps_it(make_engine: MakeEngine) -> None:
    approximation = make_engine(recompute_ratio=0.3).core.parts.approximation
    approximation.use_ratio(None, "no ratio held")
    assert approximation.refusal(100) == "no ratio held"
    assert ratio_of(approximation) == 0.3
