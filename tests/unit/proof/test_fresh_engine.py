"""A second engine on the same model: nothing that it answers comes from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost import KVBoost
from kvboost.proof.fresh_engine import fresh_engine
from tests.tiny_models import tiny_model, tiny_tokenizer


def test_it_has_a_cache_of_its_own(tmp_path: Path) -> None:
    """What it is asked must be computed: neither a folder nor a shared store answers."""
    pytest.importorskip("redis", reason="a shared store in Redis needs redis-py")
    places = {"disk_cache_dir": tmp_path / "kv", "remote_cache": "redis://127.0.0.1:1"}
    with KVBoost(tiny_model("llama"), tiny_tokenizer(), chunk_size=16, max_chunks=3, **places) as engine:
        assert engine.core.parts.remote is not None
        assert engine.core.parts.disk is not None
        other = fresh_engine(engine)
        assert other.core.parts.remote is None
        assert other.core.parts.disk is None
        assert other.settings.max_chunks is None
        assert other.settings.chunk_size == 16
        other.close()
