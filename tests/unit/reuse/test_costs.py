"""The cost guard's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvboost.kv.layout import probe_layout
from kvboost.models import ReusedRun
from kvboost.reuse.costs import CostEstimate, ForwardCosts
from kvboost.reuse.device_rates import DeviceRates, measured_rates
from kvboost.reuse.strategies.cacheblend import CacheBlendRecompute


@pytest.fixture
def costs(make_llama: Callable[..., Any]) -> ForwardCosts:
    return ForwardCosts(make_llama(max_position_embeddings=8192))


def moved(start: int, end: int) -> ReusedRun:
    return ReusedRun(start, end, 7, False)


def exact(end: int) -> ReusedRun:
    return ReusedRun(0, end, 0, True)


def estimate(
    costs: ForwardCosts, runs: list[ReusedRun], total: int, ratio: float, selector: str | None
) -> CostEstimate:
    """As CacheBlend estimates it, or as if the tokens were given."""
    if selector is None:
        return costs.estimate(runs, total, ratio)
    return CacheBlendRecompute(ratio, selector=selector).cost(runs, total, costs)


def test_a_forward_costs_by_tokens_and_by_what_they_see(costs: ForwardCosts) -> None:
    assert costs.forward(np.arange(0)) == 0
    one, two = costs.forward(np.arange(100)), costs.forward(np.arange(200))
    assert one > 100  # a forward has a cost of its own
    assert two - one > 100  # and later tokens see more
    assert costs.forward(np.arange(1000, 1100)) > one


@pytest.mark.parametrize("selector", ["guided", "deviation", None])
def test_nothing_reused_never_pays(costs: ForwardCosts, selector: str | None) -> None:
    for runs in ([], [exact(500)]):
        found = estimate(costs, runs, 1000, 0.1, selector)
        assert not found.pays
        assert found.reuse >= found.prefill


def test_long_runs_pay_and_crumbs_do_not(costs: ForwardCosts) -> None:
    assert estimate(costs, [moved(10, 1900)], 2000, 0.15, "guided").pays
    crumbs = [moved(start, start + 32) for start in range(0, 2000, 250)]
    assert not estimate(costs, crumbs, 2000, 0.15, "guided").pays
    assert not estimate(costs, [moved(10, 1900)], 2000, 1.0, "guided").pays


def test_more_recomputing_costs_more(costs: ForwardCosts) -> None:
    runs = [exact(100), moved(100, 1900)]
    estimates = [estimate(costs, runs, 2000, ratio, "guided") for ratio in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)]
    reuse = [estimate.reuse for estimate in estimates]
    assert reuse == sorted(set(reuse))
    assert len({estimate.prefill for estimate in estimates}) == 1


def test_prefill_is_what_stands_behind_the_exact_part(costs: ForwardCosts) -> None:
    whole = estimate(costs, [moved(500, 900)], 1000, 0.1, "guided").prefill
    behind = estimate(costs, [exact(500), moved(500, 900)], 1000, 0.1, "guided").prefill
    assert whole == costs.forward(np.arange(1000))
    assert behind == costs.forward(np.arange(500, 1000)) < whole


def test_the_way_of_choosing_has_its_price(costs: ForwardCosts) -> None:
    runs = [moved(0, 1900)]
    given, guided, deviation = (
        estimate(costs, runs, 2000, 0.1, selector).reuse for selector in (None, "guided", "deviation")
    )
    assert given < guided < deviation
    free = [estimate(costs, runs, 2000, 0.0, selector).reuse for selector in (None, "guided", "deviation")]
    assert len(set(free)) == 1  # nothing is chosen where nothing is recomputed


def test_an_estimate_in_words() -> None:
    assert str(CostEstimate(prefill=200.0, reuse=50.0)) == (
        "reuse: approximate reuse would cost 0.25 x of computing it (50 against 200 token forwards)"
    )
    assert str(CostEstimate(prefill=100.0, reuse=100.0)).startswith("prefill: ")
    assert not CostEstimate(100.0, 100.0).pays


# As measured for an 8B model on a large GPU.
RATES = DeviceRates(
    launch_s=0.04, captured_s=0.01, token_s=31e-6, pair_s=1.2e-9, scattered_pair_s=1.9e-9, moved_s=2e-6
)


@pytest.fixture
def on_gpu(make_llama: Callable[..., Any]) -> ForwardCosts:
    return ForwardCosts(make_llama(max_position_embeddings=8192), rates=RATES)


def test_on_a_gpu_a_forward_costs_what_was_measured(on_gpu: ForwardCosts) -> None:
    assert on_gpu.forward(np.arange(0)) == 0
    assert on_gpu.forward(np.arange(1)) == on_gpu.forward(np.arange(200)) == pytest.approx(0.01 / 31e-6)
    assert on_gpu.forward(np.arange(8_000)) == pytest.approx(8_000 + 1.2e-9 * 8_000 * 7_999 / 2 / 31e-6)


@pytest.mark.parametrize("tokens", [4_000, 8_000, 32_000])
def test_on_a_gpu_what_is_mostly_known_pays_and_what_is_not_does_not(
    on_gpu: ForwardCosts, tokens: int
) -> None:
    for share in (0.6, 0.8, 1.0):
        known = [moved(16, 16 + int(share * tokens))]
        assert estimate(on_gpu, known, tokens + 56, 0.15, "guided").pays, share
    assert not estimate(on_gpu, [moved(16, 16 + tokens // 10)], tokens, 0.15, "guided").pays


def test_on_a_gpu_short_prompts_do_not_pay(on_gpu: ForwardCosts) -> None:
    assert not estimate(on_gpu, [moved(0, 700)], 720, 0.15, "guided").pays


def test_without_a_gpu_nothing_is_measured(make_llama: Callable[..., Any]) -> None:
    model = make_llama()
    assert measured_rates(model, probe_layout(model), from_host=True) is None
