"""Quantized KV beside other options, ways in and out, threads and long chats."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import CachedChunk, KVCacheManager, chained_hash
from kvboost.choices import KVBits, Origin
from kvboost.kv.codec import KVCodec
from kvboost.kv.layout import KVLayout
from kvboost.reuse.plan import LOSSY_REASON, QUANTIZED_REASON
from tests.engine.quantized.quantized_checks import (
    ALL,
    BAD_TOKEN,
    LOSSY,
    TOLERANCE,
    broken_model,
    check_bytes,
    check_labels,
    check_tree,
    relative_error,
    tree_errors,
)
from tests.engine.reuse_checks import (
    APPROXIMATE,
    approximate_tokens,
    check_spans,
    documents,
    fresh_kv,
    joined,
    overlap_reference,
    pay_always,
    shelf_engine,
)
from tests.fixture_types import MakeEngine
from tests.threads import in_threads
from tests.tiny_models import long_model, random_ids, tiny_model


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("sink", [0, 6])
@pytest.mark.parametrize("bits", LOSSY)
def test_overlap_chunks_keep_their_encoding_and_label(
    bits: KVBits, sink: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    engine = make_engine(model=long_model(), kv_cache_bits=bits, overlap_k=10, sink_tokens=sink)
    text = random_ids(75, seed=1)
    engine.warm(text[:60])
    engine.core.parts.workspace.drop()
    engine.warm(text)
    wanted = overlap_reference(engine.model, text, 16, 10, sink)
    matches = engine.cache_manager.match_prefix(text, engine.namespace()).matches
    assert matches[-1].end == 75
    for match in matches:
        for pair, full in zip(match.chunk.past_key_values, wanted, strict=True):
            for part, whole in zip(pair, full, strict=True):
                assert relative_error(part, whole[:, :, match.start : match.end]) <= TOLERANCE[bits]
    result = engine.generate([*text, *random_ids(5, seed=2)], max_new_tokens=3)
    check_spans(result)
    exact = [s for s in result.spans if s.origin is Origin.EXACT]
    assert {s.reason for s in exact} == {QUANTIZED_REASON}
    assert {s.reason for s in result.spans if s.origin in APPROXIMATE} == {LOSSY_REASON}
    assert all(s.start <= sink + 10 for s in exact)
    check_bytes(engine)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk_size": 1},
    {"chunk_size": 7},
    {"chunk_size": 128},
    {"cache_device": "model"},
    {"sink_tokens": 20},
    {"overlap_k": 8},
    {"overlap_k": 5, "sink_tokens": 3, "chunk_size": 7},
    {"chunk_boundary_window": 5},
    {"recompute_strategy": "cacheblend", "selector": "deviation"},
    {"recompute_strategy": "none", "prefill_block": 13},
]


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "+".join(f"{k}={v}" for k, v in o.items()) or "none"
)
@pytest.mark.parametrize("bits", [8, "k8v4"])
def test_every_way_in_and_out(
    bits: KVBits, options: dict[str, Any], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    engine = make_engine(model=long_model(), kv_cache_bits=bits, **options)
    text, moved = random_ids(70, seed=1), random_ids(64, seed=2)
    assert engine.warm(text).token_count == 70
    engine.warm(moved, position_offset=33)
    assert engine.pin(text) == 70
    check_bytes(engine)
    prompt = [*text, *random_ids(5, seed=3), *moved, *random_ids(4, seed=4)]
    explained = engine.explain(prompt)
    wanted = engine.generate(prompt, max_new_tokens=6)
    check_spans(wanted)
    check_labels(engine, wanted.spans)
    assert wanted.cached_tokens == explained.cached_tokens >= 70
    check_bytes(engine)
    engine.core.parts.workspace.drop()
    stream = engine.stream([*prompt, *random_ids(3, seed=5)], max_new_tokens=6)
    assert isinstance("".join(stream), str)
    check_spans(stream.result)
    assert stream.result.cached_tokens >= len(prompt) - 1 - 64
    broken_off = engine.stream([*text, 9, 8], max_new_tokens=40)
    next(iter(broken_off))
    broken_off.close()
    check_bytes(engine)
    own = [*text, *random_ids(6, seed=6)]
    prepared = engine.prepare(own, max_new_tokens=5)
    output = engine.model.generate(**prepared, max_new_tokens=5, do_sample=False)
    report = engine.commit(prepared, output)
    assert report.stored + report.present > 0
    assert engine.explain([*own, 9]).cached_tokens >= len(own)
    check_bytes(engine)
    one_token = engine.generate([7], max_new_tokens=3)
    assert one_token.cached_tokens == 0
    again = engine.generate([7, *one_token.token_ids[:2], 8], max_new_tokens=1)
    assert again.cached_tokens >= 1
    check_labels(engine, again.spans)
    engine.clear()
    assert engine.explain([*text, 9]).cached_tokens == 70
    assert engine.unpin(text) == 70
    engine.clear()
    assert engine.cache_stats()["bytes"] == 0
    check_bytes(engine)


def test_cuts_at_sentence_ends(make_engine: MakeEngine) -> None:
    text = "A story of some length. It goes on! Does it? Yes.\nIt ends here, or so they say. " * 3
    engine = make_engine(kv_cache_bits=4, chunk_boundary_window=6)
    engine.warm(text)
    engine.core.parts.workspace.drop()
    result = engine.generate(text + "And then", max_new_tokens=3)
    lengths = {s.length for s in result.spans if s.origin is Origin.EXACT}
    assert len(lengths) > 2
    check_labels(engine, result.spans)
    check_bytes(engine)
    check_tree(engine)


@pytest.mark.parametrize("bits", LOSSY)
def test_beams_and_sampling(bits: KVBits, make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_bits=bits)
    text = random_ids(60, seed=1)
    engine.warm(text)
    prompt = [*text, *random_ids(5, seed=2)]
    for options in ({"num_beams": 3}, {"do_sample": True, "seed": 3}):
        engine.core.parts.workspace.drop()
        result = engine.generate(prompt, max_new_tokens=5, **options)
        assert result.cached_tokens >= 60
        check_spans(result)
        check_bytes(engine)
    check_tree(engine)


@pytest.mark.parametrize("bits", ALL)
def test_a_chunk_from_one_store_can_be_put_into_another(bits: KVBits, make_engine: MakeEngine) -> None:
    """What `get` gives, `store` takes."""
    engine = make_engine(kv_cache_bits=bits)
    text = random_ids(16, seed=1)
    engine.warm(text)
    key = engine.cache_manager.match_prefix(text, engine.namespace()).matches[0].chunk.chunk_id
    chunk = engine.cache_manager.get(key)
    assert chunk is not None
    other = KVCacheManager()
    assert other.store(chunk)
    found = other.get(key)
    assert found is not None
    for pair, wanted in zip(found.past_key_values, chunk.past_key_values, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, wanted, strict=True))
    other.check_integrity()


@pytest.mark.parametrize("bits", [16, 8])
def test_a_chunk_of_ones_own_is_saved_and_loaded_with_what_follows_it(
    bits: KVBits, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """What was stored is not called corrupt when it comes back."""
    model = tiny_model("llama")
    engine = make_engine(model=model, kv_cache_bits=bits)
    ids = random_ids(32, seed=1)
    engine.warm(ids[:16])
    parent = engine.cache_manager.match_prefix(ids, engine.namespace()).matches[0].chunk.chunk_id
    key = chained_hash(ids[16:], parent)
    past = tuple((k[:, :, 16:].clone(), v[:, :, 16:].clone()) for k, v in fresh_kv(model, ids))
    own = CachedChunk(key, "", ids[16:], past, 16, 32, prefix_hash=key, parent_hash=parent)
    assert engine.cache_manager.store(own)
    engine.core.parts.workspace.drop()
    assert engine.generate([*ids, 7], max_new_tokens=2).cached_tokens == 32
    engine.cache_manager.check_integrity()
    saved = engine.save(tmp_path / "cache")
    report = make_engine(model=model, kv_cache_bits=bits).load(tmp_path / "cache")
    assert (report.loaded, report.corrupt) == (saved, 0)


# --- several engines, threads ---------------------------------------------------------------------


def test_engines_with_different_bits_share_a_model_in_threads(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engines = [make_engine(model=model, kv_cache_bits=bits) for bits in ALL]
    budget = 15 * engines[1].codec.bytes_for(16)
    engines.append(make_engine(model=model, kv_cache_bits=8, max_cache_bytes=budget))
    prompts = [random_ids(30 + k % 5, seed=k % 7) + random_ids(1 + k % 9, seed=500 + k) for k in range(20)]
    expected = [engines[0].generate(p, max_new_tokens=3, mode="baseline").token_ids for p in prompts]

    def work(number: int) -> None:
        for index in range(number, len(prompts), 4):
            for engine in engines:
                result = engine.generate(prompts[index], max_new_tokens=3, mode="prefix_cache")
                check_spans(result)
                check_labels(engine, result.spans)
                if engine.codec.bits == 16:
                    assert result.token_ids == expected[index]
                engine.explain(prompts[index])
                again = engine.generate(prompts[index], max_new_tokens=3, mode="baseline")
                assert again.token_ids == expected[index]

    in_threads(4, work)
    for engine in engines:
        check_bytes(engine)
        check_tree(engine, factor=2.0)
    assert engines[-1].cache_stats()["evicted_chunks"] > 0


@pytest.mark.usefixtures("approximate_reuse")
def test_threads_with_approximate_reuse_and_text_that_is_refused(make_engine: MakeEngine) -> None:
    model = broken_model()
    budget = 60 * make_engine(model=model, kv_cache_bits=8).codec.bytes_for(16)
    shelf = documents(6, seed=46, low=60, high=110)
    engine = shelf_engine(make_engine, shelf, model=model, kv_cache_bits=8, max_cache_bytes=budget)
    approximate: list[int] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        for step in range(8):
            prompt = [*joined(draw.sample(shelf, 3)), *random_ids(6, seed=10 * number + step)]
            if step % 3 == 2:
                prompt.insert(draw.randrange(len(prompt)), BAD_TOKEN)
            result = engine.generate(prompt, max_new_tokens=3)
            check_spans(result)
            check_labels(engine, result.spans)
            approximate.append(approximate_tokens(result))
            engine.warm(draw.choice(shelf))
            assert engine.cache_stats()["bytes"] <= budget

    in_threads(4, work)
    assert sum(map(bool, approximate)) >= 5
    assert engine.cache_stats()["refused"]["not finite"] > 0
    check_bytes(engine)
    check_tree(engine, factor=2.0)


# --- long chats -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("bits", LOSSY)
def test_errors_do_not_grow_with_the_turns_of_a_chat(
    bits: KVBits, architecture: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(architecture, kv_cache_bits=bits, chunk_size=128)
    ids, known = random_ids(20, seed=1), 0
    for turn in range(10):
        result = engine.generate(ids, max_new_tokens=5, mode="prefix_cache")
        assert result.cached_tokens == known
        engine.core.parts.workspace.drop()  # every turn starts from what is stored
        known = len(ids) + len(result.token_ids) - 1
        ids = [*ids, *result.token_ids, *random_ids(5, seed=100 + turn)]
    check_tree(engine)
    once = make_engine(model=engine.model, kv_cache_bits=bits, chunk_size=128)
    once.warm(ids[:known])
    grown, fresh = tree_errors(engine), tree_errors(once)
    for side in (0, 1):  # layer 0 depends on the tokens alone: there is nothing but rounding in it
        assert grown[0][side] <= 1.6 * fresh[0][side]
    check_bytes(engine)


@pytest.mark.parametrize("bits", LOSSY)
def test_a_tail_that_grows_by_one_token_at_a_time(bits: KVBits, make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_bits=bits, chunk_size=64)
    text = random_ids(64, seed=1)
    for length in range(1, 65):
        engine.warm(text[:length])
        engine.core.parts.workspace.drop()
        assert engine.cache_stats()["chunks"] == 1
        assert engine.cache_stats()["bytes"] == engine.codec.bytes_for(length)
    check_bytes(engine)
    once = make_engine(model=engine.model, kv_cache_bits=bits, chunk_size=64)
    once.warm(text)
    for grown, fresh in zip(tree_errors(engine)[0], tree_errors(once)[0], strict=True):
        assert grown <= 2 * fresh
    check_tree(engine)


@pytest.mark.parametrize("bits", LOSSY)
def test_chats_of_messages(bits: KVBits, make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_bits=bits)
    messages = [{"role": "system", "content": "You are terse."}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}: why?"})
        result = engine.generate(messages, max_new_tokens=6)
        check_spans(result)
        check_labels(engine, result.spans)
        assert turn == 0 or result.kv_reuse_ratio > 0.5
        messages.append({"role": "assistant", "content": result.output_text})
        engine.core.parts.workspace.drop()
    check_bytes(engine)
    check_tree(engine)


def test_a_layout_learned_from_a_model_costs_what_the_codec_says(make_engine: MakeEngine) -> None:
    engine = make_engine("gemma3", kv_cache_bits="k8v4")
    text = random_ids(45, seed=1)
    engine.warm(text)
    assert engine.cache_stats()["bytes"] == 2 * engine.codec.bytes_for(16) + engine.codec.bytes_for(13)
    layout = KVLayout.of(tuple(fresh_kv(engine.model, text)))
    assert layout.slabs == engine.layout.slabs
    assert KVCodec(layout, "k8v4").bytes_for(16) == engine.codec.bytes_for(16)
