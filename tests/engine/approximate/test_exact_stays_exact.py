"""Nothing approximate is ever taken for exact."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.choices import Origin
from tests.engine.reuse_checks import (
    APPROXIMATE,
    approximate_tokens,
    check_exact_tree,
    check_spans,
    check_store,
    documents,
    fresh_kv,
    joined,
    pay_always,
    shelf_engine,
)
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("approximate_reuse")


@pytest.mark.parametrize("architecture", ["llama", "phi", "gemma3"])
def test_exact_requests_stay_exact_among_approximate_ones(
    architecture: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    changes = {"sliding_window": 1024} if architecture == "gemma3" else {}
    engine = make_engine(model=tiny_model(architecture, **changes), max_cache_bytes=1)
    per_token = engine.layout.bytes_per_token
    engine.close()
    engine = make_engine(model=engine.model, max_cache_bytes=900 * per_token)
    draw = random.Random(architecture)
    shelf = documents(9, seed=8, low=40, high=110)
    served = {"baseline": 0, "prefix_cache": 0, "chunk_kv_reuse": 0}
    approximate = exact = 0
    for number in range(70):
        parts = draw.sample(shelf, draw.randint(1, 4))
        if draw.random() < 0.5:
            parts.insert(0, shelf[0][:20])
        if draw.random() < 0.3:
            parts[-1] = parts[-1][draw.randrange(30) :]
        prompt = [*joined(parts), *random_ids(draw.randint(1, 12), seed=number)]
        mode = draw.choice(["baseline", "prefix_cache", "chunk_kv_reuse", "chunk_kv_reuse"])
        if draw.random() < 0.2:
            engine.warm(draw.choice(shelf))
        result = engine.generate(prompt, max_new_tokens=4, mode=mode)
        check_spans(result)
        served[mode] += 1
        if approximate_tokens(result):
            approximate += 1
            assert mode == "chunk_kv_reuse"
        else:
            exact += result.cached_tokens > 0
            expected = engine.generate(prompt, max_new_tokens=4, mode="baseline")
            assert result.token_ids == expected.token_ids, (number, mode)
        follow_up = [*prompt, *result.token_ids, *random_ids(3, seed=number)]
        if draw.random() < 0.3:
            wanted = engine.generate(follow_up, max_new_tokens=4, mode="baseline")
            got = engine.generate(follow_up, max_new_tokens=4, mode="prefix_cache")
            assert got.token_ids == wanted.token_ids, (number, mode)
        if number % 10 == 0:
            check_store(engine)
            check_exact_tree(engine)
    assert min(served.values()) >= 10
    assert approximate >= 15
    assert exact >= 3
    assert engine.cache_stats()["evicted_chunks"] > 0
    check_store(engine)
    assert check_exact_tree(engine) > 0


def test_nothing_computed_on_approximate_kv_is_in_the_exact_tree(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    shelf = documents(4, seed=9, low=80, high=120)
    for document in shelf:
        engine.warm(document)
    stored_exactly = check_exact_tree(engine)
    prompt = [*shelf[2], *shelf[0], *random_ids(60, seed=1), *shelf[3], *random_ids(40, seed=2)]
    result = engine.generate(prompt, max_new_tokens=20)
    assert approximate_tokens(result) > 0
    assert check_exact_tree(engine) == stored_exactly
    tainted = engine.cache_manager._store.forest.nodes(engine.namespace().tainted().key)
    assert tainted  # the live text behind approximate text is kept, but not as exact
    starts_live = [*random_ids(50, seed=3), *shelf[1], *random_ids(5, seed=4)]
    result = engine.generate(starts_live, max_new_tokens=2)
    assert result.spans[0].origin is Origin.LIVE
    assert check_exact_tree(engine) > stored_exactly  # what stands before all that is approximate is exact
    assert engine.explain([*starts_live[:50], 7]).cached_tokens == 50
    check_store(engine)


def test_an_approximate_arena_never_stands_for_exact_text(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The last request left approximate KV in place; the exact KV of the same text comes from a file."""
    model = long_model()
    shelf = documents(2, seed=26, low=120, high=160)
    prompt = [*random_ids(5, seed=1), *shelf[1], *shelf[0], *random_ids(9, seed=2)]
    one = make_engine(model=model)
    one.warm(prompt)
    one.save(tmp_path / "cache")
    two = shelf_engine(make_engine, shelf, model=model)
    assert approximate_tokens(two.generate(prompt, max_new_tokens=2)) > 0
    two.load(tmp_path / "cache")
    result = two.generate(prompt, max_new_tokens=8)
    assert {span.origin for span in result.spans[:-1]} == {Origin.EXACT}
    assert result.token_ids == two.generate(prompt, max_new_tokens=8, mode="baseline").token_ids
    kept = two.core.parts.workspace._kept
    assert kept is not None
    for layer, (key, value) in zip(kept.arena.layers, fresh_kv(model, prompt), strict=True):
        for part, wanted in ((layer._keys, key), (layer._values, value)):
            torch.testing.assert_close(part[:, :, : len(prompt)], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_with_random_settings(
    seed: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    draw = random.Random(seed)
    model = tiny_model("llama", num_hidden_layers=2)
    per_token = make_engine(model=model).layout.bytes_per_token
    budget_tokens = draw.choice([None, 120, 300, 700])
    sink = draw.choice([0, 0, 10])
    engine = make_engine(
        model=model,
        chunk_size=draw.choice([4, 16, 50, 128]),
        max_chunks=draw.choice([None, None, 3, 8, 20]),
        max_cache_bytes=None if budget_tokens is None else budget_tokens * per_token,
        sink_tokens=sink,
        selector=draw.choice(["guided", "deviation"]),
        recompute_ratio=draw.choice([0, 0.1, 0.5]),
        chunk_boundary_window=draw.choice([0, 0, 3]),
    )
    shelf = documents(5, seed=300 + seed, low=33, high=90)
    asked: list[list[int]] = []
    for step in range(25):
        action, salt = draw.random(), draw.choice(["", "", "other"])
        document = draw.choice(shelf)
        if action < 0.15:
            part = document[: draw.randint(1, len(document))]
            engine.warm(part, cache_salt=salt, position_offset=draw.choice([0, 0, 17]))
        elif action < 0.2:
            engine.clear()
        elif action < 0.3:
            draw.choice([engine.pin, engine.unpin])(document)
        else:
            prompt = joined(draw.sample(shelf, draw.randint(1, 4)))
            if asked and draw.random() < 0.4:
                prompt = draw.choice(asked)
            prompt = [*prompt, *random_ids(draw.randint(1, 40), seed=draw.randint(0, 5))]
            mode = draw.choice(["chunk_kv_reuse", "chunk_kv_reuse", "chunk_kv_reuse", "prefix_cache"])
            options: dict[str, Any] = draw.choice([{}, {}, {"num_beams": 2}])
            result = engine.generate(prompt, max_new_tokens=3, mode=mode, cache_salt=salt, **options)
            check_spans(result)
            assert all(span.start >= sink for span in result.spans if span.origin in APPROXIMATE)
            if approximate_tokens(result):
                assert mode == "chunk_kv_reuse"
            else:
                expected = engine.generate(prompt, max_new_tokens=3, mode="baseline", **options)
                assert result.token_ids == expected.token_ids, step
            asked.append([*prompt, *result.token_ids][:700])
        check_store(engine)
    for salt in ("", "other"):
        check_exact_tree(engine, engine.namespace(salt))
