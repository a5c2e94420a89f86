"""Threads, engines and processes on one folder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvboost.disk import cache as disk_cache
from tests.engine.disk.on_disk import (
    SLOT_BYTES,
    answer,
    answers_as_baseline,
    check_exact_on_disk,
    flush,
    tier_of,
)
from tests.fixture_types import MakeEngine
from tests.threads import in_threads
from tests.tiny_models import random_ids

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "options",
    [{"max_chunks": 6}, {"max_cache_bytes": 80_000, "disk_cache_bytes": 20 * SLOT_BYTES}, {"max_chunks": 1}],
    ids=str,
)
def test_threads_on_one_engine_with_little_ram(options: dict[str, Any], disk_engine: MakeEngine) -> None:
    engine = disk_engine(**options)
    prompts = [random_ids(50 + k % 5, seed=k % 7) + random_ids(1 + k % 9, seed=500 + k) for k in range(30)]
    expected = [answer(engine, prompt, "baseline").token_ids for prompt in prompts]

    def work(number: int) -> None:
        for index in range(number, len(prompts), 6):
            if index % 11 == 0:
                engine.explain(prompts[index])
                engine.cache_stats()
            if index % 13 == 0:
                engine.pin(prompts[index])
                engine.unpin(prompts[index])
            assert answer(engine, prompts[index]).token_ids == expected[index]

    in_threads(6, work)
    engine.cache_manager.check_integrity()
    flush(engine)
    assert check_exact_on_disk(engine) > 0
    store = engine.cache_manager._store
    assert all(entry.readers == 0 for entry in store.entries.values())


def test_answers_while_others_clear_pin_and_close(disk_engine: MakeEngine) -> None:
    engine = disk_engine(max_chunks=8)
    texts = [random_ids(64, seed=seed) for seed in range(5)]
    expected = [answer(engine, [*text, 7], "baseline").token_ids for text in texts]
    others = [
        engine.clear,
        engine.core.parts.workspace.drop,
        engine.cache_stats,
        partial(engine.pin, texts[0]),
    ]

    def work(number: int) -> None:
        for turn in range(16):
            index = (number + turn) % 5
            if number < 3:
                assert answer(engine, [*texts[index], 7]).token_ids == expected[index]
            elif turn == 15:
                engine.close()
            else:
                others[turn % 4]()
                engine.unpin(texts[0])
                time.sleep(0.01)

    in_threads(4, work)
    engine.cache_manager.check_integrity()
    assert all(entry.readers == 0 for entry in engine.cache_manager._store.entries.values())


def test_two_engines_on_one_folder_at_once(disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_REFRESH_S", 0.02)
    options = {"max_chunks": 6, "disk_cache_bytes": 24 * SLOT_BYTES}
    engines = [disk_engine(**options) for _ in range(2)]
    texts = [random_ids(64, seed=seed) for seed in range(8)]
    expected = [answer(engines[0], [*text, 7], "baseline").token_ids for text in texts]

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(25):
            index = draw.randrange(len(texts))
            assert answer(engines[number], [*texts[index], 7]).token_ids == expected[index]
            engines[number].cache_manager.check_integrity()

    in_threads(2, work)
    for engine in engines:
        flush(engine)
        assert tier_of(engine).check().is_good
        assert len(tier_of(engine)) <= 24


def test_an_idle_engine_finds_what_another_one_saves(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_REFRESH_S", 0.05)
    reader, writer = disk_engine(), disk_engine()
    text = random_ids(64, seed=1)
    writer.warm(text)
    flush(writer)
    deadline = time.monotonic() + 5
    while reader.explain([*text, 7]).cached_tokens < 64 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert answers_as_baseline(reader, [*text, 7]).cached_tokens == 64


def test_a_busy_engine_finds_what_another_one_saves(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that always has something to save looks at the folder now and then all the same."""
    monkeypatch.setattr(disk_cache, "_REFRESH_S", 0.2)
    reader, writer = disk_engine(), disk_engine()
    assert reader.core.parts.disk is not None
    text = random_ids(64, seed=1)
    stop = threading.Event()

    def be_busy() -> None:
        while not stop.wait(0.01):
            reader.core.parts.disk.wake()

    busy = threading.Thread(target=be_busy, daemon=True)
    busy.start()
    time.sleep(0.05)
    writer.warm(text)
    flush(writer)
    deadline = time.monotonic() + 2
    while reader.explain([*text, 7]).cached_tokens < 64 and time.monotonic() < deadline:
        time.sleep(0.02)
    stop.set()
    busy.join()
    assert reader.explain([*text, 7]).cached_tokens == 64


PRELUDE = """
import gc, os, sys, threading, time
import torch
torch.set_num_threads(1)
from kvboost import KVBoost
from tests.tiny_models import long_model, random_ids, tiny_tokenizer
def engine(**options):
    return KVBoost(long_model(), tiny_tokenizer(), chunk_size=16, disk_cache_dir=sys.argv[1], **options)
"""


PROGRAMS = {
    "garbage": """
one = engine()
one.warm(random_ids(64, seed=1))
one.core.parts.disk.flush()
one.warm(random_ids(64, seed=2))
del one
gc.collect()
print("done", flush=True)
""",
    "fork": """
one = engine()
one.warm(random_ids(64, seed=1))
one.core.parts.disk.flush()
child = os.fork()
if child == 0:
    one.clear()
    one.close()
    one.close()
    os._exit(0)
deadline = time.time() + 20
while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.time() < deadline:
    time.sleep(0.01)
assert status == (child, 0), status
one.warm(random_ids(64, seed=2))
assert one.core.parts.disk.flush(10)
owners = os.listdir(one.core.parts.disk.tier.folder / "owners")
assert len(owners) == 1, owners
child = os.fork()
if child == 0:
    os._exit(0 if one.generate([*random_ids(64, seed=1), 7], max_new_tokens=2).cached_tokens == 64 else 3)
deadline = time.time() + 20
while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.time() < deadline:
    time.sleep(0.01)
if status == (0, 0):
    os.kill(child, 9)
assert status == (child, 0), status
one.close()
print("done", flush=True)
""",
    "writer": """
sys.stdin.readline()
one = engine(max_chunks=8)
number = 0
while True:
    time.sleep(0.02)
    one.warm(random_ids(64, seed=number))
    if number % 4 == 3:
        one.core.parts.disk.flush()
        print(number, flush=True)
    number += 1
""",
}


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Any, Path]]]:
    """The programs, each in a process and a folder of its own; they start with the first test."""
    running: dict[str, tuple[subprocess.Popen[str], Path]] = {}
    for name, program in PROGRAMS.items():
        folder = tmp_path_factory.mktemp(name)
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + program, str(folder)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running[name] = process, folder
    yield running.__getitem__
    for process, _folder in running.values():
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["garbage", "fork"])
def test_a_process_ends_without_hanging(name: str, programs: Any, disk_engine: MakeEngine) -> None:
    process, folder = programs(name)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "done\n", "")
    engine = disk_engine(disk_cache_dir=folder)
    assert answers_as_baseline(engine, [*random_ids(64, seed=1), 7]).cached_tokens == 64
    if name == "fork":
        assert answers_as_baseline(engine, [*random_ids(64, seed=2), 7]).cached_tokens == 64
    assert tier_of(engine).check().is_good


def test_a_neighbour_that_is_killed_while_writing(
    programs: Any, disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_REFRESH_S", 0.05)
    process, folder = programs("writer")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    engine = disk_engine(disk_cache_dir=folder, max_chunks=8)
    said = -1
    while said < 11:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        said = int(line)
        answers_as_baseline(engine, [*random_ids(64, seed=said), 7])
        answers_as_baseline(engine, random_ids(40, seed=700 + said))
        engine.cache_manager.check_integrity()
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    for number in range(8):
        answers_as_baseline(engine, random_ids(40, seed=800 + number))
    engine.close()
    again = disk_engine(disk_cache_dir=folder)
    for number in range(said + 1):
        assert answers_as_baseline(again, [*random_ids(64, seed=number), 7]).cached_tokens == 64
    report = tier_of(again).check()
    assert report.is_good
    assert report.writing == 0
    assert report.good + report.free == report.slots
