"""Mode, ratio and selector of a single call, in place of the engine's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.choices import Origin
from kvboost.errors import InvalidRequestError
from tests.engine.reuse_checks import (
    approximate_tokens,
    chain_tokens,
    check_spans,
    check_store,
    documents,
    joined,
    pay_always,
    shelf_engine,
)
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids

pytestmark = pytest.mark.usefixtures("approximate_reuse")

SHELF = documents(3, seed=61, low=90, high=160)
PROMPT = [*random_ids(5, seed=1), *joined(SHELF[::-1]), *random_ids(9, seed=2)]


@pytest.fixture
def engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> KVBoost:
    pay_always(monkeypatch)
    return shelf_engine(make_engine, SHELF, model=long_model())


def test_the_ratio_of_a_call(engine: KVBoost) -> None:
    shares = {}
    for ratio in (0, 0.4, 1):
        result = engine.generate(PROMPT, max_new_tokens=4, recompute_ratio=ratio)
        check_spans(result)
        assert approximate_tokens(result) > 200
        shares[ratio] = result.recomputed_tokens / approximate_tokens(result)
    assert shares[0] == 0
    assert 0.35 < shares[0.4] < 0.45
    assert shares[1] == 1
    expected = engine.generate(PROMPT, max_new_tokens=4, mode="baseline").token_ids
    assert result.token_ids == expected  # all of it was computed again
    assert engine.settings.recompute_ratio == 0.15
    check_store(engine)


def test_a_chain_serves_only_those_who_asked_for_its_repair(engine: KVBoost) -> None:
    """What was repaired less than a call asks for is not good enough for it."""
    engine.generate(PROMPT, max_new_tokens=4, recompute_ratio=0.0)
    again = engine.generate([*PROMPT, 7, 8], max_new_tokens=4, recompute_ratio=0.0)
    assert chain_tokens(again) > 200
    for options in ({}, {"recompute_ratio": 0.5}, {"recompute_ratio": 0.0, "selector": "deviation"}):
        other = engine.generate([*PROMPT, 7, 8], max_new_tokens=4, **options)
        assert chain_tokens(other) == 0, options
        assert engine.explain([*PROMPT, 7, 8], **options).cached_tokens > 200
    check_store(engine)


def test_the_selector_of_a_call(make_engine: MakeEngine, engine: KVBoost) -> None:
    chosen = {}
    for selector in ("guided", "deviation"):
        whole = shelf_engine(make_engine, SHELF, model=engine.model, selector=selector, recompute_ratio=0.3)
        expected = whole.generate(PROMPT, max_new_tokens=4)
        result = engine.generate(PROMPT, max_new_tokens=4, selector=selector, recompute_ratio=0.3)
        assert result.token_ids == expected.token_ids
        chosen[selector] = [span for span in result.spans if span.origin is Origin.RECOMPUTED]
        assert chosen[selector] == [span for span in expected.spans if span.origin is Origin.RECOMPUTED]
    assert chosen["guided"] != chosen["deviation"]


CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda engine, prompt, **options: engine.generate(prompt, max_new_tokens=2, **options),
    "stream": lambda engine, prompt, **options: engine.stream(prompt, max_new_tokens=2, **options),
    "generate_batch": lambda engine, prompt, **options: engine.generate_batch([prompt], 2, **options),
    "generate_many": lambda engine, prompt, **options: engine.generate_many([prompt], 2, **options),
    "stream_many": lambda engine, prompt, **options: engine.stream_many([prompt], 2, **options),
    "explain": lambda engine, prompt, **options: engine.explain(prompt, **options),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute_ratio": 1.5}, "recompute_ratio must be a number from 0 to 1"),
        ({"recompute_ratio": 10**400}, "recompute_ratio must be a number from 0 to 1"),
        ({"recompute_ratio": float("nan")}, "recompute_ratio must be a number from 0 to 1"),
        ({"recompute_ratio": "auto"}, "recompute_ratio must be a number from 0 to 1"),
        ({"recompute_ratio": True}, "recompute_ratio must be a number from 0 to 1"),
        ({"selector": "best"}, 'selector must be "guided" or "deviation"'),
        ({"selector": 3}, "selector must be text"),
        ({"recompute_ratio": 0.1, "mode": "prefix_cache"}, "mode 'prefix_cache' reuses none"),
        ({"selector": "guided", "mode": "baseline"}, "mode 'baseline' reuses none"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused(
    engine: KVBoost, call: str, options: dict[str, Any], message: str
) -> None:
    before = engine.cache_stats()["requests"]
    with pytest.raises(InvalidRequestError, match=message):
        CALLS[call](engine, PROMPT, **{"mode": "chunk_kv_reuse", **options})
    assert engine.cache_stats()["requests"] == before


@pytest.mark.parametrize("call", ["generate_batch", "generate_many"])
def test_many_prompts_of_one_call(engine: KVBoost, call: str) -> None:
    (result,) = CALLS[call](engine, PROMPT, mode="chunk_kv_reuse", recompute_ratio=0.4)
    assert 0.35 < result.recomputed_tokens / approximate_tokens(result) < 0.45


def test_an_arena_that_was_repaired_otherwise_is_no_chain(engine: KVBoost) -> None:
    """The last request's arena holds the same text, repaired less: the chain comes from the store."""
    first = engine.generate(PROMPT, max_new_tokens=4, recompute_ratio=1.0)
    engine.generate(PROMPT, max_new_tokens=4, recompute_ratio=0.0)
    following = [*PROMPT, *first.token_ids, *random_ids(9, seed=3)]
    again = engine.generate(following, max_new_tokens=8, recompute_ratio=1.0)
    assert chain_tokens(again) > 200
    assert again.token_ids == engine.generate(following, max_new_tokens=8, mode="baseline").token_ids


def test_equal_ratios_share_their_chains(engine: KVBoost) -> None:
    engine.generate(PROMPT, max_new_tokens=4, recompute_ratio=1)
    assert chain_tokens(engine.generate([*PROMPT, 7], max_new_tokens=2, recompute_ratio=1.0)) > 200
    engine.generate(PROMPT, max_new_tokens=4)
    own = engine.settings.recompute_ratio
    assert isinstance(own, float)
    found = engine.generate([*PROMPT, 8], max_new_tokens=2, recompute_ratio=own, selector="guided")
    assert chain_tokens(found) > 200


def test_chains_of_another_calibration_are_left_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    engine = shelf_engine(make_engine, SHELF, model=long_model(), recompute_ratio="auto", max_kl=0.1)
    engine.core.parts.approximation.use_ratio(0.0, "")
    engine.generate(PROMPT, max_new_tokens=4)
    assert chain_tokens(engine.generate([*PROMPT, 7], max_new_tokens=2)) > 200
    engine.core.parts.approximation.use_ratio(1.0, "")
    assert chain_tokens(engine.generate([*PROMPT, 8], max_new_tokens=2)) == 0
