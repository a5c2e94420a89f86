"""Disks that are slow or hang: a prompt waits one deadline at most."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.choices import Origin
from kvboost.disk import cache as disk_cache
from kvboost.errors import CacheFileError
from tests.engine.disk.on_disk import (
    ALL_CALLS,
    DEADLINE_S,
    REAL_CALLS,
    SLOT_BYTES,
    Hang,
    answer,
    answers_as_baseline,
    flush,
    go_cold,
    within,
)
from tests.engine.reuse_checks import approximate_tokens, pay_always
from tests.fixture_types import MakeEngine
from tests.threads import in_threads
from tests.tiny_models import random_ids


def median_ttft(engine: KVBoost, seeds: range, tokens: int = 60) -> float:
    times = [answer(engine, random_ids(tokens, seed=seed)).ttft_ms for seed in seeds]
    return sorted(times)[len(times) // 2]


@pytest.mark.timed
@pytest.mark.parametrize("calls", [*((call,) for call in ALL_CALLS), ALL_CALLS], ids=str)
@pytest.mark.parametrize("max_chunks", [None, 12])
@pytest.mark.usefixtures("short_deadline")
def test_a_prompt_that_does_not_need_the_disk_is_not_delayed(
    max_chunks: int | None, calls: tuple[str, ...], disk_engine: MakeEngine, hang: Hang
) -> None:
    engine = disk_engine(max_chunks=max_chunks)
    engine.warm(random_ids(60, seed=999))
    flush(engine)
    well = median_ttft(engine, range(300, 305))
    go_cold(engine)
    hang(*calls)
    times = []
    for seed in range(400, 410):
        prompt = random_ids(60, seed=seed)
        result = answer(engine, prompt)
        times.append(result.ttft_ms)
        assert result.spans[0].origin is Origin.LIVE
        engine.cache_manager.check_integrity()
    times.sort()
    assert times[len(times) // 2] < 3 * well + 100
    assert times[-1] < 1000 * DEADLINE_S * 0.8
    assert engine.explain(random_ids(60, seed=999)).cached_tokens == 59  # nor a look at what it would need


@pytest.mark.timed
def test_a_hanging_write_delays_storing_once_and_not_the_first_token(
    disk_engine: MakeEngine, hang: Hang
) -> None:
    engine = disk_engine(max_chunks=12)
    hang("pwritev")
    started = time.monotonic()
    for seed in range(20):
        prompt = random_ids(60, seed=seed)
        assert answers_as_baseline(engine, prompt).ttft_ms < 500
        engine.cache_manager.check_integrity()
    assert time.monotonic() - started < 6


@pytest.mark.timed
@pytest.mark.usefixtures("short_deadline")
def test_a_prompt_that_needs_a_hanging_disk_waits_one_deadline(disk_engine: MakeEngine, hang: Hang) -> None:
    text = random_ids(96, seed=1)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine()
    expected = answer(two, [*text, 7], "baseline").token_ids
    released = hang("preadv")
    result = answer(two, [*text, 7])
    assert result.token_ids == expected
    assert 1000 * DEADLINE_S * 0.9 <= result.ttft_ms < 1000 * DEADLINE_S * 1.8
    assert result.spans[-1].reason == disk_cache.TOO_SLOW
    assert two.cache_stats()["misses"] == {disk_cache.TOO_SLOW: 1}
    two.core.parts.workspace.drop()
    again = answer(two, [*text, 7])  # in RAM by now
    assert again.token_ids == expected
    assert again.ttft_ms < 1000 * DEADLINE_S * 0.5
    released.set()
    go_cold(two)
    result = answer(two, [*text, 7])
    assert (result.token_ids, result.cached_tokens) == (expected, 96)
    two.cache_manager.check_integrity()


def test_what_was_too_slow_once_is_found_again(
    disk_engine: MakeEngine, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_DEADLINE_S", 0.1)
    monkeypatch.setattr(disk_cache, "_REFRESH_S", 0.05)
    text = random_ids(96, seed=1)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine(max_chunks=0)  # nothing that is computed anew stays
    released = hang("preadv")
    assert answer(two, [*text, 7]).cached_tokens == 0
    released.set()
    until = time.monotonic() + 10
    while two.explain([*text, 7]).cached_tokens < 96 and time.monotonic() < until:
        time.sleep(0.02)
    assert answer(two, [*text, 7]).cached_tokens == 96


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.timed
@pytest.mark.usefixtures("short_deadline")
def test_text_at_many_cold_places_waits_one_deadline_in_all(
    disk_engine: MakeEngine, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    text = random_ids(64, seed=1)
    with disk_engine() as one:
        for number in range(5):
            one.warm([*random_ids(32, seed=10 + number), *text])
    two = disk_engine()
    prompt = [*random_ids(20, seed=99), *text, 7]
    assert approximate_tokens(two.generate(prompt, max_new_tokens=1)) == 64  # found in RAM and on disk
    two.clear()
    two.close()
    with disk_engine() as one:
        for number in range(5):
            one.warm([*random_ids(32, seed=10 + number), *text])
    three = disk_engine()
    hang("preadv")
    result = within(20.0, lambda: answer(three, prompt, "chunk_kv_reuse"))
    assert result.ttft_ms < 1000 * DEADLINE_S * 1.8
    assert result.token_ids == answer(three, prompt, "baseline").token_ids


@pytest.mark.timed
@pytest.mark.usefixtures("short_deadline")
def test_threads_that_need_the_same_hanging_chunk_wait_one_deadline(
    disk_engine: MakeEngine, hang: Hang
) -> None:
    text = random_ids(64, seed=1)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine()
    expected = [answer(two, [*text, 7 + number], "baseline").token_ids for number in range(4)]
    hang("preadv")
    results: list[Any] = [None] * 4

    def work(number: int) -> None:
        time.sleep(0.15 * number)
        results[number] = answer(two, [*text, 7 + number])

    in_threads(4, work)
    assert [result.token_ids for result in results] == expected
    assert max(result.ttft_ms for result in results) < 1000 * DEADLINE_S * 1.8
    two.cache_manager.check_integrity()


@pytest.mark.timed
def test_many_requests_pile_up_neither_delays_nor_threads(
    disk_engine: MakeEngine, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_DEADLINE_S", 0.1)
    texts = [random_ids(64, seed=number) for number in range(30)]
    with disk_engine(disk_cache_bytes=200 * SLOT_BYTES) as one:
        for text in texts:
            one.warm(text)
    two = disk_engine(disk_cache_bytes=200 * SLOT_BYTES)
    expected = [answer(two, [*text, 7], "baseline").token_ids for text in texts]
    before = threading.active_count()
    released = hang("preadv")
    started = time.monotonic()
    times = []
    for text, wanted in zip(texts, expected, strict=True):
        result = answer(two, [*text, 7])
        assert result.token_ids == wanted
        times.append(result.ttft_ms)
    assert time.monotonic() - started < 30 * 0.1 + 3
    assert max(times[20:]) < 80  # given up by now: nobody waits any longer
    assert threading.active_count() - before <= 20
    released.set()
    time.sleep(0.1)
    go_cold(two)
    assert answers_as_baseline(two, [*texts[0], 7]).cached_tokens == 64  # and it is used again


def test_a_slow_disk_is_waited_for_within_the_deadline(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random_ids(64, seed=1)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine()

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        return REAL_CALLS["preadv"](*arguments)

    monkeypatch.setattr("kvboost.disk.slot_file.os.preadv", slow)
    result = answers_as_baseline(two, [*text, 7])
    assert result.cached_tokens == 64
    assert result.ttft_ms >= 100  # reported time has the waiting in it


@pytest.mark.timed
@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_close_and_clear_return_when_writing_hangs(
    call: str, disk_engine: MakeEngine, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_DRAIN_S", 0.3)
    engine = disk_engine()
    hang(call)
    engine.warm(random_ids(64, seed=1))
    time.sleep(0.05)

    def clear() -> None:
        with contextlib.suppress(CacheFileError):  # it may say that it could not
            engine.clear()

    within(2.0, clear)
    within(2.0, engine.close)
    within(1.0, engine.close)


@pytest.mark.usefixtures("short_deadline")
def test_close_returns_when_reading_hangs(disk_engine: MakeEngine, hang: Hang) -> None:
    text = random_ids(64, seed=1)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine()
    hang("preadv")
    answer(two, [*text, 7])
    within(5.0, two.close)
