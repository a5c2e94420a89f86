"""Hole 5: autocast, hooks, train flags, buffers: what changes numbers is noticed, or gates reuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fixture_types import MakeEngine
from tests.holes.stock import stock_answer
from tests.tiny_models import random_ids, tiny_model

PROMPT = random_ids(50, seed=5)


def steer(_module: Any, _args: Any, output: Any) -> Any:
    hidden = output[0] if isinstance(output, tuple) else output
    hidden = hidden + torch.linspace(-4, 4, hidden.shape[-1])
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


@contextmanager
def autocast(_model: Any) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def hook(model: Any) -> Iterator[None]:
    handle = model.model.layers[1].register_forward_hook(steer)
    yield
    handle.remove()


@contextmanager
def pre_hook(model: Any) -> Iterator[None]:
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda _module, args: (args[0] * -2.0,))
    yield
    handle.remove()


@contextmanager
def hook_for_all(_model: Any) -> Iterator[None]:
    def double(module: Any, _args: Any, output: Any) -> Any:
        return output * 2 if type(module) is torch.nn.Linear else output

    handle = torch.nn.modules.module.register_module_forward_hook(double)
    yield
    handle.remove()


@contextmanager
def replaced_forward(model: Any) -> Iterator[None]:
    module = model.model.layers[0].mlp
    own = module.forward
    module.forward = lambda hidden: own(hidden) * -2.0
    yield
    del module.forward


@contextmanager
def train_flag(model: Any) -> Iterator[None]:
    model.model.layers[2].self_attn.train()
    yield
    model.eval()


@contextmanager
def train(model: Any) -> Iterator[None]:
    model.train()
    yield
    model.eval()


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.linear else result


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


STATES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "autocast": (autocast, "gated: autocast is on"),
    "hook": (hook, "gated: model.layers.1 has a forward hook"),
    "pre-hook": (pre_hook, "gated: model.layers.1.mlp has a forward hook"),
    "hook for all modules": (hook_for_all, "gated: there is a forward hook for all modules"),
    "replaced forward": (replaced_forward, "gated: the forward of model.layers.0.mlp was replaced"),
    "train flag": (train_flag, "gated: model.layers.2.self_attn is in train mode"),
    "train": (train, "gated: LlamaForCausalLM is in train mode"),
    "function mode": (lambda _model: Doubling(), "gated: a torch mode changes what operators do"),
    "dispatch mode": (lambda _model: Watching(), "gated: a torch mode changes what operators do"),
}


@pytest.mark.parametrize("state", STATES)
def test_what_cannot_be_known_runs_plain_and_says_so(state: str, make_engine: MakeEngine) -> None:
    enter, reason = STATES[state]
    model = tiny_model("llama")
    engine = make_engine(model=model)
    engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache")
    stored = engine.cache_stats()["chunks"]
    with enter(model):
        expected = stock_answer(model, PROMPT)
        answer = engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache")
        assert answer.token_ids == expected
        assert [span.reason for span in answer.spans] == [reason]
        assert answer.cached_tokens == 0
        assert engine.explain(PROMPT).spans[0].reason == reason
        other = random_ids(40, seed=6)
        batch = engine.generate_batch([PROMPT, other], 6)
        assert [each.token_ids for each in batch] == [expected, stock_answer(model, other)]
        assert engine.score([PROMPT], [[5]])[0].spans[0].reason == reason
        assert reason in str(engine.warm(other).alignment_warning)
        prepared = engine.prepare(other)
        output = model.generate(**prepared, max_new_tokens=2, do_sample=False)
        assert engine.commit(prepared, output).stored == 0
        assert list(engine.stream(PROMPT, 6, mode="prefix_cache"))
    assert engine.cache_stats()["chunks"] == stored
    answer = engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache")
    assert answer.token_ids == stock_answer(model, PROMPT)
    assert answer.cached_tokens == 49


@pytest.mark.parametrize("state", ["autocast", "hook", "train flag", "replaced forward"])
def test_a_state_that_begins_while_an_answer_is_made(state: str, make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model)
    entered = STATES[state][0](model)

    def entering(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == len(PROMPT) + 1:
            entered.__enter__()
        return scores

    engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache", logits_processor=[entering])
    entered.__exit__(None, None, None)
    assert engine.cache_stats()["chunks"] == 0
    for _ in range(2):
        answer = engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache")
        assert answer.token_ids == stock_answer(model, PROMPT)


def test_dropout_is_in_no_stored_kv(make_engine: MakeEngine) -> None:
    model = tiny_model("llama", attention_dropout=0.5)
    engine = make_engine(model=model)
    model.model.layers[0].self_attn.train()
    engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
    model.eval()
    answer = engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
    assert answer.cached_tokens == 0
    assert answer.token_ids == stock_answer(model, PROMPT, 4)


BUFFER_WRITES: dict[str, Callable[[torch.nn.Module], object]] = {
    "in place": lambda rotary: rotary.inv_freq.mul_(0.5),
    "data": lambda rotary: rotary.inv_freq.data.mul_(0.5),
    "replaced": lambda rotary: rotary.register_buffer("inv_freq", rotary.inv_freq * 0.5, persistent=False),
}


@pytest.mark.parametrize("way", BUFFER_WRITES)
def test_a_changed_buffer_is_another_model(way: str, make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model)
    for _ in range(2):
        engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache")
    BUFFER_WRITES[way](model.model.rotary_emb)
    answer = engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache")
    assert answer.cached_tokens == 0
    assert answer.token_ids == stock_answer(model, PROMPT)


def test_settings_for_numbers_are_part_of_the_model(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = engine.namespace()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert engine.namespace().key != before.key
    finally:
        torch.set_float32_matmul_precision(precision)
    assert engine.namespace() == before


def test_a_field_of_the_config_is_part_of_the_model(make_engine: MakeEngine) -> None:
    engine = make_engine("mistral")
    before = engine.namespace()
    engine.model.config.sliding_window = 20
    assert engine.namespace().key != before.key
    engine.model.config.sliding_window = 40
    assert engine.namespace() == before


def test_frequencies_that_a_forward_sets_are_no_change(make_engine: MakeEngine) -> None:
    engine = make_engine("dynamic")
    prompt = random_ids(40, seed=7)
    engine.generate(prompt, max_new_tokens=4)
    engine.generate(random_ids(120, seed=8), max_new_tokens=4)  # beyond the original range: other frequencies
    assert engine.generate(prompt, max_new_tokens=4).cached_tokens == 39


def test_a_buffer_that_the_model_itself_counts_in_is_no_change(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0]
    layer.register_buffer("seen_tokens", torch.zeros(4))
    own = type(layer).forward

    def counting(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "seen_tokens" in self._buffers:
            self.seen_tokens += hidden.shape[1]
        return own(self, hidden, *args, **kwargs)

    type(layer).forward = counting
    try:
        engine = make_engine(model=model)
        engine.generate(PROMPT, max_new_tokens=4)
        assert engine.generate(PROMPT, max_new_tokens=4).cached_tokens == 49
    finally:
        type(layer).forward = own


def test_hooks_of_transformers_are_known(make_engine: MakeEngine) -> None:
    """Asking for hidden states leaves hooks behind that change nothing."""
    engine = make_engine()
    engine.model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True, output_attentions=False)
    engine.generate(PROMPT, max_new_tokens=4)
    assert engine.generate(PROMPT, max_new_tokens=4).cached_tokens == 49
