"""Calls that fail, damaged slots and files that vanish: the same words all the same."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvboost.disk import cache as disk_cache
from kvboost.disk.tier import INDEX, SLOTS
from tests.engine.disk.on_disk import (
    ALL_CALLS,
    REAL_CALLS,
    SLOT_BYTES,
    answer,
    answers_as_baseline,
    flip,
    flush,
    go_cold,
    slots_of,
    tier_of,
    within,
)
from tests.engine.reuse_checks import approximate_tokens, pay_always
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids


class Failing:
    """Every `step`th call from number `first` on fails, `times` times at most; a short one moves less."""

    def __init__(self, real: Any, first: int, error: int | None, *, step: int = 1, times: int = 1) -> None:
        self._real = real
        self._first, self._step, self._times = first, step, times
        self._error = error
        self.calls = 0
        self.failures = 0

    def __call__(self, fd: int, *arguments: Any) -> Any:
        self.calls += 1
        due = self.calls >= self._first and (self.calls - self._first) % self._step == 0
        if not due or self.failures >= self._times:
            return self._real(fd, *arguments)
        self.failures += 1
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        if not arguments:
            return self._real(fd)
        parts, at = arguments
        return self._real(fd, [parts[0][: max(1, len(parts[0]) // 2)]], at)


A, B = random_ids(44, seed=71), random_ids(24, seed=72)
SCRIPT_PROMPTS = ([*A, 7], [*B, 8], [*A[:37], 9, 9], [*B[:20], *A[:20]])


def scripted_run(make: MakeEngine, folder: Path, expected: list[list[int]], model: Any) -> None:
    """Warm, ask, evict, open anew; every answer is BASELINE's."""
    options = {"model": model, "disk_cache_dir": folder, "disk_cache_bytes": 12 * SLOT_BYTES, "max_chunks": 6}
    with make(**options) as one:
        one.warm(A)
        one.core.parts.disk.flush(5.0)
        one.warm(B)
        for prompt, wanted in zip(SCRIPT_PROMPTS, expected, strict=True):
            assert answer(one, prompt, tokens=2).token_ids == wanted
            one.core.parts.workspace.drop()
            one.cache_manager.check_integrity()
    with make(**options) as two:
        for prompt, wanted in zip(SCRIPT_PROMPTS, expected, strict=True):
            assert answer(two, prompt, tokens=2).token_ids == wanted
            two.cache_manager.check_integrity()


@pytest.fixture
def script_answers(disk_engine: MakeEngine) -> list[list[int]]:
    engine = disk_engine(disk_cache_dir=None)
    return [answer(engine, prompt, "baseline", tokens=2).token_ids for prompt in SCRIPT_PROMPTS]


@pytest.mark.parametrize("call", ["pwritev", "preadv", "fdatasync"])
def test_every_call_fails_once(
    call: str,
    make_engine: MakeEngine,
    script_answers: list[list[int]],
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = (errno.EIO, errno.ENOSPC, None)
    number = 0
    while True:
        number += 1
        failing = Failing(REAL_CALLS[call], number, kinds[number % 3])
        monkeypatch.setattr(f"kvboost.disk.slot_file.os.{call}", failing)
        folder = tmp_path / str(number)
        scripted_run(make_engine, folder, script_answers, model)
        monkeypatch.setattr(f"kvboost.disk.slot_file.os.{call}", REAL_CALLS[call])
        if failing.failures == 0:
            break
        if number % 5 == 1:
            self_healed(make_engine, folder, script_answers, model)
        shutil.rmtree(folder)
    assert number >= 4


def self_healed(make: MakeEngine, folder: Path, expected: list[list[int]], model: Any) -> None:
    """Once the disk is well again, text that is read is kept."""
    scripted_run(make, folder, expected, model)
    with make(model=model, disk_cache_dir=folder, disk_cache_bytes=12 * SLOT_BYTES) as engine:
        assert tier_of(engine).check().is_good
        engine.warm(B)
        engine.warm(A)
    engine = make(model=model, disk_cache_dir=folder, disk_cache_bytes=12 * SLOT_BYTES)
    assert engine.explain([*A, 7]).cached_tokens == len(A)
    assert answer(engine, SCRIPT_PROMPTS[0], tokens=2).token_ids == expected[0]
    engine.close()


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("calls", [*((call,) for call in ALL_CALLS), ALL_CALLS], ids=str)
def test_calls_that_keep_failing(
    calls: tuple[str, ...],
    step: int,
    make_engine: MakeEngine,
    script_answers: list[list[int]],
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for call in calls:
        error = errno.EIO if step % 2 else errno.ENOSPC
        failing = Failing(REAL_CALLS[call], 1, error, step=step, times=10**9)
        monkeypatch.setattr(f"kvboost.disk.slot_file.os.{call}", failing)
    scripted_run(make_engine, tmp_path / "disk", script_answers, model)
    for call in calls:
        monkeypatch.setattr(f"kvboost.disk.slot_file.os.{call}", REAL_CALLS[call])
    self_healed(make_engine, tmp_path / "disk", script_answers, model)


@pytest.mark.parametrize("at", [0, 9, 60, 4096, 5000, 16_383])
@pytest.mark.parametrize("chunk_number", [0, 2])
def test_a_damaged_slot_is_a_miss_with_its_reason(
    chunk_number: int, at: int, disk_engine: MakeEngine
) -> None:
    engine = disk_engine()
    text = random_ids(64, seed=1)
    engine.warm(text)
    go_cold(engine)
    flip(engine, text, chunk_number, at)
    result = answers_as_baseline(engine, [*text, 7])
    is_padding = at == 16_383 and engine.codec.bytes_for(16) + 4096 <= at  # no byte of the record
    if is_padding:
        assert result.cached_tokens == 64
        return
    assert result.cached_tokens == 16 * chunk_number
    assert result.spans[-1].reason == "corrupt"
    assert engine.cache_stats()["misses"]["corrupt"] == 1
    assert tier_of(engine).misses["corrupt"] == 1
    engine.cache_manager.check_integrity()
    go_cold(engine)
    assert answers_as_baseline(engine, [*text, 7]).cached_tokens == 64  # it was kept anew
    engine.close()
    assert answers_as_baseline(disk_engine(), [*text, 7]).cached_tokens == 64


@pytest.mark.usefixtures("approximate_reuse")
def test_damage_to_moved_text(disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pay_always(monkeypatch)
    engine = disk_engine(recompute_ratio=1.0)
    text = random_ids(160, seed=1)
    engine.warm(text)
    go_cold(engine)
    flip(engine, text, chunk_number=5)
    prompt = [*random_ids(9, seed=2), *text, 7]
    result = answer(engine, prompt, "chunk_kv_reuse")
    assert 60 <= approximate_tokens(result) <= 90
    assert result.token_ids == answer(engine, prompt, "baseline").token_ids
    assert engine.cache_stats()["disk"]["misses"]["corrupt"] == 1


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_under_a_running_engine(seed: int, disk_engine: MakeEngine) -> None:
    draw = random.Random(seed)
    engine = disk_engine(max_chunks=4, disk_cache_bytes=24 * SLOT_BYTES)
    texts = [random_ids(64, seed=number) for number in range(4)]
    expected = [answer(engine, [*text, 7], "baseline").token_ids for text in texts]
    for _ in range(12):
        number = draw.randrange(len(texts))
        assert answer(engine, [*texts[number], 7]).token_ids == expected[number]
        engine.cache_manager.check_integrity()
        flush(engine)
        with slots_of(engine).open("r+b") as file:
            for _ in range(draw.choice([0, 1, 1, 40])):
                file.seek(draw.randrange(24 * SLOT_BYTES))
                file.write(draw.randbytes(draw.choice([1, 1, 4096])))


@pytest.mark.parametrize(
    "what", ["half", "empty", "no slots", "no index", "no description", "no folder", "index full of noise"]
)
def test_files_that_go_while_the_engine_runs(
    what: str, disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_REFRESH_S", 0.05)
    engine = disk_engine(max_chunks=4)
    texts = [random_ids(64, seed=number) for number in range(3)]
    expected = [answer(engine, [*text, 7], "baseline").token_ids for text in texts]
    for text in texts[:2]:
        engine.warm(text)
    go_cold(engine)
    folder = tier_of(engine).folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged index is said aloud
        if what == "half":
            os.truncate(folder / SLOTS, 3 * SLOT_BYTES + 77)
        elif what == "empty":
            os.truncate(folder / SLOTS, 0)
        elif what == "no folder":
            shutil.rmtree(folder)
        elif what == "index full of noise":
            (folder / INDEX).write_bytes(random.Random(1).randbytes(20_000))
        else:
            name = {"no slots": SLOTS, "no index": INDEX, "no description": "tier.json"}[what]
            (folder / name).unlink()
        for round_number in range(2):
            for text, wanted in zip(texts, expected, strict=True):
                assert within(20.0, partial(answer, engine, [*text, 7])).token_ids == wanted
                engine.cache_manager.check_integrity()
            if round_number == 0:
                time.sleep(0.15)  # the saver notices
        within(20.0, engine.close)
        for _ in range(2):
            with disk_engine() as again:
                for text, wanted in zip(texts, expected, strict=True):
                    assert answer(again, [*text, 7]).token_ids == wanted
                    again.cache_manager.check_integrity()
        last = disk_engine()
        assert all(last.explain([*text, 7]).cached_tokens == 64 for text in texts)
