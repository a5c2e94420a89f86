"""Repair inside the running batch: prompts with moved text beside others, each answered as alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvboost import GenerationResult, KVBoost
from kvboost.batching.pace import Pace
from kvboost.batching.scheduler import Scheduler
from kvboost.choices import Origin
from kvboost.requests.request import Request
from kvboost.reuse.strategies.cacheblend import CacheBlendRecompute
from tests.checked_requests import read_request
from tests.engine.reuse_checks import (
    approximate_tokens,
    chain_tokens,
    check_covered,
    check_exact_tree,
    check_spans,
    check_store,
    documents,
    joined,
    pay_always,
    shelf_engine,
)
from tests.engine.test_scheduler import Heard, check_slots, run
from tests.fixture_types import MakeEngine
from tests.tiny_models import ARCHITECTURES, long_model, random_ids

pytestmark = pytest.mark.usefixtures("approximate_reuse")

APPROXIMATE = "chunk_kv_reuse"


def reordered(shelf: list[list[int]], number: int, tail: int = 9) -> list[int]:
    """Documents of the shelf in an order of its own, behind a beginning and before a question of its own."""
    order = random.Random(number).sample(shelf, len(shelf))
    return [
        *random_ids(5, seed=7_000 + number),
        *joined(order),
        *random_ids(tail, seed=8_000 + number),
    ]


def alone(
    make_engine: MakeEngine, shelf: list[list[int]], prompt: list[int], **options: Any
) -> GenerationResult:
    """What an engine that knows the shelf and nothing else answers."""
    return shelf_engine(make_engine, shelf, **options).generate(prompt, max_new_tokens=8)


def results_of(heard: list[Heard]) -> list[GenerationResult]:
    return [one.result for one in heard if one.result is not None]


def scheduler_of(engine: KVBoost, max_sequences: int = 4, max_tokens: int = 4_000) -> Scheduler:
    return engine.core.scheduler(max_sequences=max_sequences, max_tokens=max_tokens)


def asked(engine: KVBoost, prompt: list[int], mode: str = APPROXIMATE, new_tokens: int = 8) -> Request:
    return read_request(engine, prompt, new_tokens, mode)


@pytest.mark.parametrize("selector", ["guided", "deviation"])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_a_repaired_prompt_is_answered_as_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, selector: str, ratio: float
) -> None:
    pay_always(monkeypatch)
    options = {"model": long_model(), "selector": selector, "recompute_ratio": ratio}
    shelf = documents(3, seed=41, low=90, high=160)
    prompt = reordered(shelf, 1)
    expected = alone(make_engine, shelf, prompt, **options)
    engine = shelf_engine(make_engine, shelf, **options)
    (result,) = results_of(run(scheduler_of(engine), [(0, asked(engine, prompt))]))
    assert approximate_tokens(expected) > 200
    assert result.token_ids == expected.token_ids
    assert result.spans == expected.spans
    assert result.recomputed_tokens == expected.recomputed_tokens
    check_spans(result)
    check_store(engine)
    check_exact_tree(engine)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pay_always(monkeypatch)
    shelf = documents(2, seed=42, low=40, high=60)
    prompt = reordered(shelf, 2)
    one, two = make_engine(name), make_engine(name)
    if reason := two.core.parts.why_alone(asked(two, prompt)):
        pytest.skip(f"{name} runs alone with this transformers: {reason}")
    for engine in (one, two):
        for document in shelf:
            engine.warm(document)
    expected = one.generate(prompt, max_new_tokens=8)
    (result,) = results_of(run(scheduler_of(two), [(0, asked(two, prompt))]))
    assert result.token_ids == expected.token_ids
    assert result.spans == expected.spans
    check_store(two)


@pytest.mark.parametrize("seed", range(6))
def test_repaired_and_exact_requests_share_the_batch(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """They come and go at any step, in little room, and how many tokens a step takes is drawn."""
    pay_always(monkeypatch)
    draw = random.Random(seed)
    blocks = [1, 2, 3, 7, 16, 64, 256]
    monkeypatch.setattr(Pace, "budget", lambda *_: draw.choice(blocks))
    options = {"model": long_model(), "selector": draw.choice(["guided", "deviation"])}
    shelf, others = (documents(3, seed=which + seed, low=60, high=110) for which in (50, 90))
    engine = shelf_engine(make_engine, shelf, max_chunks=None, **options)
    arrivals, wanted = [], []
    for number in range(14):
        mode = draw.choice([APPROXIMATE, APPROXIMATE, "prefix_cache"])
        tail = draw.randint(1, 40)
        if mode == APPROXIMATE:
            prompt = reordered(shelf, 100 * seed + number, tail)
            wanted.append(alone(make_engine, shelf, prompt, **options).token_ids)
        else:  # of other documents: what it stores would be found by those that are repaired
            prompt = reordered(others, draw.randint(0, 3), tail)
            wanted.append(engine.generate(prompt, 8, mode="baseline").token_ids)
        arrivals.append((draw.randint(0, 30), asked(engine, prompt, mode)))
    order = sorted(range(14), key=lambda number: arrivals[number][0])
    scheduler = scheduler_of(engine, draw.choice([2, 4, 6]), draw.choice([450, 700, 2_000]))
    results = results_of(run(scheduler, [arrivals[number] for number in order]))
    assert [result.token_ids for result in results] == [wanted[number] for number in order]
    for number, result in zip(order, results, strict=True):
        check_covered(result)
        if arrivals[number][1].mode.value == "prefix_cache":
            assert {span.origin for span in result.spans} <= {Origin.EXACT, Origin.LIVE}
        else:
            assert approximate_tokens(result) > 100
    assert not any(
        node.is_private for root in scheduler.radix_tree._roots.values() for node in root.subtree()
    )
    check_store(engine)
    check_exact_tree(engine)


def test_a_repaired_prompt_waits_for_the_exact_text_before_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system prompt is being computed for another request, and is shared with it."""
    pay_always(monkeypatch)
    monkeypatch.setattr(Pace, "budget", lambda *_: 8)
    model, shelf = long_model(), documents(2, seed=43, low=90, high=120)
    system = random_ids(80, seed=5)
    prompts = [
        [*system, *joined(order), *random_ids(7, seed=6 + i)] for i, order in enumerate((shelf, shelf[::-1]))
    ]
    engine = shelf_engine(make_engine, shelf, model=model)
    first, second = results_of(
        run(
            scheduler_of(engine),
            [
                (0, asked(engine, [*system, *random_ids(30, seed=9)], "prefix_cache")),
                (1, asked(engine, prompts[0])),
            ],
        )
    )
    assert first.cached_tokens == 0
    shared = [span for span in second.spans if span.origin is Origin.EXACT]
    assert sum(span.length for span in shared) == 80
    fresh = shelf_engine(make_engine, shelf, model=model)
    fresh.warm(system)
    assert second.token_ids == fresh.generate(prompts[0], max_new_tokens=8).token_ids
    check_exact_tree(engine)


def test_leaving_during_a_repair_stores_nothing_of_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    monkeypatch.setattr(Pace, "budget", lambda *_: 2)
    shelf = documents(3, seed=44, low=90, high=160)
    engine = shelf_engine(make_engine, shelf)
    before = engine.cache_stats()["chunks"]
    scheduler, heard = scheduler_of(engine), Heard()
    for steps in (0, 1, 3):
        heard = Heard()
        sequence = scheduler.join(asked(engine, [*shelf[2], *shelf[0], *random_ids(60, seed=steps)]), heard)
        for _ in range(steps):
            scheduler.step()
        scheduler.leave(sequence)
        check_slots(scheduler)
        assert heard.result is not None
        assert heard.result.finish_reason == "cancelled"
        assert engine.cache_stats()["chunks"] == before
    check_store(engine)
    check_exact_tree(engine)


def test_a_strategy_that_fails_fails_its_own_request(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    shelf = documents(3, seed=45, low=90, high=160)
    engine = shelf_engine(make_engine, shelf)

    def broken(*_: Any) -> np.ndarray:
        raise RuntimeError("no choice")

    monkeypatch.setattr(CacheBlendRecompute, "choose", broken)
    scheduler, failing, other = scheduler_of(engine), Heard(), Heard()
    scheduler.join(asked(engine, reordered(shelf, 3)), failing)
    scheduler.join(asked(engine, random_ids(30, seed=4), "prefix_cache"), other)
    while scheduler.sequences:
        scheduler.step()
        check_slots(scheduler)
    assert isinstance(failing.error, RuntimeError)
    assert other.result is not None
    check_store(engine)


def test_a_chain_needs_no_repair(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn of a chat over reordered documents, in the batch as alone."""
    pay_always(monkeypatch)
    model, shelf = long_model(), documents(3, seed=46, low=90, high=160)
    prompt = reordered(shelf, 4, tail=40)
    engines = [shelf_engine(make_engine, shelf, model=model) for _ in range(2)]
    expected = engines[0].generate(prompt, max_new_tokens=8)
    (result,) = results_of(run(scheduler_of(engines[1]), [(0, asked(engines[1], prompt))]))
    assert result.token_ids == expected.token_ids
    again = [*prompt, *expected.token_ids, *random_ids(12, seed=5)]
    expected = engines[0].generate(again, max_new_tokens=8)
    (result,) = results_of(run(scheduler_of(engines[1]), [(0, asked(engines[1], again))]))
    assert result.token_ids == expected.token_ids
    assert result.spans == expected.spans
    assert result.recomputed_tokens == 0
    assert approximate_tokens(result) > 200
    check_store(engines[1])


def test_a_chain_never_borrows_another_requests_text(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between joining and leaving, a donor goes and equal text of another request takes its key."""
    pay_always(monkeypatch)
    first, second = documents(2, seed=41, low=100, high=120)
    tail = random_ids(64, seed=77)
    engine = shelf_engine(make_engine, [first])
    engine.generate([*random_ids(5, seed=1), *first, *tail], 4)  # the tail is computed behind moved text
    scheduler, heard = scheduler_of(engine), Heard()
    prompt = [*random_ids(40, seed=2), *tail, *random_ids(40, seed=3)]
    scheduler.join(asked(engine, prompt), heard)
    while not heard.tokens:
        scheduler.step()
    engine.clear()
    engine.warm(second)
    engine.generate([*random_ids(70, seed=5), *second, *tail], 4)  # the same tail behind other text
    while scheduler.sequences:
        scheduler.step()
    assert heard.result is not None
    assert approximate_tokens(heard.result) > 48
    following = engine.generate([*prompt, *heard.result.token_ids, *random_ids(20, seed=6)], 4)
    assert chain_tokens(following) == 0
    check_store(engine)


def test_a_hot_prefix_is_shared_by_requests_that_may_repair(make_engine: MakeEngine) -> None:
    """Their prompts have no moved text, so that they need room for their own ends only."""
    system = random_ids(300, seed=3)
    engine = make_engine(model=long_model())
    engine.warm(system)
    scheduler = scheduler_of(engine, max_sequences=6, max_tokens=500)
    for number in range(6):
        request = asked(engine, [*system, *random_ids(9, seed=number)])
        assert scheduler.has_room(request)
        scheduler.join(request, Heard())
        check_slots(scheduler)
