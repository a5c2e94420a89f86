"""Which tokens CacheBlend takes: budget, order, run starts, thresholds, and what the scores are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvboost import CacheBlendRecompute
from kvboost.errors import InvalidRequestError
from kvboost.kv.arena import Arena
from kvboost.kv.layout import probe_layout
from kvboost.models import ReusedRun
from kvboost.reuse.strategies import cacheblend
from kvboost.reuse.strategies.cacheblend import RUN_START_TOKENS, attention_from_the_end, value_deviation

EXACT = ReusedRun(0, 20, 0, True)
FIRST = ReusedRun(20, 60, 3, False)
SECOND = ReusedRun(70, 130, -5, False)
RUNS = [EXACT, FIRST, SECOND]
IDS = np.zeros(140, dtype=np.int64)
REUSED = 100
Choose = Callable[..., list[int]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """`choose` with made-up scores by position; -1 means that it must not ask for them."""

    def make(
        strategy: CacheBlendRecompute,
        scores: np.ndarray | None = None,
        deviation: np.ndarray | None = None,
        runs: list[ReusedRun] = RUNS,
    ) -> list[int]:
        def given(kind: str, values: Any) -> Callable[..., Any]:
            def score(_model: Any, ids: np.ndarray, _arena: Any, asked: Any) -> Any:
                assert ids is IDS
                assert asked is runs
                assert values is not None or kind == "attention", "nobody should have asked"
                return values

            return score

        attention = None if scores is None else torch.from_numpy(scores).expand(2, -1)
        monkeypatch.setattr(cacheblend, "attention_from_the_end", given("attention", attention))
        monkeypatch.setattr(cacheblend, "value_deviation", given("deviation", deviation))
        nothing: Any = None
        positions = strategy.choose(nothing, IDS, nothing, runs)
        assert (np.diff(positions) > 0).all()
        return positions.tolist()

    return make


@pytest.mark.parametrize("selector", ["guided", "deviation"])
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.105, 0.5, 0.99])
def test_the_budget_is_a_share_of_what_is_not_exact(ratio: float, selector: str, choose: Choose) -> None:
    scores = np.random.default_rng(0).uniform(0.1, 1, 140)
    found = choose(CacheBlendRecompute(ratio, selector=selector), scores, scores)
    assert len(found) == math.ceil(ratio * REUSED)
    reused = {*range(20, 60), *range(70, 130)}
    assert set(found) <= reused  # exact and live tokens are never chosen


@pytest.mark.parametrize("selector", ["guided", "deviation"])
def test_all_and_nothing_need_no_scores(selector: str, choose: Choose) -> None:
    assert choose(CacheBlendRecompute(0.0, selector=selector)) == []
    assert choose(CacheBlendRecompute(1.0, selector=selector)) == [*range(20, 60), *range(70, 130)]
    assert choose(CacheBlendRecompute(0.5, selector=selector), runs=[EXACT]) == []
    assert choose(CacheBlendRecompute(0.5, selector=selector), runs=[]) == []


STARTS = [*range(20, 20 + RUN_START_TOKENS), *range(70, 70 + RUN_START_TOKENS)]


def test_run_starts_come_first_and_then_the_highest(choose: Choose) -> None:
    scores = np.full(140, 1e-6)
    scores[[5, 59, 65, 129, 135]] = [9, 5, 9, 7, 9]  # 5 is exact, 65 and 135 are live
    assert choose(CacheBlendRecompute(0.10), scores) == sorted([*STARTS, 59, 129])
    assert choose(CacheBlendRecompute(0.08), scores) == STARTS
    assert choose(CacheBlendRecompute(0.05), scores) == STARTS[:5]


def test_a_token_deeper_in_its_run_needs_a_higher_score(choose: Choose) -> None:
    scores = np.full(140, 1e-6)
    scores[[80, 125]] = 1.0
    assert choose(CacheBlendRecompute(0.09), scores) == [*STARTS, 80]
    scores[125] = 5.0
    assert choose(CacheBlendRecompute(0.09), scores) == [*STARTS, 125]


def test_what_stands_right_behind_a_high_score_is_taken_too(choose: Choose) -> None:
    """A value behind the words that are asked for; not across the end of a run."""
    scores = np.full(140, 1e-6)
    scores[[90, 59]] = [5.0, 1.0]
    nearest = [*range(24, 31), *range(74, 81)]  # what is left, when a quarter of 20 is looked for
    assert choose(CacheBlendRecompute(0.279), scores) == sorted([*STARTS, *range(90, 95), 59, *nearest])
    scores[91] = 6.0  # two of them do not add up
    found = choose(CacheBlendRecompute(0.4), scores)
    assert set(range(90, 96)) <= set(found)
    assert 96 not in found


def test_some_is_looked_for_wherever_it_stands(choose: Choose) -> None:
    """Deep in a run the rest would not find it."""
    scores = np.full(140, 0.2)
    scores[[59, 129]] = 0.3
    found = choose(CacheBlendRecompute(0.16), scores)
    assert {59, 129} <= set(found)
    assert {24, 25, 74, 75} <= set(found)


def test_runs_shorter_than_their_start(choose: Choose) -> None:
    runs = [ReusedRun(10, 12, 1, False), ReusedRun(30, 80, 1, False)]
    scores = np.zeros(140)
    assert choose(CacheBlendRecompute(6 / 52), scores, runs=runs) == [10, 11, 30, 31, 32, 33]


def test_deviation_takes_the_highest_above_its_threshold(choose: Choose) -> None:
    deviation = np.full(140, 0.001)
    deviation[[5, 30, 65, 100, 120]] = [1, 0.5, 1, 0.02, 0.011]
    published = CacheBlendRecompute(0.5, selector="deviation")
    assert choose(published, deviation=deviation) == [30, 100, 120]
    assert choose(CacheBlendRecompute(0.02, selector="deviation"), deviation=deviation) == [30, 100]
    strict = CacheBlendRecompute(0.5, min_deviation=0.1, selector="deviation")
    assert choose(strict, deviation=deviation) == [30]
    none = CacheBlendRecompute(0.5, min_deviation=0.0, selector="deviation")
    assert len(choose(none, deviation=deviation)) == 50
    assert choose(published, deviation=np.zeros(140)) == []


def test_where_attention_cannot_be_watched_the_starts_of_runs_are_chosen(choose: Choose) -> None:
    starts = choose(CacheBlendRecompute(0.1), None)
    assert starts == [20, 21, 22, 23, 24, 70, 71, 72, 73, 74]


def test_the_contracts_defaults() -> None:
    plain = CacheBlendRecompute()
    assert (plain.recompute_ratio, plain.min_deviation, plain.device, plain.selector) == (
        0.15,
        0.01,
        "cpu",
        "guided",
    )


@pytest.mark.parametrize(
    "options",
    [
        {"recompute_ratio": -0.1},
        {"recompute_ratio": 1.1},
        {"recompute_ratio": float("nan")},
        {"selector": "oracle"},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidRequestError, match=name):
        CacheBlendRecompute(**options)


# --- the scores themselves ----------------------------------------------------------------------

TOKENS = 60


@pytest.fixture
def llama(make_llama: Callable[..., Any]) -> Any:
    return make_llama(num_hidden_layers=3)


def prefilled(model: Any, ids: np.ndarray) -> Arena:
    arena = Arena(probe_layout(model), len(ids))
    with torch.no_grad():
        model(torch.from_numpy(ids)[None], past_key_values=arena, use_cache=True)
    return arena


def random_tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 290, TOKENS)


def attention_of(model: Any, ids: np.ndarray) -> torch.Tensor:
    """Attention probabilities `[layers, heads, queries, keys]` of a plain forward."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(torch.from_numpy(ids)[None], output_attentions=True, past_key_values=DynamicCache())
    model.set_attn_implementation("sdpa")
    return torch.stack([layer[0] for layer in found.attentions])


@pytest.mark.parametrize("tail", [1, 10, 24, TOKENS, 500])
def test_attention_from_the_end_is_the_models_own(llama: Any, tail: int) -> None:
    ids = random_tokens(1)
    arena = prefilled(llama, ids)
    before = [slab.clone() for slab in arena.slabs]
    scores = attention_from_the_end(llama, ids, arena, [ReusedRun(0, TOKENS, 0, False)], tail)
    highest = attention_of(llama, ids)[:, :, -min(tail, TOKENS) :].amax(2)
    wanted = torch.stack([highest, highest.square()]).sum(dim=(1, 2))
    assert scores is not None
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(slab, kept) for slab, kept in zip(arena.slabs, before, strict=True))


def test_what_is_not_filled_is_not_looked_at(llama: Any) -> None:
    ids = random_tokens(2)
    arena = prefilled(llama, ids)
    for slab in arena.slabs:
        slab[:, :, 20:30] = 1e3  # whatever lies there from an earlier request
        slab[:, :, 50:] = 1e3
    before = [slab.clone() for slab in arena.slabs]
    runs = [ReusedRun(0, 20, 0, True), ReusedRun(30, 50, 4, False)]
    scores = attention_from_the_end(llama, ids, arena, runs, 10)
    assert scores is not None
    assert bool(scores.isfinite().all())
    assert (scores[:, 20:30] == 0).all()
    assert (scores[:, :20] > 0).all()
    assert (scores[:, 30:] > 0).all()
    assert all(torch.equal(slab, kept) for slab, kept in zip(arena.slabs, before, strict=True))


def test_deviation_is_measured_at_the_second_layer(llama: Any) -> None:
    ids = random_tokens(3)
    other = np.where(ids < 147, ids + 140, ids - 140)  # nowhere the same
    arena, foreign = prefilled(llama, ids), prefilled(llama, other)
    wanted = [slab.clone() for slab in arena.slabs]
    changed = list(range(25, 31))
    for slab, wrong in zip(arena.slabs, foreign.slabs, strict=True):
        slab[:, :, changed] = wrong[:, :, changed]
    held = [slab.clone() for slab in arena.slabs]
    runs = [ReusedRun(0, 10, 0, True), ReusedRun(10, 50, 2, False)]
    deviation = value_deviation(llama, ids, arena, runs)
    assert len(deviation) == 50
    assert (deviation[changed] > 0.05).all()
    others = [p for p in range(50) if p not in changed]
    assert np.abs(deviation[others]).max() < 1e-5
    for layer, (keys, values) in enumerate(arena.layout.layers):
        for where in (keys, values):
            now = arena.slabs[where.slab][:, where.start : where.end]
            expected = (wanted if layer < 2 else held)[where.slab][:, where.start : where.end]
            torch.testing.assert_close(now, expected, rtol=1e-4, atol=1e-5)  # two layers, and no more


def test_deviation_in_blocks_is_the_same(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_tokens(5)
    runs = [ReusedRun(3, 20, 2, False), ReusedRun(28, 55, 2, False)]
    found = []
    for size in (4096, 7):
        monkeypatch.setattr(cacheblend, "_MAX_DEVIATION_TOKENS", size)
        found.append(value_deviation(llama, ids, prefilled(llama, random_tokens(6)), runs))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
