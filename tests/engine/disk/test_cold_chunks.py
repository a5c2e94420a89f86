"""Chunks that were evicted from RAM and are on disk: found, pinned, cleared, replaced."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from kvboost.disk.tier import DiskTier
from tests.engine.disk.on_disk import (
    REAL_CALLS,
    answer,
    answers_as_baseline,
    flip,
    flush,
    go_cold,
    shape_of,
    slots_of,
    tier_of,
    within,
)
from tests.engine.reuse_checks import approximate_tokens, chain_tokens, pay_always
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids


def test_evicted_chunks_come_back_from_disk(disk_engine: MakeEngine) -> None:
    engine = disk_engine(max_chunks=6)
    texts = [random_ids(80, seed=seed) for seed in range(6)]
    for text in texts:
        engine.warm(text)
        flush(engine)
    stats = engine.cache_stats()
    assert stats["chunks"] <= 6
    assert stats["chunks"] + stats["chunks_on_disk_only"] == 30
    for round_number in range(2):
        for text in texts:
            result = answers_as_baseline(engine, [*text, 7 + round_number])
            assert result.cached_tokens == 80
            engine.cache_manager.check_integrity()


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("options", [{}, {"kv_cache_bits": 8}, {"selector": "deviation"}], ids=str)
def test_chains_whose_donors_are_cold(
    options: dict[str, Any], disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat over reordered documents goes on from disk as it would from RAM."""
    pay_always(monkeypatch)
    shelf = [random_ids(90, seed=seed) for seed in range(3)]
    on_disk, in_ram = disk_engine(**options), disk_engine(disk_cache_dir=None, **options)
    for engine in (on_disk, in_ram):
        for document in shelf:
            engine.warm(document)
    prompt = [*shelf[2], *shelf[0], *shelf[1], *random_ids(40, seed=9)]
    for turn in range(4):
        go_cold(on_disk)
        in_ram.core.parts.workspace.drop()
        result, wanted = (answer(engine, prompt, "chunk_kv_reuse") for engine in (on_disk, in_ram))
        assert shape_of(result) == shape_of(wanted)
        assert result.token_ids == wanted.token_ids
        assert turn == 0 or chain_tokens(result) > 100
        on_disk.cache_manager.check_integrity()
        prompt = [*prompt, *result.token_ids, *random_ids(40, seed=20 + turn)]


@pytest.mark.usefixtures("approximate_reuse")
def test_chains_go_when_a_cold_donor_is_lost(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    engine = disk_engine(recompute_ratio=1.0)
    shelf = [random_ids(96, seed=seed) for seed in range(2)]
    for document in shelf:
        engine.warm(document)
    prompt = [*shelf[1], *shelf[0], *random_ids(40, seed=9)]
    first = answer(engine, prompt, "chunk_kv_reuse")
    assert approximate_tokens(first) == 96
    go_cold(engine)
    flip(engine, shelf[0], chunk_number=2)
    longer = [*prompt, *first.token_ids, 8]
    result = answer(engine, longer, "chunk_kv_reuse")
    assert result.token_ids == answer(engine, longer, "baseline").token_ids
    engine.cache_manager.check_integrity()
    assert tier_of(engine).misses["corrupt"] == 1


def test_pins_on_cold_text(disk_engine: MakeEngine) -> None:
    text = random_ids(48, seed=1)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine(max_chunks=4)
    assert two.pin(text) == 48
    assert answers_as_baseline(two, [*text, 7]).cached_tokens == 48
    for seed in range(10, 16):
        two.warm(random_ids(48, seed=seed))
        two.cache_manager.check_integrity()
    assert two.cache_stats()["chunks"] <= 4
    assert answers_as_baseline(two, [*text, 7]).cached_tokens == 48
    assert two.unpin(text) == 48
    two.cache_manager.check_integrity()


@pytest.mark.parametrize("how", ["clear", "damage", "neighbour"])
def test_pinned_text_that_is_lost_on_disk_is_computed_again(how: str, disk_engine: MakeEngine) -> None:
    text = random_ids(48, seed=1)
    with disk_engine() as one:
        one.warm(text)
    engine = disk_engine()
    expected = answer(engine, [*text, 7], "baseline").token_ids
    assert engine.pin(text) == 48
    if how == "clear":
        engine.clear()
    elif how == "damage":
        flip(engine, text, chunk_number=1)
    else:
        with DiskTier.existing(tier_of(engine).folder) as neighbour:
            neighbour.clear()
    result = within(10.0, lambda: answer(engine, [*text, 7]))
    assert result.token_ids == expected
    engine.cache_manager.check_integrity()
    engine.core.parts.workspace.drop()
    assert within(10.0, lambda: answer(engine, [*text, 7])).token_ids == expected
    for _ in range(2):
        engine.unpin(text)
    engine.cache_manager.check_integrity()


def test_clear_forgets_the_disk_too(disk_engine: MakeEngine) -> None:
    engine = disk_engine()
    text = random_ids(64, seed=1)
    engine.warm(text)
    go_cold(engine)
    answer(engine, [*text[:32], 7])  # some warm, some cold
    engine.clear()
    stats = engine.cache_stats()
    assert (stats["chunks"], stats["chunks_on_disk_only"], stats["disk"]["chunks"]) == (0, 0, 0)
    assert slots_of(engine).stat().st_size == 0  # the text is gone, not only its entry
    assert answers_as_baseline(engine, [*text, 7]).cached_tokens == 0
    go_cold(engine)
    assert answers_as_baseline(engine, [*text, 7]).cached_tokens == 64
    engine.clear()
    engine.close()
    assert disk_engine().explain([*text, 7]).cached_tokens == 0


@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.02])
def test_clear_forgets_what_is_being_saved(
    pause_s: float, disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.003)
        return REAL_CALLS["pwritev"](*arguments)

    monkeypatch.setattr("kvboost.disk.slot_file.os.pwritev", slow)
    engine = disk_engine()
    for number in range(4):
        text = random_ids(100, seed=number)
        engine.warm(text)
        time.sleep(pause_s)
        engine.clear()
        stats = engine.cache_stats()
        assert (stats["chunks"], stats["chunks_on_disk_only"]) == (0, 0)
        assert engine.explain([*text, 7]).cached_tokens == 0
        flush(engine)
        assert len(tier_of(engine)) == 0
        engine.cache_manager.check_integrity()
    engine.close()
    assert disk_engine().cache_stats()["chunks_on_disk_only"] == 0


def test_clear_with_cold_text_behind_warm_text(disk_engine: MakeEngine) -> None:
    engine = disk_engine()
    text, other = random_ids(64, seed=1), random_ids(64, seed=2)
    engine.warm(text)
    engine.warm([*text[:32], *other])
    go_cold(engine)
    answer(engine, [*text[:32], 7])
    engine.pin(text[:32])
    engine.clear()
    engine.cache_manager.check_integrity()
    assert answers_as_baseline(engine, [*text, 7]).cached_tokens == 32
    engine.unpin(text[:32])
    engine.clear()
    engine.cache_manager.check_integrity()
    assert engine.cache_stats()["chunks"] + engine.cache_stats()["chunks_on_disk_only"] == 0


def test_pinned_text_is_on_disk_again_after_clear(disk_engine: MakeEngine) -> None:
    text = random_ids(48, seed=1)
    with disk_engine() as engine:
        engine.warm(text)
        flush(engine)
        engine.pin(text)
        engine.clear()
        assert answers_as_baseline(engine, [*text, 7]).cached_tokens == 48
    assert disk_engine().explain([*text, 7]).cached_tokens == 48


def test_replaced_tails_vanish_from_disk(disk_engine: MakeEngine) -> None:
    engine = disk_engine()
    text = random_ids(64, seed=1)
    for length in (5, 9, 16, 17, 30, 64):
        engine.warm(text[:length])
        if length % 2:
            go_cold(engine)
        flush(engine)
        time.sleep(0.02)
        # the saver takes tails away after it has saved
        engine.core.parts.disk and engine.core.parts.disk.wake()
    deadline = time.monotonic() + 5
    while len(tier_of(engine)) > 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(tier_of(engine)) == 4
    engine.close()
    assert disk_engine().cache_stats()["chunks_on_disk_only"] == 4


@pytest.mark.parametrize("state", ["warm", "cold"])
def test_a_tail_whose_successor_cannot_be_kept_stays_on_disk(state: str, disk_engine: MakeEngine) -> None:
    broken = long_model()
    with torch.no_grad():
        broken.get_input_embeddings().weight[299] = float("nan")
    text = random_ids(20, seed=1)
    with disk_engine(model=broken, kv_cache_bits=8, max_chunks=3) as one:
        one.warm(text)
        flush(one)
        if state == "cold":
            go_cold(one)
        one.warm([*text, 299, 3])  # quantized KV cannot hold what is not finite
        one.cache_manager.check_integrity()
        assert one.explain([*text, 7]).cached_tokens == 20
        one.core.parts.workspace.drop()
        assert answer(one, [*text, 7]).cached_tokens == 20
        one.cache_manager.check_integrity()
    assert disk_engine(model=broken, kv_cache_bits=8).explain([*text, 7]).cached_tokens >= 20
