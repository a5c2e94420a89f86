"""A forward scope: its backend computes attention inside, in this context alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvboost.kernels import scope
from kvboost.kernels.scope import AttentionCall, forward_scope, heeded, model_attention

IDS = torch.arange(12).unsqueeze(0)


class Counting:
    """The model's own attention, counted."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return model_attention(call)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_the_backend_computes_every_layer_and_the_models_own_is_at_hand(make_llama: Any, own: str) -> None:
    model, backend = make_llama(attn_implementation=own), Counting()
    stock = _logits(model)
    with forward_scope(model, backend):
        assert model.config._attn_implementation != own
        inside = _logits(model)
    assert [call.module for call in backend.calls] == [layer.self_attn for layer in model.model.layers]
    assert torch.equal(inside, stock)
    assert model.config._attn_implementation == own
    _logits(model)
    assert len(backend.calls) == len(model.model.layers)


def test_the_innermost_scope_holds(make_llama: Any) -> None:
    model, outer, inner = make_llama(), Counting(), Counting()
    layers = len(model.model.layers)
    with forward_scope(model, outer):
        with forward_scope(model, inner):
            _logits(model)
        assert (len(outer.calls), len(inner.calls)) == (0, layers)
        _logits(model)
    assert (len(outer.calls), len(inner.calls)) == (layers, layers)
    assert model.config._attn_implementation == "sdpa"


def test_other_threads_meet_the_models_own_attention(make_llama: Any) -> None:
    model, backend = make_llama(), Counting()
    stock, found = _logits(model), []
    thread = threading.Thread(target=lambda: found.append(_logits(model)))
    with forward_scope(model, backend):
        thread.start()
        thread.join()
    assert not backend.calls
    assert torch.equal(found[0], stock)


def test_a_model_is_restored_after_an_error(make_llama: Any) -> None:
    model = make_llama()
    with pytest.raises(RuntimeError, match="inside"), forward_scope(model, Counting()):
        raise RuntimeError("inside")
    assert model.config._attn_implementation == "sdpa"


def test_an_implementation_chosen_inside_stays(make_llama: Any) -> None:
    model = make_llama()
    with forward_scope(model, Counting()):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("extra", "plain"),
    [
        ({}, True),
        ({"use_cache": True, "sliding_window": 4}, True),
        ({"softcap": None, "s_aux": None}, True),
        ({"softcap": 30.0}, False),
        ({"use_cache": True, "something_new": 3}, False),
        ({"dropout": 0.1}, False),
    ],
)
def test_what_is_a_plain_call(extra: dict[str, Any], plain: bool) -> None:
    query, key = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1, 16)
    call = AttentionCall.from_transformers(torch.nn.Module(), query, key, key, None, **extra)
    assert call.is_plain is plain
    assert (call.group, call.scale) == (2, 0.25)


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("how", ["left out", "refused", "heeded"])
def test_what_the_models_own_attention_leaves_out_is_left_out(
    make_llama: Any, monkeypatch: pytest.MonkeyPatch, own: str, how: str
) -> None:
    def sdpa(_module: Any, query: Any, key: Any, _value: Any, _mask: Any, **extra: Any) -> tuple[Any, None]:
        if how == "refused" and extra.get("softcap") is not None:
            raise ValueError("no softcap")
        return query @ key.mT * (extra.get("softcap", 1.0) if how == "heeded" else 1.0), None

    monkeypatch.setattr(scope, "attention_function", lambda name: sdpa if name == "sdpa" else None)
    scope._is_left_out.cache_clear()
    states = torch.zeros(1, 2, 1, 16)
    call = AttentionCall.from_transformers(torch.nn.Module(), states, states, states, None, softcap=30.0)
    with forward_scope(make_llama(attn_implementation=own), Counting()):
        assert heeded(call, "softcap") == (None if (own, how) == ("sdpa", "left out") else 30.0)
        assert heeded(call, "s_aux") is None
    scope._is_left_out.cache_clear()
