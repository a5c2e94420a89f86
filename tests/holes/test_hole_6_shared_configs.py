"""Hole 6: models that share a config or modules run one at a time; other threads never meet our kernels."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.identity.namespace import NamespaceTracker
from kvboost.parts.model_fit import encoding_of
from tests.fixture_types import MakeEngine
from tests.holes.stock import stock_answer
from tests.threads import at_once
from tests.tiny_models import random_ids, tiny_model


def asking(engine: KVBoost, seed: int, rounds: int = 12) -> Callable[[], None]:
    """Batches and single prompts, each compared with what the model answered before the threads began."""
    prompts = [random_ids(20 + 3 * number, seed=seed + number) for number in range(rounds)]
    expected = [stock_answer(engine.model, prompt, 4) for prompt in prompts]

    def ask() -> None:
        for prompt, answer in zip(prompts, expected, strict=True):
            assert engine.generate(prompt, max_new_tokens=4, mode="prefix_cache").token_ids == answer
            found = engine.generate_batch([prompt, prompt[:-2]], 4)[0]
            assert found.token_ids == answer

    return ask


KINDS = [("llama", "sdpa"), ("mistral", "sdpa"), ("llama", "eager"), ("gemma2", "eager")]


@pytest.mark.parametrize(("architecture", "implementation"), KINDS)
def test_two_models_that_share_a_config(
    architecture: str, implementation: str, make_engine: MakeEngine
) -> None:
    first = tiny_model(architecture, attn_implementation=implementation)
    second = type(first)(first.config).eval()
    assert second.config is first.config
    for parameter in second.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)
    engines = [make_engine(model=model) for model in (first, second)]
    at_once(*(asking(engine, 100 * number) for number, engine in enumerate(engines)))
    assert first.config._attn_implementation == implementation
    from kvboost.locks import model_lock

    assert model_lock(first)._parts == model_lock(second)._parts


def test_an_adapted_model_and_the_one_inside(make_engine: MakeEngine) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama")
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    adapted.config.architectures = ["LlamaForCausalLM"]
    engines = [make_engine(model=adapted), make_engine(model=model)]
    at_once(*(asking(engine, 100 * number) for number, engine in enumerate(engines)))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("architecture", "implementation"), KINDS)
def test_a_users_own_thread_calls_the_model_meanwhile(
    architecture: str, implementation: str, make_engine: MakeEngine
) -> None:
    """Its numbers are the stock ones to the last bit, whatever the engine does at the time."""
    engine = make_engine(model=tiny_model(architecture, attn_implementation=implementation))
    ids = torch.tensor([random_ids(30, seed=1)])
    with torch.no_grad():
        expected = engine.model(input_ids=ids).logits

    def forward() -> None:
        for _ in range(150):
            with torch.no_grad():
                assert torch.equal(engine.model(input_ids=ids).logits, expected)

    at_once(forward, asking(engine, 7))


def test_a_users_own_thread_generates_meanwhile(make_engine: MakeEngine) -> None:
    """Neither its options nor ours reach the other."""
    engine = make_engine()
    prompt = random_ids(25, seed=3)
    expected = stock_answer(engine.model, prompt, 9)

    def generate() -> None:
        for _ in range(15):
            assert stock_answer(engine.model, prompt, 9) == expected

    at_once(generate, asking(engine, 7))
    assert engine.model.generation_config.max_new_tokens is None


def test_the_digest_is_the_same_while_a_request_runs(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = engine.namespace()
    found = []

    def read() -> None:
        found.append(NamespaceTracker(engine.model, encoding_of(engine.settings)).current(""))

    def noting(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return scores

    engine.generate(random_ids(30, seed=1), max_new_tokens=3, logits_processor=[noting])
    assert found == [expected] * 3


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_made_in_mid_request_is_a_stock_model(
    way: Callable[[Any], Any], make_engine: MakeEngine
) -> None:
    engine = make_engine()
    copies: list[Any] = []

    def copying(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        copies.append(way(engine.model))
        return scores

    prompt = random_ids(30, seed=2)
    engine.generate(prompt, max_new_tokens=1, logits_processor=[copying])
    twin = copies[0]
    assert twin.config._attn_implementation == "sdpa"
    before = stock_answer(twin, prompt)
    assert before == stock_answer(engine.model, prompt)
    engine.model.lm_head.weight.data.neg_()  # a copy must not look at the original's weights
    assert stock_answer(twin, prompt) == before
    twin.lm_head.weight.data.mul_(-1)
    assert stock_answer(twin, prompt) == stock_answer(engine.model, prompt)
    other = make_engine(model=twin)
    other.generate(prompt, max_new_tokens=4)
    assert other.generate(prompt, max_new_tokens=4).cached_tokens == 29
