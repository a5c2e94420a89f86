"""Explaining, pinning, counting, saving and loading, on tiny models."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.choices import Origin
from kvboost.errors import CacheFileError
from tests.fixture_types import MakeEngine
from tests.threads import in_threads
from tests.tiny_models import random_ids, tiny_model


def test_explain_covers_the_prompt_and_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    text = random_ids(40, seed=1, high=100)
    engine.warm(text)
    before = engine.cache_stats()
    prompt = text[:21] + random_ids(5, seed=2, low=100)
    explanation = engine.explain(prompt)
    assert engine.cache_stats() == before
    assert [(s.start, s.end, s.origin) for s in explanation] == [
        (0, 16, Origin.EXACT),
        (16, 21, Origin.EXACT),
        (21, 26, Origin.LIVE),
    ]
    assert explanation.spans[0].donor_positions == (0, 16)
    got, expected = prompt[21], text[21]
    assert explanation.spans[-1].reason == (
        f"diverged at token 21: expected {expected} {engine.tokenizer.decode([expected])!r}, "
        f"got {got} {engine.tokenizer.decode([got])!r}"
    )
    assert explanation.cached_tokens == 21
    assert "21 of 26 tokens" in str(explanation)
    assert json.loads(json.dumps(explanation.to_dict()))["spans"][2]["origin"] == "live"
    result = engine.generate(prompt, max_new_tokens=2, mode="prefix_cache")
    assert [(s.start, s.end, s.origin) for s in result.spans] == [
        (s.start, s.end, s.origin) for s in explanation
    ]


def test_explain_names_every_kind_of_miss(make_engine: MakeEngine) -> None:
    engine = make_engine(max_chunks=3)
    first, second = random_ids(48, seed=3), random_ids(48, seed=4)
    assert engine.explain(first).spans[0].reason == "never stored"
    engine.warm(first)
    engine.warm(second)
    assert engine.explain(first).spans[0].reason == "evicted"
    assert engine.explain(second, cache_salt="other").spans[0].reason == "never stored"
    gated = make_engine("dynamic")
    assert gated.explain(random_ids(90, seed=5)).spans[0].reason == "gated: rope changes with length"
    with torch.no_grad():
        engine.model.lm_head.weight[0, 0] += 1.0
    assert engine.explain(second).spans[0].reason == "other namespace"


@pytest.mark.parametrize("leaves_at", range(1, 49))
def test_a_near_miss_names_the_very_token(leaves_at: int, make_engine: MakeEngine) -> None:
    engine = make_engine()
    text = random_ids(48, seed=6, high=100)
    engine.warm(text)
    prompt = text[:leaves_at] + random_ids(3, seed=7, low=100)
    explanation = engine.explain(prompt)
    assert explanation.cached_tokens == leaves_at
    if leaves_at < 48:
        assert explanation.spans[-1].reason.startswith(
            f"diverged at token {leaves_at}: expected {text[leaves_at]} "
        )
    else:
        assert explanation.spans[-1].reason == "never stored"


def test_a_pin_is_taken_back_after_more_was_stored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    text = random_ids(80, seed=9)
    engine.warm(text[:40])
    assert engine.pin(text) == 40
    engine.warm(text)
    assert engine.unpin(text) == 80
    assert engine.cache_stats()["pinned_chunks"] == 0
    engine.unpin(text)  # once too often
    engine.clear()
    assert engine.cache_stats()["chunks"] == 0


def test_pinned_text_outlives_the_rest(make_engine: MakeEngine) -> None:
    engine = make_engine(max_chunks=5)
    pinned = random_ids(40, seed=8)
    engine.warm(pinned)
    assert engine.pin(pinned) == 40
    for seed in range(20, 30):
        engine.warm(random_ids(48, seed=seed))
    assert engine.explain([*pinned, 7]).cached_tokens == 40
    assert engine.cache_stats()["pinned_chunks"] == 3
    assert engine.unpin(pinned) == 40
    for seed in range(30, 40):
        engine.warm(random_ids(80, seed=seed))
    assert engine.explain([*pinned, 7]).cached_tokens == 0


def test_stats_tell_what_was_saved(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(200, seed=9)
    assert engine.cache_stats()["prefill_seconds_saved"] is None
    engine.generate(prompt, max_new_tokens=2)
    engine.generate(prompt, max_new_tokens=2)
    stats = engine.cache_stats()
    assert stats["tokens_saved"] == 199
    assert stats["hits"] == {"exact": 1, "approximate": 0}
    assert stats["misses"] == {"never stored": 1}
    assert stats["prefill_seconds_saved"] == pytest.approx(199 / stats["prefill_tokens_per_second"])
    held = [entry.chunk for entry in engine.cache_manager._store.entries.values()]
    assert stats["bytes"] == sum(chunk.memory_bytes() for chunk in held)


def test_save_and_load(make_engine: MakeEngine, tmp_path: Path) -> None:
    one = make_engine(dtype=torch.bfloat16)
    texts = [random_ids(50, seed=seed) for seed in range(4)]
    for text in texts:
        one.warm(text)
    one.warm(texts[0], cache_salt="secret")
    one.warm(texts[1], position_offset=64)
    saved = one.save(tmp_path / "cache")
    assert saved == one.cache_stats()["chunks"]
    assert "secret" not in (tmp_path / "cache" / "cache.json").read_text()
    two = make_engine(dtype=torch.bfloat16)
    report = two.load(tmp_path / "cache")
    assert (report.loaded, report.corrupt, report.no_room) == (saved, 0, 0)
    for text in texts:
        prompt = [*text, 9, 8]
        result = two.generate(prompt, max_new_tokens=6, mode="prefix_cache")
        assert result.cached_tokens == 50
        assert result.token_ids == one.generate(prompt, max_new_tokens=6, mode="prefix_cache").token_ids
    assert two.explain([*texts[0], 9], cache_salt="secret").cached_tokens == 50
    assert two.explain([*texts[1], 9], cache_salt="secret").cached_tokens == 0
    assert two.load(tmp_path / "cache").loaded == saved  # again: nothing doubled
    assert two.cache_stats()["chunks"] >= saved


def test_a_second_save_replaces_the_first(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    engine.warm(random_ids(50, seed=1))
    engine.save(tmp_path / "cache")
    engine.clear()
    engine.warm(random_ids(20, seed=2))
    engine.save(tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert make_engine().load(tmp_path / "cache").loaded == 2


def test_another_models_cache_is_refused_by_name(make_engine: MakeEngine, tmp_path: Path) -> None:
    one = make_engine()
    one.model.config._name_or_path = "first/model"
    one.warm(random_ids(50, seed=1))
    one.save(tmp_path / "cache")
    for other in (
        make_engine(model=tiny_model("llama", seed=1)),
        make_engine(dtype=torch.bfloat16),
        make_engine(bit_exact=True),
        make_engine("qwen3"),
    ):
        with pytest.raises(CacheFileError, match="first/model"):
            other.load(tmp_path / "cache")
        assert other.cache_stats()["chunks"] == 0


def test_a_cache_larger_than_the_budget_loads_what_fits(make_engine: MakeEngine, tmp_path: Path) -> None:
    one = make_engine()
    for seed in range(3):
        one.warm(random_ids(64, seed=seed))
    one.save(tmp_path / "cache")
    two = make_engine(max_chunks=5)
    report = two.load(tmp_path / "cache")
    assert (report.loaded, report.no_room) == (5, 7)
    two.cache_manager.check_integrity()


def test_damage_is_left_out_and_never_served(make_engine: MakeEngine, tmp_path: Path) -> None:
    one = make_engine()
    text = random_ids(80, seed=1)
    one.warm(text)
    one.save(tmp_path / "cache")
    shard = next((tmp_path / "cache").glob("*.records"))
    whole = shard.read_bytes()
    places = [place for place, byte in enumerate(whole) if byte]  # between records there are zeros
    expected = one.generate([*text, 5], max_new_tokens=4, mode="baseline").token_ids
    draw = random.Random(0)
    model = tiny_model("llama")
    for trial in range(60):
        damaged = bytearray(whole)
        if trial % 10 == 0:
            damaged = damaged[: draw.choice(places)]
        else:
            damaged[draw.choice(places)] ^= 1 << draw.randrange(8)
        shard.write_bytes(damaged)
        two = make_engine(model=model)
        report = two.load(tmp_path / "cache")
        assert report.loaded + report.corrupt + report.no_room == 5
        assert report.corrupt >= 1
        assert two.cache_stats()["misses"]["corrupt"] == report.corrupt
        assert two.generate([*text, 5], max_new_tokens=4, mode="prefix_cache").token_ids == expected


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": "x"}',
        '{"format": "kvboost-cache", "version": 9}',
        '{"format": "kvboost-cache", "version": 3}',
    ],
)
def test_a_damaged_header_is_refused(content: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "cache.json").write_text(content)
    with pytest.raises(CacheFileError, match=r"cache\.json|version 9"):
        make_engine().load(tmp_path)


def test_save_does_not_touch_a_folder_with_other_files(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(CacheFileError, match="other files"):
        make_engine().save(tmp_path)
    with pytest.raises(CacheFileError, match="is a file"):
        make_engine().save(tmp_path / "thesis.txt")
    with pytest.raises(CacheFileError, match="no saved cache"):
        make_engine().load(tmp_path / "nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_save_that_is_cut_off_leaves_the_one_before(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.warm(random_ids(50, seed=1))
    engine.save(tmp_path / "cache")
    engine.warm(random_ids(50, seed=2))

    def full_disk(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kvboost.disk.snapshot._sync", full_disk)
        with pytest.raises(OSError, match="No space"):
            engine.save(tmp_path / "cache")
    assert make_engine().load(tmp_path / "cache").loaded == 4
    engine.save(tmp_path / "cache")
    assert make_engine().load(tmp_path / "cache").loaded == 8
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize(("max_chunks", "engines"), [(None, 1), (None, 2), (6, 1)])
def test_8_threads_with_20_prompts_each(
    max_chunks: int | None, engines: int, make_engine: MakeEngine
) -> None:
    model = tiny_model("llama")
    served = [make_engine(model=model, max_chunks=max_chunks) for _ in range(engines)]
    prompts = [random_ids(30 + k % 5, seed=k % 7) + random_ids(1 + k % 9, seed=500 + k) for k in range(160)]
    expected = [served[0].generate(p, max_new_tokens=4, mode="baseline").token_ids for p in prompts]
    results: list[Any] = [None] * len(prompts)

    def work(number: int) -> None:
        for index in range(number, len(prompts), 8):
            engine = served[index % engines]
            results[index] = engine.generate(prompts[index], max_new_tokens=4, mode="prefix_cache").token_ids

    in_threads(8, work)
    assert results == expected
    for engine in served:
        engine.cache_manager.check_integrity()
        keys = [entry.node.key for entry in engine.cache_manager._store.entries.values()]
        assert len(keys) == len(set(keys))


def test_threads_with_text_and_chats(make_engine: MakeEngine) -> None:
    engine = make_engine()
    texts = [f"A story about the number {k % 5}. " * 3 + f"It ends with {k}." for k in range(32)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts: list[Any] = [*texts, *chats]
    expected = [engine.generate(p, max_new_tokens=3, mode="baseline").output_text for p in prompts]
    results: list[Any] = [None] * len(prompts)

    def work(number: int) -> None:
        for index in range(number, len(prompts), 8):
            results[index] = "".join(engine.stream(prompts[index], max_new_tokens=3, mode="prefix_cache"))
            engine.explain(prompts[index])

    in_threads(8, work)
    assert results == expected


def test_look_ups_do_not_wait_for_a_forward(make_engine: MakeEngine) -> None:
    from kvboost.run.decode import model_lock

    engine = make_engine()
    text = random_ids(40, seed=1)
    engine.warm(text)
    done = threading.Event()

    def look_up() -> None:
        engine.explain([*text, 3])
        engine.cache_stats()
        done.set()

    with model_lock(engine.model):  # as if a forward were running
        thread = threading.Thread(target=look_up)
        thread.start()
        assert done.wait(10)
    thread.join()
