"""What a model's rope settings mean for reuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from kvboost.kv.rope import exact_range_tokens, max_positions, reset_dynamic_frequencies, rope_parameter_sets

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def model_with(**settings: Any) -> Any:
    """Something that has a config, which is all that the questions about ranges need."""
    return SimpleNamespace(config=LlamaConfig(max_position_embeddings=64, **settings))


def stand_in(**fields: Any) -> Any:
    config = SimpleNamespace(**fields)
    config.get_text_config = lambda **_: config
    return SimpleNamespace(config=config)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_fixed_frequencies_stay_exact_at_any_length(scaling: dict[str, Any] | None) -> None:
    model = model_with(rope_scaling=scaling)
    assert exact_range_tokens(model) is None
    assert max_positions(model) == 64


def test_dynamic_rope_is_exact_strictly_inside_its_original_range() -> None:
    model = model_with(rope_scaling=DYNAMIC)
    assert exact_range_tokens(model) == 63
    assert max_positions(model) == 4 * 64


def test_longrope_is_exact_up_to_its_original_range() -> None:
    parameters = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    assert exact_range_tokens(stand_in(rope_parameters=parameters, max_position_embeddings=64)) == 16
    older = stand_in(
        rope_scaling={"type": "longrope"},
        original_max_position_embeddings=16,
        max_position_embeddings=64,
    )
    assert exact_range_tokens(older) == 16
    assert max_positions(older) == 64


def test_the_oldest_name_of_longrope_is_known() -> None:
    model = stand_in(rope_scaling={"type": "su"}, max_position_embeddings=64)
    assert exact_range_tokens(model) == 64


def test_of_several_sets_the_narrowest_counts() -> None:
    sets = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default"},
    }
    model = stand_in(rope_parameters=sets, max_position_embeddings=64)
    assert rope_parameter_sets(model) == list(sets.values())
    assert exact_range_tokens(model) == 31
    assert max_positions(model) == 128


def test_a_config_that_says_nothing_limits_nothing() -> None:
    model = stand_in()
    assert exact_range_tokens(model) is None
    assert max_positions(model) is None


def test_parameter_sets_are_copies() -> None:
    model = model_with(rope_scaling=DYNAMIC)
    rope_parameter_sets(model)[0]["factor"] = 100.0
    assert max_positions(model) == 4 * 64


def test_dynamic_frequencies_are_put_back(make_llama: Any) -> None:
    model = make_llama(max_position_embeddings=16, rope_scaling=DYNAMIC)
    long, short = torch.arange(50).unsqueeze(0), torch.arange(16).unsqueeze(0)
    rotary = model.model.rotary_emb
    fresh = rotary.inv_freq.clone()
    with torch.no_grad():
        before = model(input_ids=short).logits
        model(input_ids=long)
        assert not torch.equal(rotary.inv_freq, fresh), "a long text changes the frequencies"
        reset_dynamic_frequencies(model)
        assert torch.equal(rotary.inv_freq, fresh)
        assert torch.equal(model(input_ids=short).logits, before)


def test_a_reset_gives_every_long_prompt_the_answer_of_a_fresh_model(make_llama: Any) -> None:
    """transformers keeps the frequencies of the longest text; after a reset they start anew."""
    model = make_llama(max_position_embeddings=16, rope_scaling=DYNAMIC)
    longer, long = torch.arange(60).unsqueeze(0), torch.arange(30).unsqueeze(0)
    with torch.no_grad():
        fresh = model(input_ids=long).logits
        model(input_ids=longer)
        assert not torch.equal(model(input_ids=long).logits, fresh)
        for _ in range(2):
            reset_dynamic_frequencies(model)
            assert torch.equal(model(input_ids=long).logits, fresh)


def test_other_ropes_are_left_alone(make_llama: Any) -> None:
    model = make_llama()
    before = model.model.rotary_emb.inv_freq.clone()
    reset_dynamic_frequencies(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
