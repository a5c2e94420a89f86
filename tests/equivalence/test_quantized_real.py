"""Quantized KV on the built-in model: bytes of real chunks, what a budget holds, and the error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.suite.quant import MAX_BYTES, MAX_KL, QuantSettings, _cases, _errors, _trial
from kvboost import KVBoost, dequantize_kv, quantize_kv
from kvboost.kv.rope import learn_rotation
from tests.texts import corpus_ids

pytestmark = [pytest.mark.real_model]
LOSSY = (8, "k8v4", 4)


def engine_of(real: KVBoost, **options: Any) -> KVBoost:
    return KVBoost(real.model, real.tokenizer, **{"max_chunks": None, **options})


@pytest.mark.parametrize("bits", LOSSY)
def test_real_chunks_take_as_few_bytes_as_promised(real: KVBoost, bits: Any) -> None:
    text = corpus_ids(real.tokenizer, 512, seed=71)
    with engine_of(real, kv_cache_bits=bits) as engine:
        engine.warm(text)
        engine.cache_manager.check_integrity()  # the books say what the tensors take
        found = engine.cache_manager.match_prefix(text, engine.namespace())
        assert len(found.matches) == 4
        for match in found.matches:
            numbers = sum(tensor.numel() for pair in match.chunk.past_key_values for tensor in pair)
            assert match.chunk.memory_bytes() <= MAX_BYTES[bits] * 2 * numbers
            kv = tuple((key.half(), value.half()) for key, value in match.chunk.past_key_values)
            plain = sum(tensor.nbytes for pair in kv for tensor in pair)
            assert quantize_kv(kv, bits).memory_bytes() <= MAX_BYTES[bits] * plain


@pytest.mark.parametrize(("bits", "times"), [(8, 1.75), (4, 3.2)])
def test_a_budget_holds_more_chunks(real: KVBoost, bits: Any, times: float) -> None:
    """Against float16: what ten chunks of float16 would take holds so many times more."""
    chunk_bytes = real.layout.bytes_per_token // 2 * real.chunk_size
    text = corpus_ids(real.tokenizer, 40 * real.chunk_size, seed=72)
    with engine_of(real, kv_cache_bits=bits, max_cache_bytes=10 * chunk_bytes) as engine:
        for start in range(0, len(text), 2_560):
            engine.warm(text[start : start + 2_560])
        stats = engine.cache_stats()
        assert stats["bytes"] <= stats["max_bytes"] == 10 * chunk_bytes
        assert stats["chunks"] >= int(10 * times)


def test_the_error_stays_within_its_limits(real: KVBoost) -> None:
    """A sample; `kvboost bench quant` has the full count."""
    settings = QuantSettings(prompts=3, least=500, most=1_200)
    rotation = learn_rotation(real.model, real.layout)
    errors = _errors([_trial(real, case, settings, rotation) for case in _cases(real, settings)])
    assert errors["8"]["kl_mean"] <= MAX_KL[8]
    assert errors["8"]["agreement"] >= 0.98  # of 96 tokens
    assert errors["k8v4"]["kl_mean"] <= MAX_KL["k8v4"]
    assert errors["4"]["kl_mean"] <= 0.4 * errors["4, a step per token"]["kl_mean"]


@pytest.mark.parametrize("bits", LOSSY)
def test_a_warm_answer_over_quantized_kv(real: KVBoost, bits: Any) -> None:
    text = corpus_ids(real.tokenizer, 700, seed=73)
    with engine_of(real, kv_cache_bits=bits) as engine:
        expected = engine.generate(text, max_new_tokens=8, mode="baseline")
        engine.warm(text[:600])
        engine.core.parts.workspace.drop()  # what is left in the arena was never quantized
        result = engine.generate(text, max_new_tokens=8)
        assert result.cached_tokens == 600
        assert {span.reason for span in result.spans[:-1]} == {"exact prefix, quantized"}
        assert sum(a == b for a, b in zip(result.token_ids, expected.token_ids, strict=True)) >= 6


def test_the_public_functions_on_real_kv(real: KVBoost) -> None:
    text = corpus_ids(real.tokenizer, 200, seed=74)
    real.warm(text)
    chunk = real.cache_manager.match_prefix(text, real.namespace()).matches[0].chunk
    limits = {8: 0.01, "k8v4": 0.12, 4: 0.12}
    for bits, limit in limits.items():
        back = dequantize_kv(quantize_kv(chunk.past_key_values, bits))  # type: ignore[arg-type]
        for pair, wanted in zip(back, chunk.past_key_values, strict=True):
            for got, original in zip(pair, wanted, strict=True):
                assert (got - original).norm() <= limit * original.norm()
                assert got.dtype is torch.float32
