"""Snapshots beside a disk, and the end of an engine."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.disk.on_disk import REAL_CALLS, answer, answers_as_baseline, go_cold
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids


def test_save_writes_what_is_on_disk_only_too(disk_engine: MakeEngine, tmp_path: Path) -> None:
    texts = [random_ids(64, seed=seed) for seed in range(3)]
    with disk_engine() as one:
        for text in texts:
            one.warm(text)
    two = disk_engine(max_chunks=3)
    answer(two, [*texts[0], 7])
    saved = two.save(tmp_path / "saved")
    stats = two.cache_stats()
    assert saved == stats["chunks"] + stats["chunks_on_disk_only"] >= 12
    two.cache_manager.check_integrity()
    plain = disk_engine(disk_cache_dir=None)
    report = plain.load(tmp_path / "saved")
    assert (report.loaded, report.corrupt, report.no_room) == (saved, 0, 0)
    for text in texts:
        assert answers_as_baseline(plain, [*text, 7]).cached_tokens == 64


def test_load_beside_a_disk(disk_engine: MakeEngine, tmp_path: Path) -> None:
    text, other = random_ids(64, seed=1), random_ids(64, seed=2)
    plain = disk_engine(disk_cache_dir=None)
    plain.warm(text)
    plain.warm(other)
    plain.save(tmp_path / "saved")
    with disk_engine() as one:
        one.warm(text[:40])
        go_cold(one)
        assert one.load(tmp_path / "saved").corrupt == 0
        one.cache_manager.check_integrity()
        for prompt in ([*text, 7], [*other, 7]):
            assert answers_as_baseline(one, prompt).cached_tokens == 64
    two = disk_engine()
    for prompt in ([*text, 7], [*other, 7]):  # what was loaded went to disk
        assert answers_as_baseline(two, prompt).cached_tokens == 64


# --- the end -----------------------------------------------------------------------------------------


def test_close_saves_all_and_can_be_called_twice(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.005)
        return REAL_CALLS["pwritev"](*arguments)

    monkeypatch.setattr("kvboost.disk.slot_file.os.pwritev", slow)
    texts = [random_ids(100, seed=seed) for seed in range(8)]
    engine = disk_engine()
    for text in texts:
        engine.warm(text)
    answered = answer(engine, [*texts[0], 7])
    engine.close()
    engine.close()
    two = disk_engine()
    for text in texts:
        assert two.explain([*text, 7]).cached_tokens == 100
    assert two.explain([*texts[0], 7, *answered.token_ids]).cached_tokens == 104


@pytest.mark.timed
def test_use_after_close(disk_engine: MakeEngine) -> None:
    text = random_ids(64, seed=1)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine()
    two.close()
    started = time.monotonic()
    for number in range(3):
        answers_as_baseline(two, [*text[: 30 + number], 7])
    assert time.monotonic() - started < 1.5  # nobody waits for readers that are gone
    two.warm(random_ids(40, seed=2))
    two.cache_stats()
    two.cache_manager.check_integrity()
    two.clear()
    two.close()


def test_threads_end_with_the_engine(disk_engine: MakeEngine) -> None:
    before = threading.active_count()
    for number in range(5):
        with disk_engine() as engine:
            engine.warm(random_ids(40, seed=number))
            go_cold(engine)
            answer(engine, [*random_ids(40, seed=number), 7])
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before  # threads of the test before may have ended meanwhile
