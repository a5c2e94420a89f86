"""RAM and disk stay within their budgets, and the disk keeps what can be reached."""

from __future__ import annotations

import contextlib
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.errors import CacheFileError, InvalidRequestError
from tests.engine.disk.on_disk import (
    SLOT_BYTES,
    answer,
    answers_as_baseline,
    check_exact_on_disk,
    flush,
    slots_of,
    tier_of,
)
from tests.engine.reuse_checks import approximate_tokens, joined, pay_always
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids


class Monitor:
    """Looks at the budgets all the time, beside the requests."""

    def __init__(self, engine: KVBoost, disk_bytes: int) -> None:
        self._engine = engine
        self._disk_bytes = disk_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.problems: list[str] = []

    def _look(self) -> None:
        tier = self._engine.cache_manager._store.budget
        slots = slots_of(self._engine)
        while not self._stop.wait(0.0005):
            with self._engine.cache_manager._store.lock:
                if not tier.fits(0, 0):
                    self.problems.append(f"{tier.used_bytes} bytes, {tier.used_entries} chunks in RAM")
            with contextlib.suppress(FileNotFoundError):
                if (size := slots.stat().st_size) > self._disk_bytes:
                    self.problems.append(f"{size} bytes on disk")

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()
        assert not self.problems, self.problems[:3]


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_stays_in_both_budgets(
    seed: int, disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    draw = random.Random(seed)
    slots = draw.choice([3, 9, 30])
    disk_bytes = slots * SLOT_BYTES + draw.randrange(SLOT_BYTES)
    limits = [{"max_chunks": 7}, {"max_cache_bytes": 7 * 12_288 + 5}, {"max_chunks": 1}, {"max_chunks": 0}]
    options: dict[str, Any] = {**limits[seed % 4], "disk_cache_bytes": disk_bytes}
    shelf = [random_ids(draw.randint(20, 70), seed=100 * seed + number) for number in range(8)]
    engine = disk_engine(**options)
    for step in range(20):
        with Monitor(engine, disk_bytes):
            action = draw.choice(["warm", "warm", "exact", "exact", "moved", "moved", "pin", "unpin", "rest"])
            parts = draw.sample(shelf, draw.randint(1, 3))
            prompt = [*joined(parts)[: draw.randint(5, 150)], *random_ids(2, seed=1000 + step)]
            if action == "warm":
                engine.warm(draw.choice(shelf))
            elif action == "exact":
                answers_as_baseline(engine, prompt)
            elif action == "moved":
                result = answer(engine, prompt, "chunk_kv_reuse")
                if not approximate_tokens(result):
                    assert result.token_ids == answer(engine, prompt, "baseline").token_ids
            elif action == "pin":
                engine.pin(draw.choice(shelf))
            elif action == "unpin":
                for text in shelf:
                    engine.unpin(text)
            else:
                draw.choice([engine.clear, engine.core.parts.workspace.drop, partial(flush, engine)])()
        engine.cache_manager.check_integrity()
        stats = engine.cache_stats()
        assert stats["disk"]["chunks"] <= slots
        assert stats["disk"]["max_chunks"] == slots
        assert slots_of(engine).stat().st_size <= disk_bytes
        if step % 9 == 8:
            for text in shelf:
                engine.unpin(text)
            flush(engine)
            check_exact_on_disk(engine)
            engine.close()
            engine = disk_engine(**options)
    flush(engine)
    report = tier_of(engine).check()
    assert report.is_good
    assert report.free + report.good == slots


@pytest.mark.parametrize("disk_bytes", [0, 1, SLOT_BYTES - 1])
def test_a_budget_smaller_than_a_slot_is_refused_with_the_least(
    disk_bytes: int, disk_engine: MakeEngine, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=f"at least {SLOT_BYTES}.*got {disk_bytes}"):
        disk_engine(disk_cache_bytes=disk_bytes)
    assert not (tmp_path / "disk").exists()
    with disk_engine(disk_cache_bytes=SLOT_BYTES) as one:
        one.warm(random_ids(16, seed=1))
        flush(one)
        assert one.cache_stats()["disk"]["chunks"] == 1


def test_a_smaller_budget_next_time_shrinks_the_file(disk_engine: MakeEngine) -> None:
    texts = [random_ids(48, seed=seed) for seed in range(6)]
    with disk_engine(disk_cache_bytes=20 * SLOT_BYTES) as one:
        for text in texts:
            one.warm(text)
    for slots, there in ((5, 5), (1, 1), (12, 1)):  # a larger one lets it grow again
        with disk_engine(disk_cache_bytes=slots * SLOT_BYTES) as engine:
            assert slots_of(engine).stat().st_size == there * SLOT_BYTES
            assert len(tier_of(engine)) <= slots
            for text in texts:
                answers_as_baseline(engine, [*text, 7])
                engine.cache_manager.check_integrity()
            assert tier_of(engine).check().is_good


def test_bad_options_are_said() -> None:
    from kvboost.settings import EngineSettings

    bad: list[dict[str, Any]] = [
        {"disk_cache_bytes": 5},
        {"disk_cache_dir": 3},
        {"disk_cache_dir": "x", "disk_cache_bytes": -1},
    ]
    for options in bad:
        with pytest.raises(InvalidRequestError, match="disk_cache"):
            EngineSettings(**options)


def test_a_folder_that_cannot_be_used_is_said_at_the_start(disk_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CacheFileError, match="file"):
        disk_engine(disk_cache_dir=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_most_used_text_survives_on_a_full_disk(disk_engine: MakeEngine) -> None:
    """A system prompt before every request is not what a full disk forgets first."""
    system = random_ids(32, seed=1)
    options = {"max_chunks": 8, "disk_cache_bytes": 8 * SLOT_BYTES}
    with disk_engine(**options) as one:
        for number in range(20):
            answers_as_baseline(one, [*system, *random_ids(16, seed=50 + number)])
            flush(one)
    two = disk_engine(**options)
    assert two.explain([*system, 5]).cached_tokens == 32


def test_what_is_on_disk_can_be_reached(disk_engine: MakeEngine) -> None:
    """A full disk holds no chunks whose beginning it has forgotten."""
    options = {"max_chunks": 6, "disk_cache_bytes": 10 * SLOT_BYTES}
    with disk_engine(**options) as one:
        for number in range(12):
            one.warm(random_ids(64, seed=number))
            flush(one)
        used = len(tier_of(one))
    two = disk_engine(**options)
    assert used >= 8
    assert two.cache_stats()["chunks_on_disk_only"] >= used - 3
