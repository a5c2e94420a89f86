"""A batch chooses tokens by the options that were read, whatever the model's own generation config says."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from kvboost.run.options import GenerationOptions
from kvboost.run.sampling import SequenceSampler, why_alone
from tests.tiny_models import tiny_model, tiny_tokenizer

PROMPT = np.array([10, 20, 30, 40, 50])
ODD: list[dict[str, Any]] = [
    {"return_dict_in_generate": True},
    {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    {"return_dict_in_generate": True, "output_hidden_states": True},
    {"cache_implementation": "static"},
    {"cache_implementation": "quantized"},
    {"cache_implementation": "dynamic"},
    {"cache_implementation": "offloaded"},
    {"use_cache": False},
    {"token_healing": True},
    {"prefill_chunk_size": 2},
    {"max_length": 6},
    {"repetition_penalty": 9.0},
    {"do_sample": True, "temperature": 5.0},
    {"num_beams": 3},
    {"prompt_lookup_num_tokens": 3},
    {"assistant_early_exit": 1},
    {"use_mtp": True},
    {"dola_layers": "low"},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"min_new_tokens": 3},
    {"stop_strings": ["a"]},
    {"max_time": 0.0},
    {"something_else": 5},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def neutral(**changes: Any) -> GenerationConfig:
    """Greedy, with nothing asked for."""
    config = GenerationConfig(
        max_new_tokens=4, pad_token_id=2, eos_token_id=2, bos_token_id=1, max_length=None
    )
    said = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "use_cache": True}
    for name, value in {**said, "repetition_penalty": 1.0, **changes}.items():
        setattr(config, name, value)
    return config


def sampler_of(model: Any, tokenizer: Any, config: GenerationConfig, **call_options: Any) -> SequenceSampler:
    return SequenceSampler(model, tokenizer, PROMPT, GenerationOptions(config, 4, None, call_options))


def made(sampler: SequenceSampler) -> tuple[list[type], list[type], int, frozenset[int]]:
    processors, criteria = (
        [type(each) for each in found] for found in (sampler._processors, sampler._criteria)
    )
    return processors, criteria, sampler._max_length, sampler._ends


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_the_models_own_generation_config_adds_nothing(tokenizer: Any, odd: dict[str, Any]) -> None:
    model = tiny_model("llama")
    expected = made(sampler_of(model, tokenizer, neutral()))
    for name, value in odd.items():
        setattr(model.generation_config, name, value)
    own, before = model.generation_config, copy.deepcopy(vars(model.generation_config))
    attributes, layers = set(vars(model)), model.config.num_hidden_layers
    sampler = sampler_of(model, tokenizer, neutral())
    assert made(sampler) == expected
    logits = torch.randn(320, generator=torch.Generator().manual_seed(1))
    assert sampler.choose(logits) == int(logits.argmax())
    assert model.generation_config is own
    assert vars(own) == before
    assert set(vars(model)) == attributes
    assert model.config.num_hidden_layers == layers


@pytest.mark.parametrize(
    "odd",
    [
        each
        for each in ODD
        if set(each) & {"cache_implementation", "use_cache", "token_healing", "prefill_chunk_size"}
    ]
    + ODD[:3],
    ids=str,
)
def test_options_that_say_how_to_run_do_not_matter_in_a_batch(tokenizer: Any, odd: dict[str, Any]) -> None:
    """Even in the request's own config: a sequence has its own cache, and returns nothing but ids."""
    model = tiny_model("llama")
    expected = made(sampler_of(model, tokenizer, neutral()))
    config = neutral(**odd)
    before = copy.deepcopy(vars(config))
    assert made(sampler_of(model, tokenizer, config)) == expected
    assert vars(config) == before


def test_what_was_asked_for_is_there(tokenizer: Any) -> None:
    model = tiny_model("llama")
    config = neutral(repetition_penalty=1.5, stop_strings=["a", "b"], min_new_tokens=2, max_time=60.0)
    processors, criteria, _, ends = made(sampler_of(model, tokenizer, config))
    assert {each.__name__ for each in processors} >= {"RepetitionPenaltyLogitsProcessor"}
    assert {each.__name__ for each in criteria} == {"StopStringCriteria", "MaxTimeCriteria"}
    assert ends == {2}


def test_a_sequence_of_a_model_with_an_adapter(tokenizer: Any) -> None:
    """Adapters hand their generation config on to the model inside: there is nothing of ours to hand on."""
    peft = pytest.importorskip("peft")
    inner = tiny_model("llama")
    model = peft.get_peft_model(inner, peft.LoraConfig(target_modules=["q_proj"], r=2)).eval()
    own = inner.generation_config
    config = neutral(repetition_penalty=1.5)
    assert made(sampler_of(model, tokenizer, config)) == made(sampler_of(inner, tokenizer, config))
    assert inner.generation_config is own
    assert model.generation_config.repetition_penalty in (None, 1.0)


# --- which decoding may run in batches -------------------------------------------------------


def reason(config: GenerationConfig, **call_options: Any) -> str:
    return why_alone(GenerationOptions(config, 4, None, call_options))


def test_greedy_decoding_and_sampling_run_in_batches() -> None:
    assert reason(neutral()) == ""
    assert reason(neutral(do_sample=True, temperature=0.7)) == ""


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt_lookup_num_tokens": 3},
        {"prompt_lookup_num_tokens": 0},
        {"assistant_early_exit": 1},
        {"assistant_early_exit": 0},
    ],
    ids=str,
)
def test_speculation_runs_alone(asked: dict[str, Any]) -> None:
    assert reason(neutral(**asked)) == "assisted generation"
    assert reason(neutral(do_sample=True, **asked)) == "assisted generation"


@pytest.mark.skipif(not hasattr(GenerationConfig(), "use_mtp"), reason="transformers 5.22 and later")
def test_prediction_of_many_tokens_runs_alone() -> None:
    assert reason(neutral(use_mtp=True)) == "assisted generation"
    assert reason(neutral(use_mtp=False)) == ""


def test_an_assistant_runs_alone() -> None:
    assert reason(neutral(), assistant_model=object()) == "assisted generation"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"num_beams": 2, "do_sample": True}, "beam sample"),
        ({"dola_layers": "low"}, "dola generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"guidance_scale": 1.5}, "guidance"),
        ({"guidance_scale": 0.0}, "guidance"),
    ],
    ids=str,
)
def test_other_decoding_runs_alone(asked: dict[str, Any], said: str) -> None:
    assert reason(neutral(**asked)) == said
