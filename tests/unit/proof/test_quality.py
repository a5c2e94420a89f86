"""Which repair methods trials know."""

from __future__ import annotations

import pytest

from kvboost.proof.quality import METHODS, strategy_of, takes_ratio


def test_methods_that_take_a_ratio_are_found_by_their_strategies() -> None:
    with_ratio = {method for method in METHODS if takes_ratio(method)}
    assert {"deviation", "guided", "random"} <= with_ratio
    assert not {"nothing", "selective", "selective_before", "all"} & with_ratio


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"method must be one of nothing, .*; got 'best'"):
        strategy_of("best", 0.1)
