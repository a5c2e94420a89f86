"""Approximate reuse of quantized KV."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvboost.choices import AssemblyMode, KVBits, Origin
from kvboost.kv.arena import Arena
from kvboost.reuse.assembler import Lookup
from kvboost.reuse.plan import CHAIN_REASON, QUANTIZED_REASON
from tests.engine.quantized.quantized_checks import (
    LOSSY,
    TOLERANCE,
    check_bytes,
    check_labels,
    check_tree,
    placed,
    relative_error,
    token_errors,
)
from tests.engine.reuse_checks import (
    APPROXIMATE,
    Chat,
    approximate_tokens,
    chain_tokens,
    check_spans,
    documents,
    fresh_kv,
    joined,
    pay_always,
    shelf_engine,
)
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids

pytestmark = pytest.mark.usefixtures("approximate_reuse")


@pytest.mark.parametrize("selector", ["guided", "deviation"])
@pytest.mark.parametrize("bits", LOSSY)
def test_moved_documents_are_found_labelled_and_repaired(
    bits: KVBits, selector: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    shelf = documents(3, seed=42, low=80, high=150)
    engine = shelf_engine(make_engine, shelf, kv_cache_bits=bits, selector=selector)
    prompt = joined([shelf[0], random_ids(5, seed=1), shelf[2], shelf[1], random_ids(9, seed=2)])
    explanation = engine.explain(prompt)
    result = engine.generate(prompt, max_new_tokens=4)
    check_spans(result)
    check_labels(engine, result.spans)
    check_labels(engine, explanation.spans)
    assert approximate_tokens(result) == len(shelf[1]) + len(shelf[2])
    assert result.recomputed_tokens == -(-15 * approximate_tokens(result) // 100)
    assert {s.reason[:8] for s in result.spans if s.origin in APPROXIMATE} == {"moved by"}
    assert {s.reason for s in result.spans if s.end <= len(shelf[0])} == {QUANTIZED_REASON}
    assert engine.cache_stats()["hits"] == {"exact": 0, "approximate": 1}
    check_bytes(engine)
    check_tree(engine)


@pytest.mark.parametrize("shift", [-20, 1, 50])
@pytest.mark.parametrize("bits", LOSSY)
def test_moved_keys_are_turned_after_decoding(bits: KVBits, shift: int, make_engine: MakeEngine) -> None:
    """Layer 0 depends on tokens and positions alone, so what was moved there is known."""
    engine = make_engine(model=long_model(), kv_cache_bits=bits)
    document = random_ids(100, seed=1)
    engine.warm(document, position_offset=30)
    prompt = [*random_ids(30 + shift, seed=2), *document, *random_ids(3, seed=3)]
    ids = np.array(prompt)
    plan = engine.assembler.plan(Lookup(ids, engine.namespace(), len(ids), AssemblyMode.CHUNK_REUSE))
    assert [run.shift for run in plan.runs] == [shift]
    run = plan.runs[0]
    assert run.end - run.start == 100
    arena = Arena(engine.layout, len(ids))
    engine.assembler.place(plan, arena)
    arena.set_length(len(ids))
    for part, wanted in zip(arena.as_past_key_values()[0], fresh_kv(engine.model, prompt)[0], strict=True):
        found, full = part[:, :, run.start : run.end], wanted[:, :, run.start : run.end]
        assert relative_error(found, full) <= TOLERANCE[bits] / 2


@pytest.mark.parametrize("bits", LOSSY)
def test_repairing_everything_is_a_full_prefill(
    bits: KVBits, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    shelf = documents(3, seed=43, low=80, high=150)
    engine = shelf_engine(make_engine, shelf, kv_cache_bits=bits, recompute_ratio=1.0)
    prompt = joined([random_ids(5, seed=1), *shelf[::-1], random_ids(9, seed=2)])
    result = engine.generate(prompt, max_new_tokens=12)
    assert result.recomputed_tokens == sum(map(len, shelf))
    assert result.token_ids == engine.generate(prompt, max_new_tokens=12, mode="baseline").token_ids
    kept = engine.core.parts.workspace._kept
    assert kept is not None
    for layer, pair in zip(kept.arena.layers, fresh_kv(engine.model, prompt), strict=True):
        for part, wanted in zip((layer._keys, layer._values), pair, strict=True):
            torch.testing.assert_close(part[:, :, : len(prompt)], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chunk_size", [7, 128])
@pytest.mark.parametrize("bits", LOSSY)
def test_a_chain_decodes_to_what_was_computed(
    bits: KVBits, chunk_size: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    shelf = documents(3, seed=44, low=90, high=150)
    engine = shelf_engine(make_engine, shelf, kv_cache_bits=bits, chunk_size=chunk_size, recompute_ratio=0.3)
    chat = Chat(engine, [shelf[2], shelf[0], random_ids(45, seed=3), shelf[1]], seed=1)
    for turn in range(4):
        known = len(chat.ids) - 1
        result = chat.turn()
        check_labels(engine, result.spans)
        if turn:
            assert (result.recomputed_tokens, result.cached_tokens) == (0, known)
            assert chain_tokens(result) > 300
            assert {s.reason for s in result.spans if s.origin is Origin.APPROXIMATE} == {CHAIN_REASON}
        kept = engine.core.parts.workspace._kept
        assert kept is not None
        ids = kept.token_ids
        for layer, pair in enumerate(placed(engine, ids.tolist())):
            held = kept.arena.layers[layer]
            for part, computed in zip(pair, (held._keys, held._values), strict=True):
                assert part.shape[2] == len(ids)
                wanted = computed[:, :, : len(ids)]
                error = token_errors(part, wanted)
                assert float(error.max()) <= 2 * TOLERANCE[bits], (turn, layer)
        check_bytes(engine)
        engine.core.parts.workspace.drop()  # the next turn has nothing but the store
    check_tree(engine)


def test_the_first_answer_over_documents_is_the_same_with_and_without_the_workspace(
    make_engine: MakeEngine,
) -> None:
    """What the arena of the last request holds spares a copy and decides nothing."""
    model = long_model()
    shelf = documents(2, seed=45, low=90, high=120)
    prompt = joined([random_ids(6, seed=1), shelf[1], shelf[0], random_ids(20, seed=2)])
    answers = []
    for dropped in (False, True):
        engine = shelf_engine(make_engine, shelf, model=model, kv_cache_bits=8)
        if dropped:
            engine.core.parts.workspace.drop()
        result = engine.generate(prompt, max_new_tokens=8)
        answers.append((result.token_ids, result.spans))
    assert answers[0] == answers[1]
