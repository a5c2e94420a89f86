"""KV kept in 8 or 4 bits, through the engine: labelled, within its budget, saved, refused where it must."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import CachedChunk, KVBoost, KVCacheManager, chained_hash
from kvboost.choices import AssemblyMode, KVBits, Origin
from kvboost.errors import CacheFileError, InvalidRequestError
from kvboost.identity.namespace import Namespace
from kvboost.kv.arena import Arena
from kvboost.kv.codec import KVCodec, StoredKV
from kvboost.kv.layout import KVLayout, Packed
from kvboost.models import PastKVType
from kvboost.reuse.plan import CHAIN_REASON, LOSSY_REASON, QUANTIZED_REASON
from kvboost.store.prefix_tree import below
from tests.engine.test_approximate_reuse import (
    APPROXIMATE,
    Chat,
    approximate_tokens,
    chain_tokens,
    check_spans,
    check_store,
    documents,
    fresh_kv,
    joined,
    long_model,
    overlap_reference,
    pay_always,
    shelf_engine,
)
from tests.tiny_models import random_ids, tiny_model

MakeEngine = Callable[..., KVBoost]
LOSSY: tuple[KVBits, ...] = (8, 4, "k8v4")
ALL: tuple[KVBits, ...] = (16, *LOSSY)
# Relative error of stored KV against a full prefill; one encoding gives about 0.005 and 0.07.
TOLERANCE: dict[KVBits, float] = {16: 1e-4, 8: 0.012, 4: 0.2, "k8v4": 0.2}
BAD_TOKEN = 299  # neither random_ids nor the self-test at load uses it


def broken_model(number: float = float("nan")) -> Any:
    """A model whose KV is not finite from the first `BAD_TOKEN` on."""
    model = long_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD_TOKEN] = number
    return model


def relative_error(part: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((part.double() - wanted.double()).norm() / wanted.double().norm())


def token_errors(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Per token, of `[1, kv_heads, tokens, head_dim]`."""
    gap, size = ((t.transpose(1, 2).flatten(2)).norm(dim=-1) for t in (part - wanted, wanted))
    return gap / size


def tree_errors(engine: KVBoost, namespace: Namespace | None = None) -> list[tuple[float, float]]:
    """Per layer, the largest error of stored keys and values against a full prefill of their text."""
    store = engine.cache_manager._store
    root = store.roots.get((namespace or engine.namespace()).key)
    worst = [(0.0, 0.0)] * len(engine.layout.layers)
    for leaf in (node for node in (below(root) if root is not None else []) if not node.children):
        path = [leaf]
        while path[-1].parent is not None and not path[-1].parent.is_root:
            path.append(path[-1].parent)
        ids = joined([store.entries[node.key].chunk.token_ids for node in reversed(path)])
        full = fresh_kv(engine.model, ids)
        for node in path:
            pairs = zip(worst, store.entries[node.key].chunk.past_key_values, full, strict=True)
            worst = [
                (
                    max(before[0], relative_error(key, wanted[0][:, :, node.start : node.end])),
                    max(before[1], relative_error(value, wanted[1][:, :, node.start : node.end])),
                )
                for before, (key, value), wanted in pairs
            ]
    return worst


def check_tree(engine: KVBoost, namespace: Namespace | None = None, factor: float = 1.0) -> None:
    """All that is stored as exact is what a full prefill gives, as far as the bits allow."""
    assert max(map(max, tree_errors(engine, namespace))) <= factor * TOLERANCE[engine.codec.bits]


def check_bytes(engine: KVBoost) -> None:
    """Reported bytes are those of the tensors, and those that the codec promised."""
    check_store(engine)
    entries = engine.cache_manager._store.entries.values()
    true_bytes = sum(part.untyped_storage().nbytes() for e in entries for part in e.chunk.kv.tensors)
    assert engine.cache_stats()["bytes"] == true_bytes
    for entry in entries:
        kv = entry.chunk.kv
        assert entry.size_bytes == kv.nbytes == engine.codec.bytes_for(kv.tokens)
        assert kv.codec.bits == engine.codec.bits
        own = entry.chunk.composite
        assert kv.tokens == (entry.chunk.length if own is None else len(own.own_positions))


def check_labels(engine: KVBoost, spans: Sequence[Any]) -> None:
    """Exact spans say that they are quantized, where they are."""
    reason = QUANTIZED_REASON if engine.codec.is_lossy else ""
    assert {span.reason for span in spans if span.origin is Origin.EXACT} <= {reason}
    assert all(span.reason != QUANTIZED_REASON for span in spans if span.origin is not Origin.EXACT)


def tensors_of(engine: KVBoost) -> dict[str, Packed]:
    return {key: entry.chunk.kv.tensors for key, entry in engine.cache_manager._store.entries.items()}


def placed(engine: KVBoost, ids: Sequence[int], mode: AssemblyMode = AssemblyMode.CHUNK_REUSE) -> PastKVType:
    """What the store alone gives for `ids`, as far as it reaches from the start."""
    plan = engine.assembler.plan(np.array(ids), engine.namespace(), len(ids), mode=mode)
    arena = Arena(engine.layout, len(ids))
    engine.assembler.place(plan, arena)
    return arena.as_past_key_values()


# --- options --------------------------------------------------------------------------------------


def test_the_default_is_16_bits(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.codec.bits == 16
    assert not engine.codec.is_lossy


@pytest.mark.parametrize(
    "bits", [3, 2, 1, 0, -8, 32, True, False, "8", "16", "k8v8", "k4v8", "K8V4", "", [8], (8,), 8.5, b"k8v4"]
)
def test_other_widths_are_refused(bits: Any, make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="kv_cache_bits must be 16, 8, 4"):
        make_engine(kv_cache_bits=bits)


@pytest.mark.parametrize("bits", [8.0, 4.0, np.int64(8), np.float32(4)], ids=repr)
def test_a_number_equal_to_a_width_is_that_width_or_refused(
    bits: Any, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Never a namespace of its own for the same encoding, nor a cache that cannot be saved."""
    model = tiny_model("llama")
    wanted = make_engine(model=model, kv_cache_bits=int(bits))
    try:
        engine = make_engine(model=model, kv_cache_bits=bits)
    except InvalidRequestError:
        return
    assert engine.namespace().family == wanted.namespace().family
    engine.warm(random_ids(20, seed=1))
    engine.save(tmp_path / "cache")
    assert wanted.load(tmp_path / "cache").loaded == 2


@pytest.mark.parametrize("bits", LOSSY)
def test_bit_exact_needs_16_bits(bits: KVBits, make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match=r"bit_exact.*kv_cache_bits to 16"):
        make_engine(kv_cache_bits=bits, bit_exact=True)
    for allowed in (16, None):
        make_engine(kv_cache_bits=allowed, bit_exact=True)


def test_every_width_has_its_namespace(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engines = {bits: make_engine(model=model, kv_cache_bits=bits) for bits in (*ALL, None)}
    families = {bits: engine.namespace().family for bits, engine in engines.items()}
    assert families[None] == families[16]
    assert len({families[bits] for bits in ALL}) == 4
    assert len({engine.namespace("salt").key for engine in engines.values()}) == 4
    text = random_ids(40, seed=1)
    engines[8].warm(text)
    for bits in (16, 4, "k8v4"):
        found = engines[8].cache_manager.match_prefix(text, engines[bits].namespace())
        assert (found.length, found.miss_reason) == (0, "other namespace")


def test_a_cache_of_another_width_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config._name_or_path = "some/model"
    for bits in ALL:
        engine = make_engine(model=model, kv_cache_bits=bits)
        engine.warm(random_ids(40, seed=1))
        engine.save(tmp_path / str(bits))
        assert json.loads((tmp_path / str(bits) / "cache.json").read_text())["kv_cache_bits"] == bits
    for bits in ALL:
        for saved in ALL:
            engine = make_engine(model=model, kv_cache_bits=bits)
            if saved == bits:
                assert engine.load(tmp_path / str(saved)).loaded == 3
                continue
            with pytest.raises(CacheFileError, match=r"some/model.*encoding"):
                engine.load(tmp_path / str(saved))
            assert engine.cache_stats()["chunks"] == 0
    assert make_engine(model=model, kv_cache_bits=None).load(tmp_path / "16").loaded == 3


# --- exact prefixes -------------------------------------------------------------------------------


def test_baseline_does_not_know_of_bits(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    prompts = [random_ids(length, seed=length) for length in (1, 17, 60)]
    wanted: list[list[int]] = []
    for bits in ALL:
        engine = make_engine(model=model, kv_cache_bits=bits)
        for prompt in prompts:
            engine.warm(prompt)
        before = engine.cache_stats()
        results = [engine.generate(prompt, max_new_tokens=8, mode="baseline") for prompt in prompts]
        assert engine.cache_stats() == before
        wanted = wanted or [result.token_ids for result in results]
        assert [result.token_ids for result in results] == wanted
        assert all([(s.origin, s.reason) for s in r.spans] == [(Origin.LIVE, "baseline")] for r in results)


@pytest.mark.parametrize("mode", ["prefix_cache", "chunk_kv_reuse"])
@pytest.mark.parametrize("bits", ALL)
def test_prefix_hits_are_exact_and_say_how(bits: KVBits, mode: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_bits=bits)
    text = random_ids(40, seed=1)
    engine.warm(text)
    prompt = [*text, *random_ids(4, seed=2)]
    explanation = engine.explain(prompt)
    result = engine.generate(prompt, max_new_tokens=4, mode=mode)
    check_spans(result)
    reason = "" if bits == 16 else "exact prefix, quantized"
    wanted = [(0, 16, reason), (16, 32, reason), (32, 40, reason)]
    for spans in (result.spans, explanation.spans):
        assert [(s.start, s.end, s.reason) for s in spans if s.origin is Origin.EXACT] == wanted
        assert [(s.start, s.end) for s in spans if s.origin is Origin.LIVE] == [(40, 44)]
    assert ("exact prefix, quantized" in str(explanation)) is (bits != 16)
    assert ("exact prefix, quantized" in json.dumps(explanation.to_dict())) is (bits != 16)
    assert engine.cache_stats()["hits"] == {"exact": 1, "approximate": 0}
    check_bytes(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", LOSSY)
def test_models_of_every_type(bits: KVBits, dtype: torch.dtype, make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_bits=bits, dtype=dtype)
    text = random_ids(75, seed=1)
    engine.warm(text)
    engine.core.parts.workspace.drop()
    result = engine.generate([*text, *random_ids(5, seed=2)], max_new_tokens=4)
    assert result.cached_tokens == 75
    check_bytes(engine)
    check_tree(engine, factor=1.0 if dtype is torch.float32 else 3.0)
    for key, value in placed(engine, text):
        assert key.dtype is value.dtype is dtype


@pytest.mark.parametrize("architecture", ["qwen3", "gemma", "gemma3", "smollm3"])
@pytest.mark.parametrize("bits", LOSSY)
def test_architectures(bits: KVBits, architecture: str, make_engine: MakeEngine) -> None:
    """Odd head sizes, one head, sliding windows, layers without rotation."""
    engine = make_engine(architecture, kv_cache_bits=bits)
    ids = random_ids(70, seed=1)
    for turn in range(3):
        engine.core.parts.workspace.drop()
        result = engine.generate(ids, max_new_tokens=4, mode="prefix_cache")
        check_spans(result)
        check_labels(engine, result.spans)
        assert turn == 0 or result.cached_tokens >= len(ids) - 6
        ids = [*ids, *result.token_ids, *random_ids(5, seed=turn)]
    check_bytes(engine)
    check_tree(engine)


@pytest.mark.parametrize("bits", LOSSY)
def test_every_cut_of_a_stored_text_is_placed_right(bits: KVBits, make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_bits=bits)
    text = random_ids(53, seed=1)
    engine.warm(text)
    whole = placed(engine, text)
    assert (
        max(
            relative_error(a, b)
            for p, q in zip(whole, fresh_kv(engine.model, text), strict=True)
            for a, b in zip(p, q, strict=True)
        )
        <= TOLERANCE[bits]
    )
    for length in range(1, 54):
        prompt = [*text[:length], 298]
        for pair, full in zip(placed(engine, prompt), whole, strict=True):
            for part, wanted in zip(pair, full, strict=True):
                assert part.shape[2] == length
                torch.testing.assert_close(part, wanted[:, :, :length], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", LOSSY)
def test_an_assembled_prompt_holds_the_decoded_chunks(bits: KVBits, make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_bits=bits)
    text = random_ids(40, seed=1)
    engine.warm(text)
    assembled = engine.assembler.assemble([*text, 7, 8], engine.namespace())
    assert assembled.cached_length == 40
    assert assembled.cached_past_kv is not None
    matches = engine.cache_manager.match_prefix(text, engine.namespace()).matches
    for layer, pair in enumerate(assembled.cached_past_kv):
        for side, part in enumerate(pair):
            wanted = torch.cat([match.chunk.past_key_values[layer][side] for match in matches], dim=2)
            torch.testing.assert_close(part, wanted, rtol=1e-5, atol=1e-5)


def test_8_bits_hardly_change_what_the_model_says(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), kv_cache_bits=8)
    for seed in range(5):
        text = random_ids(100 + seed, seed=seed)
        engine.warm(text)
        past = placed(engine, text)
        arena = Arena(engine.layout, 120)
        for slab, part in zip(arena.slabs, engine.layout.pack(past), strict=True):
            slab[0, :, : len(text)] = part
        arena.set_length(len(text))
        tail = random_ids(8, seed=50 + seed)
        with torch.no_grad():
            found = engine.model(torch.tensor([tail]), past_key_values=arena).logits[0].double()
            wanted = engine.model(torch.tensor([[*text, *tail]])).logits[0, -8:].double()
        kl = (wanted.softmax(-1) * (wanted.log_softmax(-1) - found.log_softmax(-1))).sum(-1)
        assert float(kl.mean()) <= 1e-3


# --- books ----------------------------------------------------------------------------------------


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
        store = self.engine.cache_manager._store
        alive = sum(
            part.untyped_storage().nbytes()
            for e in list(store.entries.values())
            for part in e.chunk.kv.tensors
        )
        assert store.tier.max_bytes is not None
        assert alive + extra <= store.tier.max_bytes
        assert store.tier.used_bytes <= store.tier.max_bytes
        self.most = max(self.most, alive + extra)


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
    shard = next((tmp_path / "cache").glob("*.safetensors"))
    whole = shard.read_bytes()
    draw = random.Random(0)
    for trial in range(14):
        damaged = bytearray(whole)
        if trial % 7 == 0:
            damaged = damaged[: draw.randrange(len(whole))]
        else:
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
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


# --- KV that cannot be held -----------------------------------------------------------------------


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


# --- approximate reuse ----------------------------------------------------------------------------


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
    plan = engine.assembler.plan(ids, engine.namespace(), len(ids), mode=AssemblyMode.CHUNK_REUSE)
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


# --- other options --------------------------------------------------------------------------------


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
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
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
        except BaseException as error:  # shown in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for engine in engines:
        check_bytes(engine)
        check_tree(engine, factor=2.0)
    assert engines[-1].cache_stats()["evicted_chunks"] > 0


def test_threads_with_approximate_reuse_and_text_that_is_refused(make_engine: MakeEngine) -> None:
    model = broken_model()
    budget = 60 * make_engine(model=model, kv_cache_bits=8).codec.bytes_for(16)
    shelf = documents(6, seed=46, low=60, high=110)
    engine = shelf_engine(make_engine, shelf, model=model, kv_cache_bits=8, max_cache_bytes=budget)
    errors: list[BaseException] = []
    approximate: list[int] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        try:
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
        except BaseException as error:  # shown in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
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
