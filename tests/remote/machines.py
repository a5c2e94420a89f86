"""What tests ask of engines that share a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvboost import KVBoost


def remote_of(engine: KVBoost) -> Any:
    return engine.core.parts.remote


def written(engine: KVBoost) -> dict[str, Any]:
    """The store's counters, once all is written."""
    assert remote_of(engine).flush(30.0)
    return counts(engine)


def counts(engine: KVBoost) -> dict[str, Any]:
    found: dict[str, Any] = engine.cache_stats()["remote"]
    return found


def same_as_baseline(engine: KVBoost, prompt: Any, new_tokens: int = 4, **options: Any) -> Any:
    """An exact answer, compared with what the model says without any reuse."""
    result = engine.generate(prompt, max_new_tokens=new_tokens, mode="prefix_cache", **options)
    expected = engine.generate(prompt, max_new_tokens=new_tokens, mode="baseline")
    assert result.token_ids == expected.token_ids
    return result


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> float:
    """Wait until something holds; how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, "it does not happen"
        time.sleep(0.02)
    return time.monotonic() - started
