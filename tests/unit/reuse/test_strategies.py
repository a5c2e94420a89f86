"""What holds for every strategy in the registry, and which of them the options get."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvboost.choices import SELECTORS, RecomputeStrategy
from kvboost.kv.arena import Arena
from kvboost.kv.layout import probe_layout
from kvboost.models import ReusedRun
from kvboost.reuse.costs import ForwardCosts
from kvboost.reuse.repair import RepairStrategy, positions_of
from kvboost.reuse.strategies import STRATEGIES, for_moved_text, for_prefix_chunks
from kvboost.reuse.strategies.cacheblend import CacheBlendRecompute
from kvboost.reuse.strategies.selective import SelectiveRecompute
from kvboost.run import decode
from kvboost.settings import EngineSettings

RUNS = [ReusedRun(0, 20, 0, True), ReusedRun(20, 60, 3, False), ReusedRun(70, 110, -5, False)]
TOTAL = 120


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> RepairStrategy:
    return STRATEGIES[request.param](EngineSettings(), 0.2)


def placed(model: Any) -> tuple[np.ndarray, Arena]:
    """A prompt, and an arena that holds KV of its runs, none of which is what the model would compute."""
    torch.manual_seed(0)
    arena = Arena(probe_layout(model), TOTAL)
    arena.set_length(TOTAL)
    for slab in arena.slabs:
        slab.zero_()
        for run in RUNS:
            slab[:, :, run.start : run.end] = torch.randn_like(slab[:, :, run.start : run.end])
    return np.random.default_rng(0).integers(0, 90, TOTAL), arena


def test_choice_is_sorted_and_among_what_is_not_exact(
    strategy: RepairStrategy, make_llama: Callable[..., Any]
) -> None:
    model = make_llama()
    ids, arena = placed(model)
    with decode.running(model, fast=True):
        chosen = strategy.choose(model, ids, arena, RUNS)
    assert chosen.dtype.kind == "i"
    assert (np.diff(chosen) > 0).all()
    assert set(chosen) <= set(positions_of(RUNS, exact=False))


def test_choosing_changes_no_kv_that_it_does_not_own_up_to(
    strategy: RepairStrategy, make_llama: Callable[..., Any]
) -> None:
    model = make_llama()
    ids, arena = placed(model)
    before = [slab.clone() for slab in arena.slabs]
    with decode.running(model, fast=True):
        strategy.choose(model, ids, arena, RUNS)
    approximate = torch.from_numpy(positions_of(RUNS, exact=False))
    changed = False
    for slab, old in zip(arena.slabs, before, strict=True):
        assert torch.equal(slab[:, :, :20], old[:, :, :20]), "exact runs are never touched"
        changed |= not torch.equal(slab[:, :, approximate], old[:, :, approximate])
    assert changed == strategy.rewrites_all


def test_estimates_count_what_is_not_found(strategy: RepairStrategy, make_llama: Callable[..., Any]) -> None:
    costs = ForwardCosts(make_llama())
    nothing_found, found = strategy.cost([], TOTAL, costs), strategy.cost(RUNS, TOTAL, costs)
    assert found.prefill == costs.forward(np.arange(20, TOTAL))
    assert found.reuse >= costs.forward(np.r_[60:70, 110:120])
    assert not nothing_found.pays


def test_a_description_names_the_tokens(strategy: RepairStrategy) -> None:
    assert strategy.describe(1234).startswith("of 1,234 approximate tokens ")


def test_strategies_are_values(strategy: RepairStrategy) -> None:
    """The engine shares one between threads."""
    assert dataclasses.is_dataclass(strategy)
    assert strategy == dataclasses.replace(strategy)
    hash(strategy)


def test_moved_text_is_repaired_as_the_selector_says() -> None:
    for selector in ("guided", "deviation"):
        settings = EngineSettings(selector=selector, recompute_strategy="none")
        assert for_moved_text(settings, 0.3) == CacheBlendRecompute(0.3, 0.0, selector=selector)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("selective", SelectiveRecompute(7)),
        ("cacheblend", CacheBlendRecompute(0.3, 0.0, selector="deviation")),
        ("none", CacheBlendRecompute(0.0, 0.0)),
    ],
)
def test_prefix_chunks_are_repaired_as_the_strategy_says(word: str, expected: RepairStrategy) -> None:
    for given in (word, RecomputeStrategy(word)):
        settings = EngineSettings(recompute_strategy=given, recompute_overlap=7, selector="deviation")
        assert for_prefix_chunks(settings, 0.3) == expected


def test_every_word_of_the_options_has_a_strategy() -> None:
    for word in RecomputeStrategy:
        assert for_prefix_chunks(EngineSettings(recompute_strategy=word), 0.1)
    assert set(SELECTORS) <= set(STRATEGIES)


def test_a_strategy_of_ones_own_needs_two_methods() -> None:
    incomplete: Any = type("Incomplete", (RepairStrategy,), {"choose": lambda *_: None})
    with pytest.raises(TypeError, match="cost"):
        incomplete()


def test_names_are_listed_without_torch() -> None:
    code = (
        "import sys; from kvboost.reuse.strategies import STRATEGIES; "
        "assert 'guided' in STRATEGIES and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
