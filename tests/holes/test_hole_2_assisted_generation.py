"""Hole 2: whatever makes transformers choose assisted generation, no prompt is fed twice."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.errors import InvalidRequestError
from tests.fixture_types import MakeEngine
from tests.holes.stock import stock_answer
from tests.tiny_models import random_ids, tiny_model

PROMPT = random_ids(50, seed=2)


@pytest.mark.parametrize("place", ["option", "generation config"])
@pytest.mark.parametrize("field", [{"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_assisted(field: dict[str, Any], place: str, make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model)
    expected = {cut: stock_answer(model, PROMPT[:cut]) for cut in (50, 49, 30)}
    options = field if place == "option" else {}
    if place == "generation config":
        for name, value in field.items():
            setattr(model.generation_config, name, value)
        try:
            stock_answer(model, PROMPT)
        except ValueError as error:
            pytest.skip(f"the model's own generate fails with it: {error}")
        finally:
            model.config.num_hidden_layers = 3  # an early exit that fails leaves fewer behind
    for cut in (50, 49, 50, 30):
        answer = engine.generate(PROMPT[:cut], max_new_tokens=6, mode="prefix_cache", **options)
        assert answer.token_ids == expected[cut]
    for name in field:
        setattr(model.generation_config, name, None)
    for cut in (50, 49, 30):
        assert engine.generate(PROMPT[:cut], max_new_tokens=6, mode="prefix_cache").token_ids == expected[cut]
    many = engine.generate_many([PROMPT, PROMPT[:49]], 6, **options)
    assert [each.token_ids for each in many] == [expected[50], expected[49]]
    assert model.config.num_hidden_layers == 3


def test_early_exit_runs_plain_and_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(PROMPT)
    answer = engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache", assistant_early_exit=1)
    assert answer.cached_tokens == 0
    assert [span.reason for span in answer.spans] == ["gated: the model assists itself"]
    assert engine.cache_stats()["misses"] == {"gated": 1}


def test_an_assistant_model(make_engine: MakeEngine) -> None:
    model, assistant = tiny_model("llama"), tiny_model("llama", seed=1)
    engine = make_engine(model=model)
    for ids in (PROMPT, [*PROMPT, 5], PROMPT):
        answer = engine.generate(ids, max_new_tokens=6, mode="prefix_cache", assistant_model=assistant)
        assert answer.token_ids == stock_answer(model, ids)
    assert engine.generate(PROMPT, max_new_tokens=6).token_ids == stock_answer(model, PROMPT)


@pytest.mark.parametrize(
    "options",
    [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "high"}, {"num_beams": 2, "num_beam_groups": 2}],
)
def test_decoding_that_transformers_no_longer_has(options: dict[str, Any], make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match=r"no longer part of transformers|do not fit together"):
        make_engine().generate(PROMPT, max_new_tokens=4, **options)
