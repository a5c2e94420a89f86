"""KV of one model, encoding or salt never serves another: zero hits, and the reason says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.identity import namespace
from kvboost.identity.namespace import Namespace, NamespaceTracker
from kvboost.parts.model_fit import encoding_of
from kvboost.store.manager import KVCacheManager
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids, tiny_model

SETTINGS = {"kv_cache_bits": 16, "overlap_k": 0, "sink_tokens": 0, "bit_exact": False}
TEXT = random_ids(40, seed=1)


def _stored_by(engine: KVBoost) -> KVCacheManager:
    engine.warm(TEXT)
    return engine.cache_manager


def _check(manager: KVCacheManager, other: Namespace, reason: str) -> None:
    match = manager.match_prefix(TEXT, other)
    assert match.length == 0
    assert match.miss_reason == reason


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_bits": 8},
        {"kv_cache_bits": "k8v4"},
        {"overlap_k": 16},
        {"sink_tokens": 4},
        {"bit_exact": True},
        {"bit_exact": True, "block": 64},
    ],
    ids=str,
)
def test_another_encoding(changes: dict[str, Any], make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.core.parts.fit._namespaces = NamespaceTracker(engine.model, SETTINGS)
    manager = _stored_by(engine)
    assert manager.match_prefix(TEXT, NamespaceTracker(engine.model, SETTINGS).current("")).length == 40
    _check(manager, NamespaceTracker(engine.model, {**SETTINGS, **changes}).current(""), "other namespace")


@pytest.mark.parametrize("what", ["weight", "dtype", "rope", "format", "attention"])
def test_another_model(what: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    manager = _stored_by(engine)
    other = tiny_model("llama")
    assert (
        manager.match_prefix(TEXT, NamespaceTracker(other, encoding_of(engine.settings)).current("")).length
        == 40
    )
    if what == "weight":
        with torch.no_grad():
            other.model.layers[2].self_attn.k_proj.weight[1, 1] += 1e-3
    elif what == "dtype":
        other = other.to(torch.bfloat16)
    elif what == "rope":
        scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        other = tiny_model("llama", rope_parameters=scaling)
    elif what == "format":
        monkeypatch.setattr(namespace, "FORMAT_VERSION", namespace.FORMAT_VERSION + 1)
    else:
        other.config._attn_implementation = "eager"
    _check(manager, NamespaceTracker(other, encoding_of(engine.settings)).current(""), "other namespace")


def test_another_salt_learns_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    manager = _stored_by(engine)
    _check(manager, engine.core.parts.fit._namespaces.current("someone else"), "never stored")
    stranger = NamespaceTracker(tiny_model("llama", seed=9), encoding_of(engine.settings)).current(
        "someone else"
    )
    _check(manager, stranger, "never stored")
