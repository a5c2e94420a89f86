"""Engines that share a store in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.parts import engine_parts
from kvboost.remote import cache
from tests.fixture_types import MakeEngine
from tests.unit.remote.memory_store import MemoryStore

Sharing = Callable[..., KVBoost]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """What every engine of the test gets for a shared store."""
    made = MemoryStore()
    monkeypatch.setattr(engine_parts, "open_store", lambda _address: made)
    return made


@pytest.fixture
def sharing(store: MemoryStore, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Sharing:
    """Engines with that store. They wait for it for a while: tiny models compute sooner than it answers."""
    assert not store.is_closed
    monkeypatch.setattr(cache, "_LEAST_S", 2.0)

    def make(*arguments: Any, **options: Any) -> KVBoost:
        return make_engine(*arguments, remote_cache="redis://in-memory", **options)

    return make
