"""Servers on tiny models, each on a port of its own, and clients for them."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvboost import KVBoost
from tests.fixture_types import MakeEngine
from tests.forwards import on_forward
from tests.threads import one_torch_thread
from tests.tiny_models import tiny_model

if TYPE_CHECKING:
    from tests.server.running import Running

NEEDS_NO_HTTP = {"test_worker.py", "test_text.py", "test_sampling.py"}
MISSING = [
    name
    for name in ("fastapi", "uvicorn", "prometheus_client", "httpx", "openai", "schemathesis")
    if importlib.util.find_spec(name) is None
]


def pytest_ignore_collect(collection_path: Any) -> bool | None:
    """Without the extra `server` and the clients, only what needs neither is tested."""
    name = collection_path.name
    return True if MISSING and name.startswith("test_") and name not in NEEDS_NO_HTTP else None


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Starts servers over engines; they end with the test, and nobody may be left in them."""
    from tests.server.running import running

    with contextlib.ExitStack() as servers:
        yield lambda engine, **settings: servers.enter_context(running(engine, **settings))


@pytest.fixture
def make_slow_engine(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """Engines that need a while for every step, and never end an answer by themselves."""
    engines: list[KVBoost] = []

    def make(step_s: float = 0.02, **options: Any) -> KVBoost:
        model = tiny_model("llama")
        model.generation_config.eos_token_id = None
        engine = KVBoost(model, tokenizer, chunk_size=16, max_chunks=None, **options)
        on_forward(monkeypatch, model, lambda *_: time.sleep(step_s))
        engines.append(engine)
        return engine

    with one_torch_thread():
        yield make
    for engine in engines:
        engine.cache_manager.check_integrity()
        engine.close()
