"""Exact reuse equals the model's own generate, on tiny models of every supported architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost.choices import Origin
from kvboost.kv.rope import GATED_REASON
from tests.equivalence.capture import generate_with_logits
from tests.fixture_types import MakeEngine
from tests.tiny_models import ARCHITECTURES, LENGTH_DEPENDENT, ROPE_RANGE, VOCAB, random_ids, tiny_model

pytestmark = pytest.mark.exactness


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefix_hit_equals_baseline(architecture: str, make_engine: MakeEngine) -> None:
    engine = make_engine(architecture)
    shared = random_ids(150, seed=1)
    engine.warm(shared)
    for cut, tail in ((1, 5), (15, 1), (16, 3), (17, 60), (100, 70), (149, 20), (150, 9)):
        prompt = shared[:cut] + random_ids(tail, seed=cut, low=100)
        expected, expected_logits = generate_with_logits(engine, prompt, mode="baseline", max_new_tokens=24)
        result, logits = generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=24)
        assert result.cached_tokens >= cut, (cut, result.spans)
        assert result.token_ids == expected.token_ids
        assert (logits - expected_logits).abs().max() <= 1e-3
        again = engine.generate(prompt, mode="prefix_cache", max_new_tokens=24)
        assert again.cached_tokens == len(prompt) - 1
        assert again.token_ids == expected.token_ids


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bit_exact_in_bfloat16(architecture: str, make_engine: MakeEngine) -> None:
    engine = make_engine(architecture, dtype=torch.bfloat16, bit_exact=True)
    shared = random_ids(100, seed=2)
    engine.warm(shared)
    for cut, tail in ((20, 30), (64, 16), (100, 45)):
        prompt = shared[:cut] + random_ids(tail, seed=cut, low=100)
        expected, expected_logits = generate_with_logits(engine, prompt, mode="baseline", max_new_tokens=16)
        result, logits = generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=16)
        assert result.cached_tokens == cut - cut % 16
        assert torch.equal(logits, expected_logits)
        assert result.token_ids == expected.token_ids


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi", "qwen2_sliding"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 7},
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True, "seed": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"prompt_lookup_num_tokens": 4},
        {"min_new_tokens": 24, "bad_words_ids": [[30], [31]]},
    ],
    ids=lambda options: "+".join(options),
)
def test_generation_options(architecture: str, options: dict[str, Any], make_engine: MakeEngine) -> None:
    engine = make_engine(architecture)
    shared = random_ids(90, seed=3)
    engine.warm(shared)
    prompt = shared[:77] + random_ids(12, seed=4)
    expected = engine.generate(prompt, mode="baseline", max_new_tokens=24, **options)
    result = engine.generate(prompt, mode="prefix_cache", max_new_tokens=24, **options)
    assert result.cached_tokens >= 77
    assert result.token_ids == expected.token_ids
    assert result.finish_reason == expected.finish_reason
    # what such a request stored must be exact as well
    follow_up = prompt + random_ids(9, seed=5)
    assert (
        engine.generate(follow_up, mode="prefix_cache", max_new_tokens=16).token_ids
        == engine.generate(follow_up, mode="baseline", max_new_tokens=16).token_ids
    )


def test_assistant_model(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    assistant = tiny_model("llama", seed=5, num_hidden_layers=1)
    prompt = random_ids(60, seed=6)
    engine.warm(prompt[:50])
    expected = engine.generate(prompt, mode="baseline", max_new_tokens=20)
    result = engine.generate(prompt, mode="prefix_cache", max_new_tokens=20, assistant_model=assistant)
    assert result.token_ids == expected.token_ids
    answer = prompt + result.token_ids + random_ids(4, seed=7)
    assert (
        engine.generate(answer, mode="prefix_cache", max_new_tokens=16).token_ids
        == engine.generate(answer, mode="baseline", max_new_tokens=16).token_ids
    )


def test_stop_strings_and_streamer(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    prompt = "a long enough story about nothing " * 3
    engine.warm(prompt[:60])
    letters = set(engine.tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"])
    only_letters: dict[str, Any] = {
        "suppress_tokens": [token for token in range(VOCAB) if token not in letters],
        "no_repeat_ngram_size": 2,
    }
    plain = engine.generate(prompt, mode="baseline", max_new_tokens=30, **only_letters)
    stop = plain.output_text[8:10]
    only_letters["stop_strings"] = [stop]
    expected = engine.generate(prompt, mode="baseline", max_new_tokens=30, **only_letters)
    result = engine.generate(prompt, mode="prefix_cache", max_new_tokens=30, **only_letters)
    assert result.cached_tokens >= 60
    assert result.token_ids == expected.token_ids
    assert result.finish_reason == "stop"
    assert len(result.token_ids) < 30
    assert result.output_text.endswith(stop)
    stream = engine.stream(prompt, mode="prefix_cache", max_new_tokens=30, **only_letters)
    assert "".join(stream) == result.output_text
    assert stream.result.token_ids == result.token_ids


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_rope_that_changes_with_length_is_gated(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind)
    shared = random_ids(ROPE_RANGE + 60, seed=8)
    inside = shared[:60]
    engine.warm(inside[:48])
    expected = engine.generate(inside, mode="baseline", max_new_tokens=16)
    result = engine.generate(inside, mode="prefix_cache", max_new_tokens=16)
    assert result.cached_tokens == 48
    assert result.token_ids == expected.token_ids
    stored = len(engine.cache_manager)
    for length in (ROPE_RANGE - 8, ROPE_RANGE, ROPE_RANGE + 1, ROPE_RANGE + 60):
        prompt = shared[:length]
        expected = engine.generate(prompt, mode="baseline", max_new_tokens=16)
        result = engine.generate(prompt, mode="prefix_cache", max_new_tokens=16)
        assert result.token_ids == expected.token_ids
        assert [(span.origin, span.reason) for span in result.spans] == [(Origin.LIVE, GATED_REASON)]
    assert len(engine.cache_manager) == stored
    assert (
        engine.generate(inside, mode="prefix_cache", max_new_tokens=16).token_ids
        == engine.generate(inside, mode="baseline", max_new_tokens=16).token_ids
    )


def test_blocked_prefill_equals_baseline(make_engine: MakeEngine) -> None:
    engine = make_engine("gemma3", prefill_block=24)
    prompt = random_ids(200, seed=9)
    expected = engine.generate(prompt, mode="baseline", max_new_tokens=16)
    assert engine.generate(prompt, mode="prefix_cache", max_new_tokens=16).token_ids == expected.token_ids


def test_baseline_is_the_models_own_generate(make_engine: MakeEngine) -> None:
    model = tiny_model("mistral")
    prompt = torch.tensor([random_ids(70, seed=10)])
    own = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    engine = make_engine(model=model)
    result = engine.generate(prompt[0].tolist(), mode="baseline", max_new_tokens=20)
    assert result.token_ids == own[0, 70:].tolist()
    assert len(engine.cache_manager) == 0
