"""What a model's state costs to read on a GPU, and that writes there are noticed."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "data.mul_": lambda weight: weight.data.mul_(1.5),
    "data.copy_": lambda weight: weight.data.copy_(weight.data.flip(0) * 0.7),
    "data =": lambda weight: setattr(weight, "data", weight.data * 1.5),
    "foreach": lambda weight: torch._foreach_mul_([weight.data], 1.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", ["lm_head", "model.layers.1.self_attn.k_proj", "model.norm"])
@pytest.mark.parametrize("way", WRITES)
def test_a_write_to_a_whole_tensor(way: str, place: str, dtype: torch.dtype, make_engine: MakeEngine) -> None:
    engine = make_engine(device="cuda", dtype=dtype)
    prompt = random_ids(50, seed=1)
    for _ in range(2):
        engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    WRITES[way](engine.model.get_submodule(place).weight)
    answer = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    assert answer.cached_tokens == 0
    expected = engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids
    assert dtype is torch.bfloat16 or answer.token_ids == expected


def test_the_least_change_of_a_whole_tensor(make_engine: MakeEngine) -> None:
    engine = make_engine(device="cuda", dtype=torch.bfloat16)
    before = engine.namespace()
    engine.model.model.layers[1].mlp.up_proj.weight.data.view(torch.int16).add_(1)
    assert engine.namespace() != before


def test_one_value_is_noticed_within_the_stated_time(make_engine: MakeEngine) -> None:
    engine = make_engine(device="cuda", weights_check_seconds=0.6)
    engine.generate(random_ids(50, seed=2), max_new_tokens=4)
    before = engine.namespace()
    engine.model.lm_head.weight.data.view(-1)[4_321] += 1
    time.sleep(0.7)
    assert engine.namespace() != before


def test_weights_changed(make_engine: MakeEngine) -> None:
    engine = make_engine(device="cuda", weights_check_seconds=None)
    engine.model.lm_head.weight.data.view(-1)[4_321] += 1
    assert engine.weights_changed() is True
    assert engine.weights_changed() is False


def test_a_model_that_moved_away(make_engine: MakeEngine) -> None:
    """Nothing holds its memory on the GPU, and the probe does not read where it lay."""
    engine = make_engine(device="cuda")
    engine.generate(random_ids(50, seed=3), max_new_tokens=4)
    engine.model.to("cpu")
    torch.cuda.empty_cache()
    answer = engine.generate(random_ids(50, seed=3), max_new_tokens=4, mode="prefix_cache")
    assert "not those that the engine was made for" in answer.spans[0].reason
    engine.model.to("cuda")
    for _ in range(2):
        answer = engine.generate(random_ids(50, seed=3), max_new_tokens=4, mode="prefix_cache")
    assert answer.cached_tokens == 49


def test_autocast(make_engine: MakeEngine) -> None:
    engine = make_engine(device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        answer = engine.generate(random_ids(50, seed=4), max_new_tokens=4, mode="prefix_cache")
    assert answer.spans[0].reason == "gated: autocast is on"
    assert engine.cache_stats()["chunks"] == 0


def test_checking_over_weights_larger_than_a_slice_finds_no_change(make_engine: MakeEngine) -> None:
    model = tiny_model("llama", hidden_size=1024, intermediate_size=3000, num_attention_heads=16)
    engine = make_engine(model=model, device="cuda", weights_check_seconds=0.4)
    prompt = random_ids(50, seed=5)
    engine.generate(prompt, max_new_tokens=4)
    before = engine.namespace()
    time.sleep(1.2)
    assert engine.namespace() == before
    assert engine.generate(prompt, max_new_tokens=4).cached_tokens == 49
    assert engine.cache_stats()["refused"] == {}
    engine.model.model.layers[2].mlp.down_proj.weight.data.view(-1)[2_000_001] += 1
    time.sleep(0.5)
    assert engine.namespace() != before
