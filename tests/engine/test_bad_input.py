"""Bad input gets an error that names the value and the limit, and leaves the cache as it was."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from kvboost import KVBoost
from kvboost.errors import InvalidRequestError, UnsupportedModelError
from tests.fixture_types import MakeEngine
from tests.tiny_models import BASE, POSITIONS, VOCAB, random_ids, tiny_model


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, ["empty"]),
        ([], {}, ["empty"]),
        ([[1, 2]], {}, ["flat list"]),
        ([1.5, 2.5], {}, ["integer"]),
        ([5, VOCAB], {}, [str(VOCAB), str(VOCAB - 1)]),
        ([5, -3], {}, ["-3"]),
        ([{"role": "user"}], {}, ["message 0", "content"]),
        ([{"role": "user", "content": 5}], {}, ["message 0"]),
        ("hello", {"max_new_tokens": 0}, ["max_new_tokens", "0"]),
        ("hello", {"max_new_tokens": -5}, ["max_new_tokens", "-5"]),
        ("hello", {"do_sample": True, "temperature": 0.0}, ["temperature", "0.0"]),
        ("hello", {"do_sample": True, "temperature": -1}, ["temperature", "-1"]),
        ("hello", {"max_new_tokens": POSITIONS}, [str(POSITIONS), str(POSITIONS + 5)]),
        ("hello", {"mode": "telepathy"}, ["mode", "telepathy", "prefix_cache"]),
        ("hello", {"magic": 3}, ["magic"]),
        ("hello", {"num_return_sequences": 2}, ["num_return_sequences", "2"]),
        ("hello", {"past_key_values": None}, ["past_key_values"]),
        ("hello", {"max_length": 20}, ["max_length", "max_new_tokens"]),
        ("hello", {"use_cache": False}, ["use_cache", "baseline"]),
        ("hello", {"seed": -1}, ["seed", "-1"]),
        ("hello", {"top_p": 7.0, "do_sample": True}, ["top_p", "7.0"]),
        ("hello", {"repetition_penalty": 0.0}, ["repetition_penalty", "0.0"]),
        ("hello", {"num_beams": 0}, ["num_beams", "0"]),
    ],
)
def test_bad_requests(
    prompt: Any, options: dict[str, Any], words: list[str], make_engine: MakeEngine, monkeypatch: Any
) -> None:
    engine = make_engine()
    engine.warm(random_ids(40, seed=1))
    before = engine.cache_stats()
    monkeypatch.setattr(engine.model, "forward", lambda *_args, **_kwargs: pytest.fail("work was done"))
    for call in (engine.generate, engine.stream):
        with pytest.raises(InvalidRequestError) as caught:
            call(prompt, **options)
        for word in words:
            assert word in str(caught.value)
    assert engine.cache_stats() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_size": 0}, ["chunk_size", "0"]),
        ({"chunk_size": -4}, ["chunk_size", "-4"]),
        ({"max_chunks": -1}, ["max_chunks", "-1"]),
        ({"max_cache_bytes": -1}, ["max_cache_bytes", "-1"]),
        ({"recompute_strategy": "prayer"}, ["recompute_strategy", "prayer", "cacheblend"]),
        ({"recompute_ratio": 1.5}, ["recompute_ratio", "1.5"]),
        ({"recompute_overlap": -1}, ["recompute_overlap", "-1"]),
        ({"kv_cache_bits": 3}, ["kv_cache_bits", "3"]),
        ({"cache_device": "moon"}, ["cache_device", "moon"]),
        ({"prefill_block": 0}, ["prefill_block", "0"]),
        ({"pack_weights": "yes"}, ["pack_weights", "yes"]),
        ({"chunk_boundary_window": 16}, ["chunk_boundary_window", "16"]),
        ({"bit_exact": True, "chunk_boundary_window": 4}, ["bit_exact", "chunk_boundary_window"]),
    ],
)
def test_bad_settings(options: dict[str, Any], words: list[str], make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_engine(**options)
    for word in words:
        assert word in str(caught.value)


def test_unknown_option_of_from_pretrained_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="'chunksize'"):
        KVBoost.from_pretrained("builtin", chunksize=3)


def test_gpt2_is_refused_with_the_reason(tokenizer: Any) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="GPT2LMHeadModel uses learned absolute positions"):
        KVBoost(model, tokenizer)
    with pytest.warns(UserWarning, match="learned absolute positions"):
        engine = KVBoost(model, tokenizer, strict=False, chunk_size=8)
    prompt = random_ids(40, seed=2)
    engine.warm(prompt[:30])
    result = engine.generate(prompt, max_new_tokens=8, mode="prefix_cache")
    assert result.cached_tokens == 30
    assert result.token_ids == engine.generate(prompt, max_new_tokens=8, mode="baseline").token_ids


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"model_type": "opt", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 32}, "RoPE"),
        ({"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 2}, "ALiBi"),
    ],
)  # fmt: skip
def test_models_without_rope_are_refused(settings: dict[str, Any], word: str, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    with pytest.raises(ValueError, match=word):
        KVBoost(model, tokenizer)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 32, "state_size": 8}, "state-space"),
        ({**BASE, "model_type": "gemma3n_text", "num_kv_shared_layers": 1}, "shares KV"),
        ({**BASE, "model_type": "llama4_text", "attention_chunk_size": 32}, "chunked attention"),
    ],
)
def test_models_without_reusable_kv_are_refused_even_if_not_strict(
    settings: dict[str, Any], word: str, tokenizer: Any
) -> None:
    model = tiny_model("llama")
    model.config = AutoConfig.for_model(**settings)
    for strict in (True, False):
        with pytest.warns(UserWarning, match=word) if not strict else pytest.raises(ValueError, match=word):
            if strict:
                KVBoost(model, tokenizer, strict=True)
            else:
                with pytest.raises(UnsupportedModelError, match=word):
                    KVBoost(model, tokenizer, strict=False)


def test_a_model_that_ignores_its_cache_is_refused(tokenizer: Any) -> None:
    model = tiny_model("llama")
    forward = model.model.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        kwargs["position_ids"] = None
        if kwargs.get("input_ids") is not None and kwargs["input_ids"].shape[1] < 9:
            kwargs["past_key_values"] = None
        return forward(*args, **kwargs)

    model.model.forward = forgetful
    with pytest.raises(UnsupportedModelError):
        KVBoost(model, tokenizer)
