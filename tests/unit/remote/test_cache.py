"""An engine with a shared store: what it asks, how long it waits, what it keeps, and what it writes."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.parts import engine_parts
from kvboost.remote import cache, writer
from kvboost.remote.byte_store import DENIED, FAILED, TIMEOUT, UNREACHABLE, StoreError
from kvboost.remote.keys import tenant_prefix
from tests.fixture_types import MakeEngine
from tests.threads import in_threads
from tests.tiny_models import random_ids, tiny_model
from tests.unit.remote.conftest import Sharing
from tests.unit.remote.memory_store import MemoryStore

PROMPT = random_ids(200, seed=1)  # 12 chunks of 16, and 8 tokens


def answered(engine: KVBoost, prompt: Any = PROMPT, **options: Any) -> Any:
    """An exact answer, as without any reuse."""
    result = engine.generate(prompt, max_new_tokens=3, mode="prefix_cache", **options)
    expected = engine.generate(prompt, max_new_tokens=3, mode="baseline")
    assert result.token_ids == expected.token_ids
    return result


def counts(engine: KVBoost) -> dict[str, Any]:
    found: dict[str, Any] = engine.cache_stats()["remote"]
    return found


def flushed(engine: KVBoost) -> dict[str, Any]:
    remote = engine.core.parts.remote
    assert remote is not None
    assert remote.flush(20.0)
    return counts(engine)


def filled(sharing: Sharing, **options: Any) -> KVBoost:
    """An engine that has read the prompt and written it."""
    engine = sharing(**options)
    answered(engine)
    assert flushed(engine)["written_chunks"] >= 192 // options.get("chunk_size", 16)
    return engine


# --- reading ---------------------------------------------------------------------------------------


def test_what_one_engine_has_read_another_has(sharing: Sharing, store: MemoryStore) -> None:
    filled(sharing)
    before = dict(store.calls)
    second = sharing()
    result = answered(second)
    assert result.cached_tokens >= 192
    assert all(
        span.reason.startswith("remote, ") for span in result.spans if span.reason != "" and span.end <= 192
    )
    assert store.calls["peek"] - before["peek"] == 1
    assert counts(second)["read_chunks"] == 12
    assert counts(second)["misses"] == {}
    assert answered(second).cached_tokens == 199
    assert store.calls["peek"] - before["peek"] == 1, "what is here is not asked for again"


def test_in_baseline_and_for_short_prompts_nobody_is_asked(sharing: Sharing, store: MemoryStore) -> None:
    engine = sharing(remote_write="reused")
    engine.generate(PROMPT, max_new_tokens=2, mode="baseline")
    answered(engine, PROMPT[:20])
    assert not store.calls


@pytest.mark.parametrize(
    "options",
    [
        {"bit_exact": True},
        {"kv_cache_bits": 8},
        {"kv_cache_bits": 4},
        {"kv_cache_bits": "k8v4"},
        {"chunk_boundary_window": 4},
        {"overlap_k": 8, "sink_tokens": 4},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_as_from_ram(options: dict[str, Any], sharing: Sharing) -> None:
    """What comes from the store is what the engine that wrote it has."""
    first, second = sharing(**options), sharing(**options)
    first.warm(PROMPT)
    flushed(first)
    expected = first.generate(PROMPT, max_new_tokens=3, mode="prefix_cache")
    result = second.generate(PROMPT, max_new_tokens=3, mode="prefix_cache")
    assert result.token_ids == expected.token_ids
    assert result.cached_tokens >= 176
    assert counts(second)["read_tokens"] >= 176


@pytest.mark.parametrize(
    "other",
    [
        {"kv_cache_bits": 8},
        {"kv_cache_bits": 4},
        {"bit_exact": True},
        {"overlap_k": 8, "sink_tokens": 4},
        {"dtype": torch.bfloat16},
        {"model": lambda: tiny_model("llama", seed=5)},
        {"model": lambda: tiny_model("qwen2")},
        {"cache_salt": "another"},
    ],
    ids=["8 bits", "4 bits", "bit-exact", "overlap", "dtype", "weights", "architecture", "salt"],
)
def test_kinds_of_kv_do_not_meet(other: dict[str, Any], sharing: Sharing) -> None:
    """Other weights, numbers or encodings: neither sees the other's, in whichever order they come."""
    made = {name: value() if callable(value) else value for name, value in other.items()}
    for one, two in ((made, {}), ({}, made)):
        first, second = sharing(**one, remote_write="all"), sharing(**two)
        text = random_ids(200, seed=len(one))
        first.warm(text)
        flushed(first)
        result = second.generate([*random_ids(9, seed=3), *text], max_new_tokens=2, recompute_ratio=0.2)
        assert result.cached_tokens == 0
        assert second.generate(text, max_new_tokens=2, mode="prefix_cache").cached_tokens == 0
        assert counts(second)["read_chunks"] == 0
        first.close()


def test_machines_that_cut_otherwise(sharing: Sharing) -> None:
    """Chunks of other sizes have other names; what was read last behind a chunk is found all the same."""
    filled(sharing)
    assert answered(sharing(chunk_size=24)).cached_tokens == 16


def test_a_document_at_another_place(
    sharing: Sharing, approximate_reuse: list[Any], store: MemoryStore
) -> None:
    filled(sharing, chunk_size=64)
    second = sharing(recompute_ratio=0.1, chunk_size=64)
    prompt = [*random_ids(23, seed=4), *PROMPT, *random_ids(30, seed=5)]
    result = second.generate(prompt, max_new_tokens=2)
    assert result.cached_tokens >= 0.9 * len(PROMPT)
    assert approximate_reuse
    assert store.calls["peek"] == 2


def test_exact_reuse_asks_for_no_windows(sharing: Sharing, store: MemoryStore) -> None:
    answered(sharing())
    sharing().generate(random_ids(200, seed=7), max_new_tokens=2, recompute_ratio=0.1)
    exact, anywhere = store.peeked
    assert exact == 13 + 14, "is it there, and what follows it"
    assert anywhere > exact


def test_damage_is_a_miss_is_counted_and_deleted(sharing: Sharing, store: MemoryStore) -> None:
    filled(sharing)
    records = [name for name, value in store.values.items() if value.startswith(b"KVBPART")]
    for name in records[:3]:
        store.values[name] = store.values[name][:-1] + b"?"
    engine = sharing()
    answered(engine)
    deadline = time.monotonic() + 5  # those behind the first one are found while nobody waits
    while any(store.values.get(name, b"").endswith(b"?") for name in records) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(store.values.get(name, b"").endswith(b"?") for name in records)
    assert set(counts(engine)["misses"]) == {"corrupt"}
    assert answered(engine).cached_tokens == 199


def test_swapped_records_are_misses(sharing: Sharing, store: MemoryStore) -> None:
    filled(sharing)
    names = list(store.values)
    values = [store.values[name] for name in names]
    for shift in (1, 2, 5):
        store.values = dict(zip(names, values[shift:] + values[:shift], strict=True))
        answered(sharing())


# --- waiting ---------------------------------------------------------------------------------------


def test_no_longer_than_the_deadline(
    sharing: Sharing, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_LEAST_S", 0.2)
    engine = sharing(remote_write="reused")
    store.gate.clear()  # from now on it does not answer
    taken = []
    for number in range(4):
        started = time.monotonic()
        engine.generate(random_ids(200, seed=number), max_new_tokens=1, mode="prefix_cache")
        taken.append(time.monotonic() - started)
    store.gate.set()
    assert all(0.2 <= each < 2.0 for each in taken[:2]), taken
    assert max(taken[2:]) < 0.2, "nobody waits for a store that is known to be down"
    found = counts(engine)
    assert found["misses"] == {TIMEOUT: 2}
    assert found["skipped"] == {TIMEOUT: 2}
    assert found["state"] == TIMEOUT
    assert found["outages"] == 1


@pytest.mark.parametrize("reason", [UNREACHABLE, DENIED, FAILED, TIMEOUT])
def test_a_store_that_fails_is_tried_again_by_itself(
    reason: str, sharing: Sharing, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.remote.breaker._TRIAL_S", 0.05)
    monkeypatch.setattr(writer, "_IDLE_S", 0.05)
    engine = sharing()
    store.error = StoreError(reason)
    for number in range(3):
        assert answered(engine, random_ids(100, seed=number)).cached_tokens == 0
    assert counts(engine)["state"] == reason
    asked = store.calls["peek"]
    assert asked <= 2
    answered(engine, random_ids(100, seed=9))
    assert store.calls["peek"] == asked
    store.error = None
    deadline = time.monotonic() + 5
    while counts(engine)["state"] != "up" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert counts(engine)["state"] == "up"
    answered(engine, random_ids(100, seed=10))
    assert store.calls["peek"] == asked + 1


def test_a_store_that_was_slow_is_asked_again(
    sharing: Sharing, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where asking took longer than it saves, somebody must notice when it no longer does."""
    monkeypatch.setattr(cache, "_LEAST_S", 0.1)
    filled(sharing)
    engine = sharing()
    store.delay_s = 0.15
    for number in range(4):
        answered(engine, random_ids(100, seed=20 + number))
    time.sleep(1.5)  # a trial sees how slow it is
    asked = store.calls["peek"]
    for number in range(3):
        answered(engine, random_ids(100, seed=30 + number))
    assert store.calls["peek"] == asked, "too slow to pay"
    assert counts(engine)["skipped"]["too slow to pay"] == 3
    store.delay_s = 0.0
    deadline = time.monotonic() + 5
    while not (found := engine.generate(PROMPT, max_new_tokens=1, mode="prefix_cache").cached_tokens):
        assert time.monotonic() < deadline, counts(engine)
        engine.clear()
        time.sleep(0.1)
    assert found >= 192


def test_an_error_nobody_thought_of_is_a_miss(sharing: Sharing, store: MemoryStore) -> None:
    engine = sharing()
    store.peek = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    answered(engine)
    assert counts(engine)["misses"] == {"ZeroDivisionError": 1}


# --- room ------------------------------------------------------------------------------------------


def test_the_budget_holds_at_every_moment(sharing: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(sharing)
    room = 5 * 16 * 768  # bytes of 5 chunks
    engine = sharing(max_cache_bytes=room)
    most = []
    real = engine.core.parts.manager.shared.take_in

    def take_in(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        most.append(engine.cache_stats()["bytes"])
        engine.cache_manager.check_integrity()
        return found

    monkeypatch.setattr(engine.core.parts.manager.shared, "take_in", take_in)
    answered(engine)
    assert most
    assert max(most) <= room
    engine.cache_manager.check_integrity()


def test_no_room_at_all(sharing: Sharing) -> None:
    filled(sharing)
    engine = sharing(max_chunks=0)
    assert answered(engine).cached_tokens == 0
    assert counts(engine)["read_chunks"] == 0
    found = counts(engine)
    assert found["misses"] or found["skipped"], "somebody can see why"


def test_many_requests_at_once(sharing: Sharing) -> None:
    filled(sharing)
    engine = sharing(max_chunks=20)
    texts = [[*PROMPT[: 40 + 13 * number], *random_ids(20, seed=number)] for number in range(8)]
    expected = [engine.generate(text, max_new_tokens=2, mode="baseline").token_ids for text in texts]

    def work(number: int) -> None:
        for _ in range(3):
            result = engine.generate(texts[number], max_new_tokens=2, mode="prefix_cache")
            assert result.token_ids == expected[number]

    in_threads(8, work)
    engine.cache_manager.check_integrity()


# --- writing ---------------------------------------------------------------------------------------


def test_only_what_was_reused(sharing: Sharing, store: MemoryStore) -> None:
    engine = sharing(remote_write="reused")
    answered(engine)
    assert flushed(engine)["written_chunks"] == 0
    answered(engine, [*PROMPT[:64], *random_ids(30, seed=2)])
    assert flushed(engine)["written_chunks"] == 4
    assert all(name.startswith(tenant_prefix("")) for name in store.values)


def test_a_store_that_is_full(sharing: Sharing, store: MemoryStore) -> None:
    store.max_bytes = 30_000
    engine = sharing()
    answered(engine)
    engine.core.parts.remote.flush(5.0)  # type: ignore[union-attr]
    found = counts(engine)
    assert found["dropped"]["full"] >= 1
    assert found["state"] == "up", "one can still read from it"
    assert answered(engine).cached_tokens == 199


def test_a_queue_that_is_full(sharing: Sharing, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MOST_PENDING", 10)
    monkeypatch.setattr(cache, "_LEAST_S", 0.1)
    engine = sharing()
    engine.generate(random_ids(20, seed=1), max_new_tokens=1, mode="prefix_cache")
    store.gate.clear()
    for number in range(5):
        engine.warm(random_ids(200, seed=number))
    assert counts(engine)["pending_chunks"] <= 10
    assert counts(engine)["dropped"]["queue full"] > 0
    store.gate.set()
    engine.core.parts.remote.flush(5.0)  # type: ignore[union-attr]


def test_what_is_evicted_before_is_not_written(
    sharing: Sharing, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sharing(max_chunks=13)
    real = store.claim
    gate = threading.Event()

    def claim(names: Any) -> Any:
        gate.wait(10.0)
        return real(names)

    monkeypatch.setattr(store, "claim", claim)
    answered(engine)
    for number in range(3):
        engine.warm(random_ids(200, seed=50 + number))
    gate.set()
    found = flushed(engine)
    assert found["dropped"]["evicted before"] > 0
    assert answered(sharing()).cached_tokens % 16 in (0, 7)


def test_a_neighbour_that_claimed_and_died_is_not_believed_for_ever(
    sharing: Sharing, store: MemoryStore
) -> None:
    """What another has claimed and not written is written when it is computed again."""
    first = sharing()
    store.max_bytes = 0  # claimed, and then there is no room
    answered(first)
    first.core.parts.remote.flush(5.0)  # type: ignore[union-attr]
    store.max_bytes = 1 << 40
    second = sharing()
    second.warm(PROMPT)
    flushed(second)
    store.claims.clear()  # they run out
    second.clear()
    second.warm(PROMPT)
    flushed(second)
    assert [value for value in store.values.values() if value.startswith(b"KVBPART")]


def test_weights_that_changed_unseen_take_back_what_was_written(sharing: Sharing, store: MemoryStore) -> None:
    engine = filled(sharing)
    assert any(value.startswith(b"KVBPART") for value in store.values.values())
    engine.core.parts.forget_all()
    flushed(engine)
    assert not any(value.startswith(b"KVBPART") for value in store.values.values())
    answered(engine)
    assert not any(value.startswith(b"KVBPART") for value in store.values.values())


def test_a_gated_model_asks_and_writes_nothing(sharing: Sharing, store: MemoryStore) -> None:
    engine = sharing("dynamic")
    engine.generate(random_ids(150, seed=1), max_new_tokens=2)  # longer than where its rope changes
    assert engine.core.parts.remote.flush(5.0)  # type: ignore[union-attr]
    assert not store.calls
    trained = sharing()
    trained.model.train()  # dropout, for one
    trained.generate(PROMPT, max_new_tokens=2)
    assert not store.calls


# --- the end ---------------------------------------------------------------------------------------


def test_closed_twice(sharing: Sharing, store: MemoryStore) -> None:
    engine = sharing()
    answered(engine)
    engine.close()
    engine.close()
    assert store.is_closed
    assert any(value.startswith(b"KVBPART") for value in store.values.values()), "it was written before"


def test_closing_does_not_wait_for_a_store_that_is_down(sharing: Sharing, store: MemoryStore) -> None:
    engine = sharing()
    store.error = StoreError(UNREACHABLE)
    answered(engine)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5.0


def test_an_engine_that_nobody_closed(
    store: MemoryStore, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be collected, and its threads end."""
    monkeypatch.setattr(engine_parts, "open_store", lambda _address: store)
    before = set(threading.enumerate())
    engine = KVBoost(tiny_model("llama"), tokenizer, chunk_size=16, remote_cache="redis://in-memory")
    engine.generate(PROMPT, max_new_tokens=2, mode="prefix_cache")
    gone = weakref.ref(engine.core.parts)
    del engine
    gc.collect()
    assert gone() is None
    assert store.is_closed
    deadline = time.monotonic() + 5
    while (left := _ours() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def _ours() -> set[threading.Thread]:
    names = ("kvboost-remote", "kvboost-reader", "kvboost-s3")
    return {thread for thread in threading.enumerate() if thread.name in names}


def test_after_a_fork_the_child_computes_by_itself(sharing: Sharing, store: MemoryStore) -> None:
    engine = filled(sharing)
    calls = sum(store.calls.values())
    child = os.fork()
    if child == 0:
        try:
            before = sum(store.calls.values())
            engine.generate(PROMPT, max_new_tokens=1, mode="prefix_cache")
            engine.generate(random_ids(100, seed=7), max_new_tokens=1, mode="prefix_cache")
            engine.cache_stats()
            engine.close()
            os._exit(0 if sum(store.calls.values()) == before else 3)
        finally:
            os._exit(4)
    deadline = time.monotonic() + 30
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if status == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status == (child, 0), status
    assert not store.is_closed
    answered(engine, random_ids(100, seed=8))
    assert flushed(engine)["written_chunks"] > 12
    assert sum(store.calls.values()) > calls


def test_without_the_option_nothing_is_there(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.core.parts.remote is None
    assert "remote" not in engine.cache_stats()
