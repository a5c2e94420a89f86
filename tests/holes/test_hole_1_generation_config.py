"""Hole 1: what a model's own generation config says never reaches the arena as wrong KV."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.errors import InvalidRequestError
from tests.checked_requests import read_request
from tests.fixture_types import MakeEngine
from tests.holes.stock import stock_answer
from tests.tiny_models import random_ids, tiny_model

PROMPT = random_ids(50, seed=1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_use_cache_false(name: str, make_engine: MakeEngine) -> None:
    model = tiny_model(name)
    model.generation_config.use_cache = False
    engine = make_engine(model=model)
    for ids in (PROMPT, [*PROMPT, 7, 8], PROMPT[:40]):
        answer = engine.generate(ids, max_new_tokens=6, mode="prefix_cache")
        assert answer.token_ids == stock_answer(model, ids)
    assert engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache").cached_tokens == 49
    assert [each.token_ids for each in engine.generate_batch([PROMPT, PROMPT[:30]], 6)] == [
        stock_answer(model, PROMPT),
        stock_answer(model, PROMPT[:30]),
    ]
    assert model.generation_config.use_cache is False


@pytest.mark.parametrize(
    "field",
    [
        {"return_dict_in_generate": True},
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
        {"return_dict_in_generate": True, "output_hidden_states": True},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"num_return_sequences": 2, "num_beams": 2},
        {"prefill_chunk_size": 16},
        {"max_length": 60},
        {"min_new_tokens": 2},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["prefix_cache", "baseline"])
def test_other_fields_of_the_models_own_config(
    field: dict[str, Any], mode: str, make_engine: MakeEngine
) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model)
    asked = {name: value for name, value in field.items() if name in ("repetition_penalty", "min_new_tokens")}
    if "num_beams" in field:
        asked = {"num_beams": 2}
    expected = stock_answer(model, PROMPT, **asked)
    own = {name: getattr(model.generation_config, name) for name in field}
    for name, value in field.items():
        setattr(model.generation_config, name, value)
    before = model.generation_config.to_dict()
    for _ in range(2):
        assert engine.generate(PROMPT, max_new_tokens=6, mode=mode).token_ids == expected
    assert model.generation_config.to_dict() == before
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    assert engine.generate([*PROMPT, 9], max_new_tokens=6, mode=mode).token_ids == stock_answer(
        model, [*PROMPT, 9]
    )


def test_an_offloaded_cache_is_not_needed_with_ours(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    expected = stock_answer(model, PROMPT)
    model.generation_config.cache_implementation = "offloaded"  # which wants a GPU
    engine = make_engine(model=model)
    for _ in range(2):
        assert engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache").token_ids == expected


def test_a_quantized_cache_is_the_models_own_business(make_engine: MakeEngine) -> None:
    """Its KV is not what the model computed: nothing of ours may stand in for it."""
    model = tiny_model("llama")
    engine = make_engine(model=model)
    model.generation_config.cache_implementation = "quantized"
    request = read_request(engine, PROMPT, 4)
    assert request.options.why_plain == "gated: the generation config asks for a quantized cache"
    assert engine.core.parts.why_alone(request) == request.options.why_plain


@pytest.mark.parametrize("mode", ["prefix_cache", "baseline"])
def test_token_healing_is_refused_with_what_to_change(mode: str, make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model)
    model.generation_config.token_healing = True
    with pytest.raises(InvalidRequestError, match=r"generation_config\.token_healing"):
        engine.generate(PROMPT, max_new_tokens=4, mode=mode)


def test_a_greedy_request_stays_greedy_where_the_model_samples(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    expected = stock_answer(model, PROMPT)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 3.0
    model.generation_config.top_k = 20
    engine = make_engine(model=model)
    for mode in ("baseline", "prefix_cache", "prefix_cache"):
        assert engine.generate(PROMPT, max_new_tokens=6, mode=mode).token_ids == expected
