"""Hole 3: weights written through `.data`, which moves no counter, are noticed; packed copies follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fixture_types import MakeEngine
from tests.holes.stock import stock_answer
from tests.tiny_models import random_ids, tiny_model

PROMPT = random_ids(50, seed=3)


def average(weight: torch.Tensor) -> None:
    weight.data.mul_(0.6).add_(
        torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)), alpha=0.4
    )


def replace(weight: torch.Tensor) -> None:
    weight.data = weight.data * 1.5


WRITES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "data.mul_": lambda weight: weight.data.mul_(1.5),
    "data.copy_": lambda weight: weight.data.copy_(weight.data.flip(0) * 0.7),
    "data =": replace,
    "moving average": average,
    "foreach": lambda weight: torch._foreach_mul_([weight.data], 1.5),
    "detach": lambda weight: weight.detach().mul_(1.5),
    "numpy": lambda weight: weight.detach().numpy().__imul__(1.5),
}
PLACES = ["lm_head", "model.layers.0.self_attn.k_proj", "model.layers.2.mlp.down_proj", "model.norm"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WRITES)
def test_a_whole_tensor_is_noticed_by_the_next_request(way: str, place: str, make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model)
    for _ in range(2):
        engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache")
    WRITES[way](model.get_submodule(place).weight)
    answer = engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache")
    assert answer.token_ids == stock_answer(model, PROMPT)
    assert answer.cached_tokens == 0
    assert engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache").cached_tokens == 49


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_least_change_of_a_whole_tensor(dtype: torch.dtype, make_engine: MakeEngine) -> None:
    engine = make_engine(dtype=dtype)
    weight = engine.model.model.layers[1].mlp.up_proj.weight
    before = engine.namespace()
    weight.data.view(torch.int16 if dtype is torch.bfloat16 else torch.int32).add_(1)
    assert engine.namespace() != before


def test_a_row_of_lm_head_after_weights_changed(make_engine: MakeEngine) -> None:
    """A packed copy of it went stale, with nothing cached: 32 of 40 answers came from old weights."""
    model = tiny_model("llama")
    engine = make_engine(model=model, weights_check_seconds=None)
    prompts = [random_ids(20, seed=40 + number) for number in range(10)]
    for prompt in prompts:
        engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    favourite = stock_answer(model, prompts[0], 1)[0]
    model.lm_head.weight.data[favourite].neg_()
    assert engine.weights_changed() is True
    assert engine.weights_changed() is False
    for prompt in prompts:
        answer = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
        assert answer.token_ids == stock_answer(model, prompt, 4)


@pytest.mark.parametrize("place", ["lm_head.weight", "model.layers.1.self_attn.v_proj.weight"])
def test_one_value_is_noticed_within_the_stated_time(place: str, make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    seconds = 0.4
    engine = make_engine(model=model, weights_check_seconds=seconds)
    engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache")
    before = engine.namespace()
    weight = model.get_parameter(place)
    probed = engine.core.parts.fit._namespaces.watch._known.probe  # type: ignore[union-attr]
    place_of_value = next(index for index in range(weight.numel()) if not _is_probed(probed, weight, index))
    weight.data.view(-1)[place_of_value] += 1
    time.sleep(seconds * 1.1)
    assert engine.namespace() != before
    answer = engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache")
    assert answer.token_ids == stock_answer(model, PROMPT)
    assert answer.cached_tokens == 0


def _is_probed(probe: Any, weight: torch.Tensor, index: int) -> bool:
    """Whether this very value is among those that every request looks at."""
    flat = weight.data.view(-1)
    old = flat[index].clone()
    flat[index] += 1
    seen = bool(probe.differs())
    flat[index] = old
    return seen


def test_the_check_goes_on_while_requests_run(make_engine: MakeEngine) -> None:
    engine = make_engine(weights_check_seconds=0.4)
    stop = threading.Event()

    def ask() -> None:
        number = 0
        while not stop.is_set():
            engine.generate(random_ids(30, seed=number), max_new_tokens=4, mode="prefix_cache")
            number += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        time.sleep(0.2)
        before = engine.namespace()
        engine.model.lm_head.weight.data.view(-1)[12_345] += 1
        time.sleep(0.6)
        assert engine.namespace() != before
    finally:
        stop.set()
        thread.join()


def test_the_thread_ends_with_the_last_engine(make_engine: MakeEngine) -> None:
    from kvboost.identity import scrubber

    engine = make_engine(weights_check_seconds=5.0)
    watch = engine.core.parts.fit._namespaces.watch
    assert any(task.watched() is watch for task in scrubber.SCRUBBER._tasks)
    engine.close()
    for _ in range(100):
        if not any(task.watched() is watch for task in scrubber.SCRUBBER._tasks):
            break
        time.sleep(0.02)
    else:
        pytest.fail("it is still checked over")


def test_a_large_model_has_more_time() -> None:
    from kvboost.identity import scrubber

    assert scrubber.stated_seconds(60.0, 1 << 30) == 60.0
    assert scrubber.stated_seconds(60.0, 140 << 30) == 280.0


@pytest.mark.parametrize("seconds", [0, -1, True, "60"])
def test_a_time_that_is_none(seconds: Any, make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="weights_check_seconds"):
        make_engine(weights_check_seconds=seconds)
