"""Text is found wherever it stands, and only where it may be."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from kvboost.choices import AssemblyMode, Origin
from kvboost.reuse.assembler import Lookup
from tests.engine.reuse_checks import (
    APPROXIMATE,
    approximate_tokens,
    check_spans,
    check_store,
    documents,
    joined,
    pay_always,
)
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids

pytestmark = pytest.mark.usefixtures("approximate_reuse")


def test_a_document_is_found_at_any_offset(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), recompute_ratio=0.0)
    draw = random.Random(1)
    found = documents(12, seed=1)
    for document in found:
        engine.warm(document)
    for number in range(50):
        document = found[number % len(found)]
        before = random_ids(draw.randint(1, 400), seed=9000 + number)
        prompt = [*before, *document, *random_ids(draw.randint(1, 40), seed=8000 + number)]
        inside = range(len(before), len(before) + len(document))
        cached = sum(
            len(range(max(span.start, inside.start), min(span.end, inside.stop)))
            for span in engine.assembler.plan(
                Lookup(np.array(prompt), engine.namespace(), len(prompt) - 1, AssemblyMode.CHUNK_REUSE)
            ).spans()
            if span.origin is Origin.APPROXIMATE
        )
        assert cached >= 0.97 * len(document), (number, len(document), len(before))


def test_eight_documents_in_random_order_are_all_found(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    found = documents(8, seed=2)
    for document in found:
        engine.warm(document)
    for number in range(5):
        order = found[:]
        random.Random(number).shuffle(order)
        pieces: list[list[int]] = [random_ids(13, seed=500 + number)]
        wanted: list[range] = []
        for document in order:
            start = sum(map(len, pieces))
            wanted.append(range(start, start + len(document)))
            pieces += [document, random_ids(1 + number, seed=len(pieces))]
        result = engine.generate(joined(pieces), max_new_tokens=2)
        check_spans(result)
        for place in wanted:
            got = sum(
                len(range(max(s.start, place.start), min(s.end, place.stop)))
                for s in result.spans
                if s.origin is not Origin.LIVE
            )
            assert got >= 0.97 * len(place)
        assert 0 < result.recomputed_tokens <= 0.15 * result.cached_tokens + 1
        check_store(engine)


def test_moved_documents_name_their_donors(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pay_always(monkeypatch)
    engine = make_engine(model=long_model())
    one, two = documents(2, seed=3)
    engine.warm(one)
    engine.warm(two)
    prompt = [*two, *one, *random_ids(9, seed=1)]
    result = engine.generate(prompt, max_new_tokens=1)
    donors = engine.cache_manager.match_prefix(one, engine.namespace()).matches
    moved = [span for span in result.spans if span.origin in APPROXIMATE]
    assert {span.donor for span in moved} == {match.chunk.chunk_id for match in donors}
    assert {span.reason for span in moved} == {f"moved by +{len(two)} positions"}
    assert [s.origin for s in result.spans if s.end <= len(two)] == [Origin.EXACT] * math.ceil(len(two) / 16)


def test_other_modes_use_nothing_approximate(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    one, two = documents(2, seed=4)
    engine.warm(one)
    engine.warm(two)
    prompt = [*random_ids(5, seed=1), *one, *two, *random_ids(9, seed=2)]
    before = engine.cache_stats()
    expected = engine.generate(prompt, max_new_tokens=6, mode="baseline")
    assert engine.cache_stats() == before
    result = engine.generate(prompt, max_new_tokens=6, mode="prefix_cache")
    assert {span.origin for span in result.spans} == {Origin.LIVE}
    assert result.token_ids == expected.token_ids
    engine.clear()
    engine.warm(one)
    engine.warm(two)
    explained = {
        mode: engine.explain(prompt, mode=mode) for mode in ("chunk_kv_reuse", "prefix_cache", "baseline")
    }
    assert explained["chunk_kv_reuse"].cached_tokens == len(one) + len(two)
    assert explained["prefix_cache"].cached_tokens == explained["baseline"].cached_tokens == 0
    assert explained["prefix_cache"].choice == ""
    assert [span.reason for span in explained["baseline"]] == ["baseline"]
    assert approximate_tokens(engine.generate(prompt, max_new_tokens=6)) == len(one) + len(two)
    again = engine.generate(prompt, max_new_tokens=6, mode="prefix_cache")  # nor the chain, nor the arena
    assert {span.origin for span in again.spans} <= {Origin.LIVE, Origin.EXACT}
    assert again.token_ids == expected.token_ids


def test_salts_never_share_content(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    document = random_ids(200, seed=5)
    engine.warm(document, cache_salt="mine")
    prompt = [*random_ids(7, seed=1), *document, 9, 8]
    assert engine.generate(prompt, max_new_tokens=2, cache_salt="mine").cached_tokens == 200
    for salt in ("", "yours"):
        assert engine.explain(prompt, cache_salt=salt).cached_tokens == 0
        result = engine.generate([*random_ids(3, seed=2), *prompt], max_new_tokens=2, cache_salt=salt)
        assert [(span.origin, span.reason) for span in result.spans] == [(Origin.LIVE, "never stored")]
    check_store(engine)


def test_other_weights_never_share_content(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    document = random_ids(200, seed=6)
    prompt = [*random_ids(7, seed=1), *document, 9, 8]
    engine.warm(document)
    assert engine.generate(prompt, max_new_tokens=2).cached_tokens == 200
    with torch.no_grad():
        engine.model.lm_head.weight[0, 0] += 1.0
    assert engine.explain(prompt).cached_tokens == 0
    assert engine.generate(prompt, max_new_tokens=2).cached_tokens == 0
    check_store(engine)


def test_clear_forgets_content_and_chains(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    document = random_ids(200, seed=7)
    prompt = [*random_ids(7, seed=1), *document, *random_ids(50, seed=2)]
    engine.warm(document)
    engine.generate(prompt, max_new_tokens=2)
    engine.clear()
    stats = engine.cache_stats()
    assert (stats["chunks"], stats["bytes"], stats["workspace_bytes"]) == (0, 0, 0)
    assert engine.explain(prompt).cached_tokens == 0
    pool = engine.cache_manager._store
    assert not pool.forest.content_keys()
    assert not pool.borrowers.by_donor()
    check_store(engine)
