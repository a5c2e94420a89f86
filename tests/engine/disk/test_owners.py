"""Whose chunks are on disk: other models, encodings and weights leave them alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from kvboost.disk.tier import SLOTS
from tests.engine.disk.on_disk import answer, answers_as_baseline, flush, go_cold, tier_of
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids


def contents_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob(SLOTS)
    }


def test_another_model_or_encoding_leaves_the_first_one_alone(
    disk_engine: MakeEngine, model: Any, tmp_path: Path
) -> None:
    text = random_ids(64, seed=1)
    with disk_engine() as one:
        one.warm(text)
    before = contents_of(tmp_path / "disk")
    changed = long_model()
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1e-3
    others: list[dict[str, Any]] = [
        {"model": long_model(seed=1)},
        {"model": long_model(dtype=torch.bfloat16)},
        {"model": changed},
        {"kv_cache_bits": 8},
        {"kv_cache_bits": 4},
        {"overlap_k": 8},
        {"sink_tokens": 4},
        {"bit_exact": True},
        {"chunk_size": 32},
        {"chunk_boundary_window": 15},
    ]
    for options in others:
        with disk_engine(**options) as other:
            assert other.explain([*text, 7]).cached_tokens == 0
            assert answer(other, [*text, 7]).cached_tokens == 0
            assert other.cache_stats()["stored_chunks"] > 0
        after = contents_of(tmp_path / "disk")
        assert before.items() <= after.items()
    assert len(after) == len(others) + 1
    again = disk_engine(model=model)
    assert answers_as_baseline(again, [*text, 7]).cached_tokens == 64


def test_a_weight_that_changes_under_the_engine(disk_engine: MakeEngine) -> None:
    changing = long_model()
    text = random_ids(64, seed=1)
    with disk_engine(model=changing) as engine:
        engine.warm(text)
        go_cold(engine)
        with torch.no_grad():
            changing.lm_head.weight[0, 0] += 1.0
        assert engine.explain([*text, 7]).spans[0].reason == "other namespace"
        assert answers_as_baseline(engine, [*text, 7]).cached_tokens == 0
        flush(engine)
        assert len(tier_of(engine)) == 4  # nothing of the new weights in the old one's folder
    with disk_engine(model=changing) as engine:
        assert answers_as_baseline(engine, [*text, 7]).cached_tokens == 0
    again = disk_engine()
    assert answers_as_baseline(again, [*text, 7]).cached_tokens == 64


def test_chunk_sizes_that_need_the_same_slots_answer_right(disk_engine: MakeEngine) -> None:
    text = random_ids(64, seed=1)
    for chunk_size in (17, 18, 19, 17):
        with disk_engine(chunk_size=chunk_size) as engine:
            engine.warm(text)
            go_cold(engine)
            assert answers_as_baseline(engine, [*text, 7]).cached_tokens == 64
            engine.cache_manager.check_integrity()
