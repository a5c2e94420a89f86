"""KV that cannot be held in few bits is not stored, and nothing else is lost with it."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.choices import KVBits
from kvboost.kv.codec import StoredKV
from kvboost.kv.layout import Packed
from tests.engine.quantized.quantized_checks import BAD_TOKEN, LOSSY, broken_model, check_bytes
from tests.engine.reuse_checks import (
    Chat,
    approximate_tokens,
    check_spans,
    documents,
    joined,
    pay_always,
    shelf_engine,
)
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("bits", LOSSY)
def test_kv_that_is_not_finite_is_not_stored(bits: KVBits, number: float, make_engine: MakeEngine) -> None:
    model = broken_model(number)
    engine = make_engine(model=model, kv_cache_bits=bits, max_cache_bytes=1_000_000)
    start = random_ids(32, seed=1)
    engine.warm(start)
    prompt = [*start, *random_ids(8, seed=4), BAD_TOKEN, *random_ids(30, seed=2)]
    wanted = engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids
    for turn in range(3):
        result = engine.generate(prompt, max_new_tokens=4)
        check_spans(result)
        assert result.token_ids == wanted
        assert result.cached_tokens == 32
        assert engine.cache_stats()["refused"] == {"not finite": turn + 1}
        assert engine.cache_stats()["chunks"] == 2
        check_bytes(engine)
    other = random_ids(90, seed=3)
    wanted = engine.generate(other, max_new_tokens=6, mode="baseline").token_ids
    assert engine.generate(other, max_new_tokens=6).token_ids == wanted
    assert engine.generate([BAD_TOKEN], max_new_tokens=2).cached_tokens == 0
    assert engine.warm([*other[:5], BAD_TOKEN]).chunks_stored == 0
    engine.clear()
    assert engine.cache_stats()["bytes"] == 0
    check_bytes(engine)


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize(("ratio", "selector"), [(0.15, "guided"), (0.15, "deviation"), (1.0, "guided")])
@pytest.mark.parametrize("bits", [16, 8, "k8v4"])
def test_the_next_answer_is_the_same_behind_kv_that_is_not_finite(
    bits: KVBits, ratio: float, selector: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arena is used again: what lies in gaps there must not reach the next answer."""
    pay_always(monkeypatch)
    model = broken_model()
    shelf = documents(2, seed=40, low=80, high=100)
    prompt = joined(
        [random_ids(21, seed=1), shelf[1], random_ids(15, seed=2), shelf[0], random_ids(9, seed=3)]
    )
    results = []
    for behind in (False, True):
        engine = shelf_engine(
            make_engine, shelf, model=model, kv_cache_bits=bits, recompute_ratio=ratio, selector=selector
        )
        if behind:
            engine.generate([BAD_TOKEN] * 300, max_new_tokens=6)
            assert engine.core.parts.workspace.nbytes > 0
        results.append(engine.generate(prompt, max_new_tokens=6))
        check_spans(results[-1])
        check_bytes(engine)
    assert approximate_tokens(results[0]) == len(shelf[0]) + len(shelf[1])
    assert results[0].spans == results[1].spans
    assert results[0].token_ids == results[1].token_ids


@pytest.mark.parametrize("length", [40, 8])
def test_pins_outlive_a_longer_text_that_cannot_be_stored(length: int, make_engine: MakeEngine) -> None:
    """The pinned tail is not given up for a chunk that is refused."""
    engine = make_engine(model=broken_model(), kv_cache_bits=8)
    text = random_ids(length, seed=1)
    engine.warm(text)
    assert engine.pin(text) == length
    pinned = engine.cache_stats()["pinned_chunks"]
    engine.generate([*text, BAD_TOKEN, 7, 8], max_new_tokens=2)
    assert engine.cache_stats()["refused"] == {"not finite": 1}
    check_bytes(engine)
    assert engine.cache_stats()["pinned_chunks"] == pinned
    engine.clear()
    assert engine.explain([*text, 9]).cached_tokens == length
    assert engine.unpin(text) == length
    engine.clear()
    assert engine.cache_stats()["chunks"] == 0
    check_bytes(engine)


def test_pins_before_a_tail_that_is_lost_still_hold(make_engine: MakeEngine) -> None:
    engine = make_engine(model=broken_model(), kv_cache_bits=8)
    text = random_ids(40, seed=1)
    engine.warm(text)
    engine.pin(text)
    engine.generate([*text, BAD_TOKEN, 7, 8], max_new_tokens=2)
    engine.clear()
    assert engine.explain([*text, 9]).cached_tokens >= 32
    engine.unpin(text)
    engine.clear()
    assert engine.cache_stats()["chunks"] == 0
    check_bytes(engine)


def test_a_refused_longer_text_does_not_lose_the_tail(make_engine: MakeEngine) -> None:
    engine = make_engine(model=broken_model(), kv_cache_bits=8)
    text = random_ids(40, seed=1)
    engine.warm(text)
    engine.generate([*text, BAD_TOKEN, 7, 8], max_new_tokens=2)
    assert engine.explain([*text, 9]).cached_tokens == 40


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("bits", LOSSY)
def test_a_chain_over_a_tail_whose_successor_is_refused(bits: KVBits, make_engine: MakeEngine) -> None:
    """Borrows that were moved to a chunk that never comes do not dangle."""
    shelf = [random_ids(length, seed=length) for length in (102, 87)]
    engine = shelf_engine(make_engine, shelf, model=broken_model(), kv_cache_bits=bits)
    chat = Chat(engine, [shelf[1], shelf[0]], seed=1)
    assert approximate_tokens(chat.turn()) > 0
    for document in shelf:
        engine.warm([*document, BAD_TOKEN, *random_ids(20, seed=3)])
        check_bytes(engine)
    engine.core.parts.workspace.drop()
    result = chat.turn()
    assert result.cached_tokens > 150
    check_bytes(engine)


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("kind", ["exact", "tainted", "chain"])
def test_approximate_requests_go_on_where_storing_is_refused(
    kind: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvboost.errors import UnstorableKVError

    shelf = documents(2, seed=41, low=90, high=120)
    model = long_model()
    prompt = joined([random_ids(50, seed=1), shelf[1], shelf[0], random_ids(60, seed=2)])
    answers = []
    for refuses in (False, True):
        engine = shelf_engine(make_engine, shelf, model=model, kv_cache_bits=8, recompute_ratio=0.2)
        count = 0
        encode = engine.codec.encode

        def refusing(raw: Packed, encode: Any = encode) -> StoredKV:
            nonlocal count
            count += 1
            tokens = raw[0].shape[1]
            is_chain = tokens not in (16, 50 % 16, (60 + 3) % 16)
            if {"exact": count == 2, "tainted": count == 6, "chain": is_chain}[kind]:
                raise UnstorableKVError("not finite")
            return encode(raw)

        if refuses:
            monkeypatch.setattr(engine.codec, "encode", refusing)
        answers.append(engine.generate(prompt, max_new_tokens=4).token_ids)
        check_bytes(engine)
        assert engine.cache_stats()["refused"].get("not finite", 0) == int(refuses)
        monkeypatch.undo()
        engine.core.parts.workspace.drop()
        check_spans(engine.generate([*prompt, 9, 8, 7], max_new_tokens=2))
        check_bytes(engine)
    assert answers[0] == answers[1]
