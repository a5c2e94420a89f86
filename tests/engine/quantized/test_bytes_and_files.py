"""Budgets and saved caches count the bytes that quantized KV takes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.choices import KVBits
from kvboost.kv.codec import KVCodec, StoredKV
from kvboost.kv.layout import Packed
from tests.engine.quantized.quantized_checks import (
    ALL,
    LOSSY,
    check_bytes,
    check_labels,
    check_tree,
    tensors_of,
)
from tests.engine.reuse_checks import check_spans, documents, joined, pay_always
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids, tiny_model


@pytest.mark.parametrize("bits", ALL)
def test_a_budget_holds_as_many_chunks_as_their_true_size_allows(
    bits: KVBits, make_engine: MakeEngine
) -> None:
    model = tiny_model("llama")
    plain = make_engine(model=model).codec.bytes_for(16)
    size = make_engine(model=model, kv_cache_bits=bits).codec.bytes_for(16)
    engine = make_engine(model=model, kv_cache_bits=bits, max_cache_bytes=10 * plain + 17)
    for seed in range(80):
        engine.warm(random_ids(16, seed=seed))
        assert engine.cache_stats()["bytes"] <= 10 * plain + 17
    assert engine.cache_stats()["chunks"] == (10 * plain + 17) // size
    assert bits == 16 or engine.cache_stats()["chunks"] >= 20
    check_bytes(engine)


@pytest.mark.parametrize("bits", LOSSY)
def test_a_budget_to_the_byte(bits: KVBits, make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    codec = make_engine(model=model, kv_cache_bits=bits).codec
    text = random_ids(39, seed=1)
    needed = 2 * codec.bytes_for(16) + codec.bytes_for(7)
    for budget, kept in ((needed, 39), (needed - 1, 32), (codec.bytes_for(16) - 1, 0), (0, 0)):
        engine = make_engine(model=model, kv_cache_bits=bits, max_cache_bytes=budget)
        engine.warm(text)
        assert engine.explain([*text, 9]).cached_tokens == kept
        check_bytes(engine)


class BudgetWatch:
    """Checks at every encoding that what is alive, with the new chunk, is within the budget."""

    def __init__(self, engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.most = 0
        encode = KVCodec.encode

        def watched(codec: KVCodec, raw: Packed) -> StoredKV:
            made = encode(codec, raw)
            self.look(made.nbytes)
            return made

        monkeypatch.setattr(KVCodec, "encode", watched)

    def look(self, extra: int = 0) -> None:
        pool = self.engine.cache_manager._store
        alive = sum(
            part.untyped_storage().nbytes()
            for e in list(pool.entries.values())
            for part in e.chunk.kv.tensors
        )
        assert pool.budget.max_bytes is not None
        assert alive + extra <= pool.budget.max_bytes
        assert pool.budget.used_bytes <= pool.budget.max_bytes
        self.most = max(self.most, alive + extra)


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_never_leave_the_budget(
    seed: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    draw = random.Random(seed)
    bits = LOSSY[seed % 3]
    model = tiny_model("llama", num_hidden_layers=2)
    chunk_size = draw.choice([1, 7, 16, 50])
    per_chunk = make_engine(model=model, kv_cache_bits=bits).codec.bytes_for(chunk_size)
    budget = draw.choice([90, 220, 400]) // chunk_size * per_chunk + draw.randrange(per_chunk)
    engine = make_engine(
        model=model,
        kv_cache_bits=bits,
        chunk_size=chunk_size,
        max_cache_bytes=budget,
        sink_tokens=draw.choice([0, 5]),
        selector=draw.choice(["guided", "deviation"]),
        recompute_ratio=draw.choice([0, 0.15, 1.0]),
        chunk_boundary_window=draw.choice([0, chunk_size // 3]),
        cache_device=draw.choice(["cpu", "model"]),
    )
    watch = BudgetWatch(engine, monkeypatch)
    shelf = documents(5, seed=700 + seed, low=33, high=90)
    asked: list[list[int]] = []
    for _ in range(25):
        action, document = draw.random(), draw.choice(shelf)
        salt = draw.choice(["", "", "other"])
        if action < 0.2:
            part = document[: draw.randint(1, len(document))]
            engine.warm(part, cache_salt=salt, position_offset=draw.choice([0, 0, 17]))
        elif action < 0.25:
            engine.clear()
        elif action < 0.35:
            draw.choice([engine.pin, engine.unpin])(document)
        else:
            prompt = joined(draw.sample(shelf, draw.randint(1, 3)))
            if asked and draw.random() < 0.4:
                prompt = draw.choice(asked)
            prompt = [*prompt, *random_ids(draw.randint(1, 40), seed=draw.randint(0, 5))]
            mode = draw.choice(["chunk_kv_reuse", "chunk_kv_reuse", "prefix_cache"])
            options: dict[str, Any] = draw.choice([{}, {}, {"num_beams": 2}])
            result = engine.generate(prompt, max_new_tokens=3, mode=mode, cache_salt=salt, **options)
            check_spans(result)
            check_labels(engine, result.spans)
            asked.append([*prompt, *result.token_ids][:400])
        watch.look()
        check_bytes(engine)
    assert watch.most > budget // 2
    assert engine.cache_stats()["evicted_chunks"] > 0
    for salt in ("", "other"):
        check_tree(engine, engine.namespace(salt), factor=2.0)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", LOSSY)
def test_what_is_loaded_is_what_was_saved(bits: KVBits, make_engine: MakeEngine, tmp_path: Path) -> None:
    model = long_model()
    one = make_engine(model=model, kv_cache_bits=bits)
    texts = [random_ids(length, seed=length) for length in (1, 16, 50, 120)]
    for text in texts:
        one.warm(text)
    one.warm(texts[2], cache_salt="secret")
    one.warm(texts[3], position_offset=64)
    saved = one.save(tmp_path / "cache")
    kept = tensors_of(one)
    assert saved == len(kept)
    loaded = [make_engine(model=model, kv_cache_bits=bits) for _ in range(2)]
    for engine in loaded:
        report = engine.load(tmp_path / "cache")
        assert (report.loaded, report.corrupt, report.no_room) == (saved, 0, 0)
        found = tensors_of(engine)
        assert found.keys() == kept.keys()
        for key, parts in kept.items():
            assert all(torch.equal(a, b) for a, b in zip(parts, found[key], strict=True))
        check_bytes(engine)
        assert engine.cache_stats()["bytes"] == one.cache_stats()["bytes"]
    for number, text in enumerate(texts):
        prompt = [*text, *random_ids(6, seed=number)]
        answers = []
        for engine in (one, *loaded):
            engine.core.parts.workspace.drop()
            result = engine.generate(prompt, max_new_tokens=8, mode="prefix_cache")
            assert result.cached_tokens == len(text)
            check_labels(engine, result.spans)
            answers.append(result.token_ids)
        assert answers[0] == answers[1] == answers[2]
    again = loaded[0].save(tmp_path / "again")
    assert make_engine(model=model, kv_cache_bits=bits).load(tmp_path / "again").loaded == again


@pytest.mark.parametrize("bits", [8, "k8v4"])
def test_damaged_chunks_are_left_out(bits: KVBits, make_engine: MakeEngine, tmp_path: Path) -> None:
    model = tiny_model("llama")
    one = make_engine(model=model, kv_cache_bits=bits)
    text = random_ids(80, seed=1)
    one.warm(text)
    one.save(tmp_path / "cache")
    kept = tensors_of(one)
    shard = next((tmp_path / "cache").glob("*.records"))
    whole = shard.read_bytes()
    places = [place for place, byte in enumerate(whole) if byte]  # between records there are zeros
    draw = random.Random(0)
    for trial in range(14):
        damaged = bytearray(whole)
        if trial % 7 == 0:
            damaged = damaged[: draw.choice(places)]
        else:
            damaged[draw.choice(places)] ^= 1 << draw.randrange(8)
        shard.write_bytes(damaged)
        two = make_engine(model=model, kv_cache_bits=bits)
        report = two.load(tmp_path / "cache")
        assert report.loaded + report.corrupt == 5
        assert report.corrupt >= 1
        assert two.cache_stats()["misses"]["corrupt"] == report.corrupt
        for key, parts in tensors_of(two).items():
            assert all(torch.equal(a, b) for a, b in zip(parts, kept[key], strict=True))
        assert two.explain([*text, 5]).cached_tokens == 16 * report.loaded
        check_bytes(two)


def test_loading_stops_at_the_budget(make_engine: MakeEngine, tmp_path: Path) -> None:
    one = make_engine(kv_cache_bits=4)
    for seed in range(3):
        one.warm(random_ids(64, seed=seed))
    one.save(tmp_path / "cache")
    two = make_engine(kv_cache_bits=4, max_cache_bytes=5 * one.codec.bytes_for(16) + 3)
    report = two.load(tmp_path / "cache")
    assert (report.loaded, report.no_room) == (5, 7)
    check_bytes(two)
