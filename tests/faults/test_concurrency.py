"""Many threads on one store: never wrong KV, never over the budget."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvboost.identity.namespace import Namespace
from kvboost.kv.layout import Packed
from kvboost.store.forest import ROOT
from kvboost.store.manager import KVCacheManager
from tests.threads import in_threads
from tests.unit.fake_kv import CODEC, TOKEN_SIZE, check_cover, check_kv, extractor, store, user_chunk

THREADS = 8
CHUNK = 4
SALTED = Namespace("f" * 64, "family", "salt")


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Let threads interrupt each other far more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def a_text(rng: random.Random) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randrange(1, 13))]


def slow(tokens: Sequence[int]) -> Callable[[int, int], Packed]:
    """An extraction during which other threads get their turn."""
    extract = extractor(tokens)

    def extracting(start: int, end: int) -> Packed:
        time.sleep(0)
        return extract(start, end)

    return extracting


@pytest.mark.parametrize(("max_chunks", "max_tokens"), [(5, None), (None, 14), (3, 9), (None, None)], ids=str)
def test_threads_hammering_one_store(max_chunks: int | None, max_tokens: int | None) -> None:
    budget = None if max_tokens is None else max_tokens * TOKEN_SIZE
    manager = KVCacheManager(max_chunks, budget, chunk_size=CHUNK)

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(120):
            tokens, namespace = a_text(rng), rng.choice([ROOT, SALTED])
            action = rng.randrange(8)
            if action < 3:
                cuts = [*range(CHUNK, len(tokens), CHUNK), len(tokens)]
                manager.store_prefix(tokens, cuts, CODEC, slow(tokens), namespace)
            elif action < 6:
                match = manager.match_prefix(tokens, namespace, hold=True)
                check_cover(match.matches, match.length)
                time.sleep(0)
                check_kv(match.matches, tokens)
                manager.release(match, used_tokens=rng.randrange(13))
            elif action == 6:
                check_kv(manager.find_matching_chunks(tokens, namespace), tokens)
                manager.store(user_chunk(tokens, 0, len(tokens)))
            else:
                manager.pin(tokens, namespace)
                manager.unpin(tokens, namespace)
                manager.get("nothing")
                manager.count_request(reused=0, total=1, reason="never stored")
            stats = manager.stats()
            assert budget is None or stats["bytes"] <= budget
            assert max_chunks is None or stats["chunks"] <= max_chunks
            if number == 0:
                manager.check_integrity()

    in_threads(THREADS, work)
    manager.check_integrity()
    for entry in manager._store.entries.values():
        assert entry.readers == 0


def test_what_one_thread_holds_no_other_evicts() -> None:
    manager = KVCacheManager(4, None, chunk_size=CHUNK)
    mine = list(range(8))
    store(manager, mine)
    match = manager.match_prefix(mine, hold=True)

    def work(number: int) -> None:
        for step in range(60):
            store(manager, [1000 + 100 * number + step] * 3)

    in_threads(THREADS, work)
    assert manager.match_prefix(mine).length == 8
    check_kv(match.matches, mine)
    manager.release(match)
    manager.check_integrity()


def test_the_same_text_stored_by_all_is_stored_once() -> None:
    manager = KVCacheManager(None, None, chunk_size=CHUNK)
    tokens = list(range(40))

    def work(_number: int) -> None:
        for end in range(4, 41, 4):
            cuts = list(range(CHUNK, end + 1, CHUNK))
            manager.store_prefix(tokens[:end], cuts, CODEC, slow(tokens))

    in_threads(THREADS, work)
    manager.check_integrity()
    assert len(manager) == 10
    assert manager.stats()["bytes"] == 40 * TOKEN_SIZE
    check_kv(manager.find_matching_chunks(tokens), tokens)


def test_texts_that_extend_each_other_are_all_found() -> None:
    """Every thread stores the same beginning with a tail of another length, and goes on from there."""
    manager = KVCacheManager(None, None, chunk_size=16)

    def text(number: int) -> list[int]:
        return [*range(number + 1), 500 + number, 501, 502]

    def work(number: int) -> None:
        for _ in range(10):
            for tokens in (text(number)[: number + 1], text(number)):
                manager.store_prefix(tokens, [len(tokens)], CODEC, slow(tokens))

    in_threads(THREADS, work)
    manager.check_integrity()
    for number in range(THREADS):
        tokens = text(number)
        store(manager, tokens)  # another thread may have been in the way once
        match = manager.match_prefix(tokens)
        check_kv(match.matches, tokens)
        assert match.length == len(tokens)


def test_clearing_while_others_store_and_read() -> None:
    manager = KVCacheManager(6, None, chunk_size=CHUNK)

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(80):
            tokens = a_text(rng)
            if number == 0:
                manager.clear()
            else:
                manager.store_prefix(tokens, [len(tokens)], CODEC, slow(tokens))
                check_kv(manager.find_matching_chunks(tokens), tokens)

    in_threads(THREADS, work)
    manager.check_integrity()
    manager.clear()
    assert len(manager) == 0
