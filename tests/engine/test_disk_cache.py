"""A disk behind the cache, through the engine: the same words over restarts, damage, failures and delays."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import GenerationResult, KVBoost
from kvboost.choices import Origin
from kvboost.disk import cache as disk_cache
from kvboost.disk.tier import INDEX, SLOTS, DiskTier
from kvboost.errors import CacheFileError, InvalidRequestError
from tests.engine.test_approximate_reuse import (
    approximate_tokens,
    chain_tokens,
    check_spans,
    fresh_kv,
    joined,
    long_model,
    pay_always,
)
from tests.tiny_models import random_ids, tiny_model

MakeEngine = Callable[..., KVBoost]
Hang = Callable[..., threading.Event]
ALL_CALLS = ("preadv", "pwritev", "fdatasync")
ROOT = Path(__file__).parents[2]
DEADLINE_S = 1.0  # in tests with a disk that hangs
SLOT_BYTES = 16_384  # of a chunk of 16 tokens of the tiny llama: 12 KiB and a header
_REAL = {name: getattr(os, name) for name in ("preadv", "pwritev", "fdatasync")}


@pytest.fixture(scope="module")
def model() -> Any:
    return long_model()


@pytest.fixture
def disk_engine(make_engine: MakeEngine, model: Any, tmp_path: Path) -> MakeEngine:
    """Engines on one model and one folder."""

    def make(**options: Any) -> KVBoost:
        options.setdefault("model", model)
        options.setdefault("disk_cache_dir", tmp_path / "disk")
        return make_engine(**options)

    return make


@pytest.fixture
def hang(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """Make calls of the slot file hang until the event is set, which the end of the test does."""
    del make_engine  # its engines are closed after the disk is released
    events: list[threading.Event] = []

    def start(*names: str) -> threading.Event:
        released = threading.Event()
        events.append(released)
        for name in names:

            def hanging(*arguments: Any, real: Any = _REAL[name]) -> Any:
                released.wait()
                return real(*arguments)

            monkeypatch.setattr(f"kvboost.disk.slot_file.os.{name}", hanging)
        return released

    yield start
    for event in events:
        event.set()


def tier_of(engine: KVBoost) -> DiskTier:
    assert engine.core.parts.disk is not None
    return engine.core.parts.disk.tier


def slots_of(engine: KVBoost) -> Path:
    return tier_of(engine).folder / SLOTS


def flush(engine: KVBoost) -> None:
    assert engine.core.parts.disk is not None
    assert engine.core.parts.disk.flush(20.0)


def go_cold(engine: KVBoost) -> None:
    """Save all, and evict from RAM what is on disk."""
    flush(engine)
    manager = engine.cache_manager
    with manager._lock:
        store = manager._store
        while keys := [key for key in store.tier.evictable() if key in store.saved]:
            for key in keys:
                store._evict(store.entries[key])
    engine.core.parts.workspace.drop()
    manager.check_integrity()


def answer(
    engine: KVBoost, prompt: Sequence[int], mode: str = "prefix_cache", *, tokens: int = 4, **options: Any
) -> GenerationResult:
    result = engine.generate(list(prompt), max_new_tokens=tokens, mode=mode, **options)
    check_spans(result)
    return result


def answers_as_baseline(engine: KVBoost, prompt: Sequence[int], **options: Any) -> GenerationResult:
    """An exact answer with reuse, which must be BASELINE's."""
    result = answer(engine, prompt, **options)
    assert result.token_ids == answer(engine, prompt, "baseline").token_ids
    return result


def shape_of(result: GenerationResult) -> list[tuple[int, int, Origin, str, str]]:
    return [(span.start, span.end, span.origin, span.reason, span.donor) for span in result.spans]


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns; fails where it takes longer."""
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not through after {seconds} s"
    if errors:
        raise errors[0]
    return outcome[0]


def in_threads(count: int, work: Callable[[int], None], seconds: float = 30.0) -> None:
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # shown in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def check_exact_on_disk(engine: KVBoost) -> int:
    """Every chunk on disk of the exact chains holds what a full prefill gives; returns their number."""
    tier = tier_of(engine)
    ours = {
        entry.header.key: chunk
        for entry in tier.entries()
        if entry.header.meta["namespace"] == engine.namespace().key
        and (chunk := tier.load(entry)) is not None
    }
    for chunk in ours.values():
        path = [chunk]
        while path[-1].parent_hash in ours:
            path.append(ours[path[-1].parent_hash])
        if path[-1].parent_hash != engine.namespace().key:
            continue  # what it follows was evicted
        full = fresh_kv(engine.model, joined([part.token_ids for part in reversed(path)]))
        for pair, wanted in zip(chunk.past_key_values, full, strict=True):
            for part, whole in zip(pair, wanted, strict=True):
                piece = whole[:, :, chunk.position_start : chunk.position_end]
                assert float((part - piece).norm() / piece.norm()) <= 1e-4
    return len(ours)


# --- a second engine has it all ------------------------------------------------------------------

ENCODINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "8 bits": {"kv_cache_bits": 8},
    "4 bits": {"kv_cache_bits": 4},
    "k8v4": {"kv_cache_bits": "k8v4"},
    "overlap": {"overlap_k": 8},
    "overlap and sink": {"overlap_k": 8, "sink_tokens": 4},
    "quantized overlap": {"overlap_k": 8, "kv_cache_bits": 8},
    "sink": {"sink_tokens": 4},
    "boundary window": {"chunk_boundary_window": 6},
    "salt": {"cache_salt": "ours"},
    "bit exact": {"bit_exact": True},
    "on the model's device": {"cache_device": "model"},
    "deviation": {"selector": "deviation"},
    "8 bits, small RAM": {"kv_cache_bits": 8, "max_chunks": 4},
    "small RAM": {"max_chunks": 4},
    "one byte of RAM": {"max_cache_bytes": 1},
}


@pytest.mark.parametrize("options", ENCODINGS.values(), ids=ENCODINGS.keys())
def test_a_second_engine_answers_as_one_that_kept_all_in_ram(
    options: dict[str, Any], disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    texts = [random_ids(70 + 13 * number, seed=number) for number in range(3)]
    with disk_engine(**{**options, "max_chunks": None, "max_cache_bytes": None}) as one:
        for text in texts:
            one.warm(text)
    unlimited = {**options, "max_chunks": None, "max_cache_bytes": None, "disk_cache_dir": None}
    in_ram = disk_engine(**unlimited)
    for text in texts:
        in_ram.warm(text)
    two = disk_engine(**options)
    assert two.cache_stats()["chunks"] == 0
    assert two.cache_stats()["chunks_on_disk_only"] == in_ram.cache_stats()["chunks"]
    is_exact = not options.get("overlap_k") and options.get("kv_cache_bits", 16) == 16
    keeps_all = not {"max_chunks", "max_cache_bytes"} & options.keys()
    prompts = [[*text, 9, 8] for text in texts]
    if not options.get("bit_exact"):
        prompts.append([*texts[2], *texts[1], *texts[0], 7])
    for number, prompt in enumerate(prompts):
        for mode in ("prefix_cache", "chunk_kv_reuse") if number < 3 else ("chunk_kv_reuse",):
            two.core.parts.workspace.drop()
            in_ram._workspace.drop()
            stored = two.cache_stats()["stored_chunks"]
            result, wanted = answer(two, prompt, mode), answer(in_ram, prompt, mode)
            if keeps_all or is_exact or mode == "prefix_cache":
                assert result.token_ids == wanted.token_ids
            if keeps_all:
                assert shape_of(result) == shape_of(wanted)
            if number < 3 and not options.get("bit_exact"):
                assert result.cached_tokens >= len(texts[number])
            if number == 3:
                assert approximate_tokens(result) >= len(texts[0]) + len(texts[1]) - 32
            elif is_exact:
                assert result.token_ids == answer(two, prompt, "baseline").token_ids
            if number < 3:
                assert two.cache_stats()["stored_chunks"] - stored <= 1  # the question, not what was there
            two.cache_manager.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "phi", "gemma3", "smollm3"])
def test_other_models_and_dtypes(
    architecture: str, dtype: torch.dtype, make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = tiny_model(architecture, dtype=dtype)
    text = random_ids(90, seed=1)
    with make_engine(model=model, disk_cache_dir=tmp_path) as one:
        one.warm(text)
        kept = {key: entry.chunk.kv.tensors for key, entry in one.cache_manager._store.entries.items()}
        wanted = answer(one, [*text, 9, 8])
    two = make_engine(model=model, disk_cache_dir=tmp_path)
    result = answer(two, [*text, 9, 8])
    assert result.cached_tokens >= 90
    assert result.token_ids == wanted.token_ids
    if dtype == torch.float32:
        assert result.token_ids == answer(two, [*text, 9, 8], "baseline").token_ids
    loaded = two.cache_manager._store.entries
    same = [key for key in kept if key in loaded and loaded[key].chunk.kv.is_loaded]
    assert len(same) >= 5
    for key in same:
        assert all(map(torch.equal, loaded[key].chunk.kv.tensors, kept[key]))


def test_moved_documents_come_from_disk_and_repaired_in_full_give_baseline(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    shelf = [random_ids(80 + 20 * number, seed=10 + number) for number in range(4)]
    with disk_engine() as one:
        for document in shelf:
            one.warm(document)
    two = disk_engine(recompute_ratio=1.0)
    prompt = [*random_ids(7, seed=1), *shelf[3], *shelf[0], *shelf[2], *shelf[1], 5]
    result = answer(two, prompt, "chunk_kv_reuse")
    assert approximate_tokens(result) == sum(map(len, shelf))
    assert result.token_ids == answer(two, prompt, "baseline").token_ids


def test_approximate_never_becomes_exact_over_a_restart(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    first, second, fresh = (random_ids(96, seed=seed) for seed in (1, 2, 3))
    with disk_engine() as one:
        one.warm(first)
        one.warm(second)
        prompt = [*second, *first, *fresh, 5]
        turn = answer(one, prompt, "chunk_kv_reuse")
        assert approximate_tokens(turn) == 96
        flush(one)
        assert check_exact_on_disk(one) == 12
    longer = [*prompt, *turn.token_ids, 8, 9]
    expected = answer(one, longer, "baseline").token_ids
    for mode in ("prefix_cache", "chunk_kv_reuse"):
        with disk_engine() as two:
            assert {span.origin for span in two.explain([*fresh, 7])} <= {
                Origin.APPROXIMATE,
                Origin.LIVE,
            }
            result = answer(two, longer, mode)
            assert sum(span.length for span in result.spans if span.origin is Origin.EXACT) == 96
            assert result.token_ids == expected or mode == "chunk_kv_reuse"
            assert (approximate_tokens(result) > 0) == (mode == "chunk_kv_reuse")
            two.clear()
        with disk_engine() as one:
            for text in (first, second):
                one.warm(text)
            answer(one, prompt, "chunk_kv_reuse")
    three = disk_engine()
    result = answer(three, [*random_ids(9, seed=9), *fresh, 7], "chunk_kv_reuse")
    assert approximate_tokens(result) >= 90  # its content is found


def test_salts_on_disk_are_kept_apart(disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pay_always(monkeypatch)
    text = random_ids(100, seed=1)
    prompts = ([*text, 7], [*random_ids(9, seed=2), *text, 7])
    with disk_engine() as one:
        one.warm(text, cache_salt="mine")
    two = disk_engine()
    for prompt in prompts:
        for salt in ("", "yours"):
            explained = two.explain(prompt, cache_salt=salt)
            assert [(span.origin, span.reason) for span in explained] == [(Origin.LIVE, "never stored")]
            result = answer(two, prompt, "chunk_kv_reuse", cache_salt=f"{salt}-{len(prompt)}")
            assert {span.reason for span in result.spans} == {"never stored"}
    assert tier_of(two).misses.total() == 0
    assert answer(two, prompts[0], cache_salt="mine").cached_tokens == 100
    assert approximate_tokens(answer(two, prompts[1], "chunk_kv_reuse", cache_salt="mine")) == 100
    stored = b"".join(path.read_bytes() for path in tier_of(two).folder.iterdir() if path.is_file())
    assert b"mine" not in stored


def test_text_at_an_offset_is_found_by_content_only(
    disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    text = random_ids(100, seed=1)
    with disk_engine() as one:
        one.warm(text, position_offset=64)
    two = disk_engine(recompute_ratio=1.0)
    assert answer(two, [*text, 7]).cached_tokens == 0
    two.clear()
    with disk_engine() as one:
        one.warm(text, position_offset=64)
    two = disk_engine(recompute_ratio=1.0)
    prompt = [*random_ids(64, seed=2), *text, 7]
    result = answer(two, prompt, "chunk_kv_reuse")
    assert approximate_tokens(result) == 100
    assert {span.reason for span in result.spans if span.donor} == {"behind other text"}
    assert result.token_ids == answer(two, prompt, "baseline").token_ids


def test_explain_reads_nothing(disk_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_ids(100, seed=1)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine()
    reads: list[Any] = []

    def counted(*arguments: Any) -> Any:
        reads.append(arguments)
        return _REAL["preadv"](*arguments)

    monkeypatch.setattr("kvboost.disk.slot_file.os.preadv", counted)
    before = two.cache_stats()
    assert two.explain([*text, 7]).cached_tokens == 100
    assert two.explain([*random_ids(9, seed=3), *text, 7]).prompt_tokens == 110
    assert two.cache_stats() == before
    assert not reads
    assert answer(two, [*text, 7]).cached_tokens == 100
    assert reads


def test_a_slice_of_a_cold_chunk(disk_engine: MakeEngine) -> None:
    text = random_ids(64, seed=1, high=100)
    with disk_engine() as one:
        one.warm(text)
    two = disk_engine(max_chunks=3)
    for leaves_at in (1, 15, 16, 17, 33, 63):
        prompt = [*text[:leaves_at], *random_ids(3, seed=leaves_at, low=100)]
        assert answers_as_baseline(two, prompt).cached_tokens == leaves_at
        two.core.parts.workspace.drop()
        two.cache_manager.check_integrity()


def test_prepare_and_commit(disk_engine: MakeEngine) -> None:
    text = random_ids(64, seed=1)
    with disk_engine() as one:
        one.warm(text)
    with disk_engine() as two:
        prepared = two.prepare([*text, 7], max_new_tokens=4)
        assert sum(span.length for span in prepared.spans if span.donor) == 64
        output = two.model.generate(**prepared, max_new_tokens=4, do_sample=False)
        expected = answer(two, [*text, 7], "baseline").token_ids
        assert output[0, 65:].tolist() == expected
        two.commit(prepared, output)
    assert disk_engine().explain([*text, 7, *expected[:3], 5]).cached_tokens == 68


# --- the public parts of the store -------------------------------------------------------------


def test_assemble_and_get_never_give_a_chunk_without_tensors(disk_engine: MakeEngine) -> None:
    text = random_ids(40, seed=1)
    with disk_engine() as one:
        one.warm(text)
        keys = list(one.cache_manager._store.entries)
    two = disk_engine()
    for key in keys:
        chunk = two.cache_manager.get(key)
        assert chunk is None or chunk.past_key_values[0][0].shape[2] == chunk.length
    assembled = two.assembler.assemble(text, two.namespace())
    assert assembled.cached_length + len(assembled.live_token_ids) == 40
    if assembled.cached_past_kv is not None:
        assert assembled.cached_past_kv[0][0].shape[2] == assembled.cached_length


# --- whose chunks they are -----------------------------------------------------------------------


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


# --- budgets -------------------------------------------------------------------------------------


class Monitor:
    """Looks at the budgets all the time, beside the requests."""

    def __init__(self, engine: KVBoost, disk_bytes: int) -> None:
        self._engine = engine
        self._disk_bytes = disk_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.problems: list[str] = []

    def _look(self) -> None:
        tier = self._engine.cache_manager._store.tier
        slots = slots_of(self._engine)
        while not self._stop.wait(0.0005):
            with self._engine.cache_manager._lock:
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


# --- evicted from RAM, found on disk ---------------------------------------------------------------


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
        in_ram._workspace.drop()
        result, wanted = (answer(engine, prompt, "chunk_kv_reuse") for engine in (on_disk, in_ram))
        assert shape_of(result) == shape_of(wanted)
        assert result.token_ids == wanted.token_ids
        assert turn == 0 or chain_tokens(result) > 100
        on_disk.cache_manager.check_integrity()
        prompt = [*prompt, *result.token_ids, *random_ids(40, seed=20 + turn)]


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
        return _REAL["pwritev"](*arguments)

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


# --- save and load beside a disk --------------------------------------------------------------------


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
        return _REAL["pwritev"](*arguments)

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
    assert threading.active_count() == before


# --- failures ------------------------------------------------------------------------------------------


def flip(engine: KVBoost, text: Sequence[int], chunk_number: int, at: int = 5000) -> None:
    """Damage one byte of a chunk of `text` on disk."""
    match = engine.cache_manager.match_prefix(list(text), engine.namespace())
    entry = tier_of(engine).entry(match.matches[chunk_number].chunk.chunk_id)
    assert entry is not None
    with slots_of(engine).open("r+b") as file:
        file.seek(entry.slot * tier_of(engine).slot_bytes + at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


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
        failing = Failing(_REAL[call], number, kinds[number % 3])
        monkeypatch.setattr(f"kvboost.disk.slot_file.os.{call}", failing)
        folder = tmp_path / str(number)
        scripted_run(make_engine, folder, script_answers, model)
        monkeypatch.setattr(f"kvboost.disk.slot_file.os.{call}", _REAL[call])
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
        failing = Failing(_REAL[call], 1, error, step=step, times=10**9)
        monkeypatch.setattr(f"kvboost.disk.slot_file.os.{call}", failing)
    scripted_run(make_engine, tmp_path / "disk", script_answers, model)
    for call in calls:
        monkeypatch.setattr(f"kvboost.disk.slot_file.os.{call}", _REAL[call])
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


# --- slow and hanging disks --------------------------------------------------------------------------


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(disk_cache, "_WAY_S", 0.2)


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
        return _REAL["preadv"](*arguments)

    monkeypatch.setattr("kvboost.disk.slot_file.os.preadv", slow)
    result = answers_as_baseline(two, [*text, 7])
    assert result.cached_tokens == 64
    assert result.ttft_ms >= 100  # reported time has the waiting in it


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


# --- threads, engines and processes ------------------------------------------------------------------


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
    assert reader._disk is not None
    text = random_ids(64, seed=1)
    stop = threading.Event()

    def be_busy() -> None:
        while not stop.wait(0.01):
            reader._disk.wake()

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
from tests.engine.test_approximate_reuse import long_model
from tests.tiny_models import random_ids, tiny_tokenizer
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
