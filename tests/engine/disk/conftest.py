"""Engines on one model and one folder, and disks that hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.disk import cache as disk_cache
from tests.engine.disk.on_disk import DEADLINE_S, REAL_CALLS, Hang
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model


@pytest.fixture(scope="module")
def model() -> Any:
    return long_model()


@pytest.fixture
def disk_engine(make_engine: MakeEngine, model: Any, tmp_path: Path) -> MakeEngine:
    """Engines on one model and one folder."""

    def make(**options: Any) -> KVBoost:
        options.setdefault("model", model)
        options.setdefault("disk_cache_dir", tmp_path / "disk")
        return make_engine(**options)

    return make


@pytest.fixture
def hang(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """Make calls of the slot file hang until the event is set, which the end of the test does."""
    del make_engine  # its engines are closed after the disk is released
    events: list[threading.Event] = []

    def start(*names: str) -> threading.Event:
        released = threading.Event()
        events.append(released)
        for name in names:

            def hanging(*arguments: Any, real: Any = REAL_CALLS[name]) -> Any:
                released.wait()
                return real(*arguments)

            monkeypatch.setattr(f"kvboost.disk.slot_file.os.{name}", hanging)
        return released

    yield start
    for event in events:
        event.set()


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(disk_cache, "_WAY_S", 0.2)
