"""Making the parts of an engine: forwards under the model's lock, and nothing left behind where it fails."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.errors import InvalidRequestError
from kvboost.identity import scrubber
from kvboost.locks import model_lock
from kvboost.reuse import costs
from tests.fixture_types import MakeEngine
from tests.tiny_models import tiny_model


def test_whatever_runs_the_model_holds_its_lock(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a forward is measured on a GPU; a request of another engine must not run meanwhile."""
    held = []

    def measured(model: Any) -> float:
        with ThreadPoolExecutor(1) as another:
            held.append(another.submit(lambda: model_lock(model).is_held).result())
        return 16.0

    monkeypatch.setattr(costs, "forward_overhead_tokens", measured)
    make_engine()
    assert held == [True]


def test_an_engine_that_cannot_be_made_is_not_watched(tokenizer: Any, tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # what is left over must not depend on it
    try:
        before = len(scrubber.SCRUBBER._tasks)
        with pytest.raises(InvalidRequestError, match="disk_cache_bytes"):
            KVBoost(tiny_model("llama"), tokenizer, disk_cache_dir=tmp_path, disk_cache_bytes=1)
        assert len(scrubber.SCRUBBER._tasks) == before
    finally:
        gc.enable()
