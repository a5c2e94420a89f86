"""The option kv_cache_bits, exact prefixes in few bits, and their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvboost.choices import KVBits, Origin
from kvboost.errors import CacheFileError, InvalidRequestError
from kvboost.kv.arena import Arena
from tests.engine.quantized.quantized_checks import (
    ALL,
    LOSSY,
    TOLERANCE,
    check_bytes,
    check_labels,
    check_tree,
    placed,
    relative_error,
)
from tests.engine.reuse_checks import check_spans, fresh_kv
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids, tiny_model


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
