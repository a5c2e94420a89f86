"""What fails while storing must cost nothing but the chunk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.errors import UnstorableKVError
from kvboost.kv.layout import Packed
from kvboost.store.forest import ROOT
from kvboost.store.manager import KVCacheManager
from tests.unit.fake_kv import (
    CODEC,
    LAYOUT,
    TOKEN_SIZE,
    check_cover,
    check_kv,
    extractor,
    past_of,
    store,
    user_chunk,
)

CHUNK = 4


class DeviceGoneError(RuntimeError):
    """Stands for whatever a copy from a device may raise."""


def failing_at(tokens: Sequence[int], at: int, error: type[BaseException]) -> Callable[[int, int], Packed]:
    """Extracts well until it reaches position `at`."""
    extract = extractor(tokens)

    def failing(start: int, end: int) -> Packed:
        if end > at:
            raise error
        return extract(start, end)

    return failing


def length_of(manager: KVCacheManager, tokens: Sequence[int]) -> int:
    match = manager.match_prefix(tokens)
    check_cover(match.matches, match.length)
    check_kv(match.matches, tokens)
    return match.length


@pytest.mark.parametrize("error", [DeviceGoneError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 4, 8, 10])
def test_an_extraction_that_fails_leaves_everything_before_it(at: int, error: type[BaseException]) -> None:
    manager = KVCacheManager(None, 12 * TOKEN_SIZE, chunk_size=CHUNK)
    tokens = list(range(11))
    with pytest.raises(error):
        manager.store_prefix(tokens, [4, 8, 11], CODEC, failing_at(tokens, at, error))
    manager.check_integrity()
    assert length_of(manager, tokens) == at - at % CHUNK
    assert manager.stats()["bytes"] == (at - at % CHUNK) * TOKEN_SIZE
    report = store(manager, tokens)
    assert not report.refused
    assert length_of(manager, tokens) == 11
    manager.check_integrity()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 12)),
        min_size=1,
        max_size=12,
    ),
    st.one_of(st.none(), st.integers(1, 4)),
)
@settings(deadline=None, max_examples=60)
def test_failures_at_any_point_keep_the_books_right(
    stores: list[tuple[list[int], int]], max_chunks: int | None
) -> None:
    manager = KVCacheManager(max_chunks, 16 * TOKEN_SIZE, chunk_size=CHUNK)
    for tokens, at in stores:
        cuts = [*range(CHUNK, len(tokens), CHUNK), len(tokens)]
        with contextlib.suppress(DeviceGoneError):
            manager.store_prefix(tokens, cuts, CODEC, failing_at(tokens, at, DeviceGoneError))
        manager.check_integrity()
        length_of(manager, tokens)
    manager.clear()
    assert (len(manager), manager.stats()["bytes"]) == (0, 0), "nothing is left held or charged"


def test_a_failure_while_a_pinned_tail_is_replaced_keeps_the_pin_on_the_rest() -> None:
    """The tail may have made room already; what is before it stays pinned."""
    manager = KVCacheManager(None, None, chunk_size=CHUNK)
    tokens = list(range(8))
    store(manager, tokens[:6])
    manager.pin(tokens[:6])
    with pytest.raises(DeviceGoneError):
        manager.store_prefix(tokens, [4, 8], CODEC, failing_at(tokens, 6, DeviceGoneError))
    manager.check_integrity()
    assert length_of(manager, tokens) >= 4
    assert manager.stats()["pinned_chunks"] >= 1
    manager.unpin(tokens[:6])
    assert manager.stats()["pinned_chunks"] == 0
    manager.clear()
    assert len(manager) == 0


def test_a_text_that_cannot_be_decoded_costs_only_its_chunk() -> None:
    manager = KVCacheManager(None, None, chunk_size=CHUNK)

    def text_of(ids: Sequence[int]) -> str:
        if 5 in ids:
            raise UnicodeError("no such text")
        return ""

    with pytest.raises(UnicodeError):
        manager.store_prefix(range(12), [4, 8, 12], CODEC, extractor(range(12)), ROOT, text_of=text_of)
    manager.check_integrity()
    assert length_of(manager, range(12)) == 4


def test_a_chunk_that_cannot_be_copied_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = KVCacheManager(2, None, chunk_size=CHUNK)
    chunk = user_chunk(range(4), 0, 4)
    with monkeypatch.context() as patch:
        patch.setattr(type(LAYOUT), "pack", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            manager.store(chunk)
    manager.check_integrity()
    assert len(manager) == 0
    assert manager.store(chunk)
    assert length_of(manager, range(4)) == 4


def test_buffers_of_another_size_than_charged_are_noticed() -> None:
    """The books rely on extract giving what was asked for; the integrity check proves it did."""
    manager = KVCacheManager(None, None, chunk_size=CHUNK)
    too_long = LAYOUT.pack(past_of(range(9), 0, 9))
    with pytest.raises(AssertionError, match="room was made for"):
        manager.store_prefix(range(4), [4], CODEC, lambda *_: too_long)
    manager.check_integrity()
    assert len(manager) == 0


def refused(_start: int, _end: int) -> Packed:
    """Stands for KV that the encoding cannot hold."""
    raise UnstorableKVError("not finite")


def test_a_tail_comes_back_where_its_successor_cannot_be_stored() -> None:
    manager = KVCacheManager(None, None, chunk_size=CHUNK)
    store(manager, range(6))
    manager.pin(range(6))
    report = manager.store_prefix(range(8), [4, 8], CODEC, refused)
    manager.check_integrity()
    assert report.refused == {"not finite": 1}
    assert length_of(manager, range(8)) == 6
    assert manager.stats()["pinned_chunks"] == 2


def test_a_tail_that_is_stored_anew_meanwhile_is_not_put_back_twice() -> None:
    """Its successor fails while another thread is just storing the tail again."""
    manager = KVCacheManager(None, None, chunk_size=CHUNK)
    store(manager, range(6))
    inside, go_on = threading.Event(), threading.Event()

    def slow(start: int, end: int) -> Packed:
        inside.set()
        assert go_on.wait(10)
        return extractor(range(6))(start, end)

    other = threading.Thread(target=lambda: manager.store_prefix(range(6), [4, 6], CODEC, slow))

    def fail_while_other_stores(_start: int, _end: int) -> Packed:
        other.start()
        assert inside.wait(10)
        raise UnstorableKVError("not finite")

    manager.store_prefix(range(8), [4, 8], CODEC, fail_while_other_stores)
    go_on.set()
    other.join(10)
    manager.check_integrity()
    assert length_of(manager, range(8)) == 6


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_a_cold_tail_comes_back_when_the_longer_chunk_fails(is_on_disk: bool) -> None:
    """Its tensors are on disk only, so it takes no room; and it stays away once the disk has dropped it."""
    manager = KVCacheManager(1, None, chunk_size=CHUNK)
    manager.on_disk.save_from_now_on()
    store(manager, range(3))
    taken = manager.on_disk.take_unsaved(1, ROOT.family)
    manager.on_disk.mark_saved(taken, [True])
    store(manager, range(10, 14))
    assert (manager.stats()["chunks"], manager.stats()["chunks_on_disk_only"]) == (1, 1)

    def failing(_start: int, _end: int) -> Packed:
        if not is_on_disk:
            assert manager.on_disk.take_obsolete() == [taken[0].chunk.chunk_id]
        raise DeviceGoneError

    with pytest.raises(DeviceGoneError):
        manager.store_prefix(range(4), [4], CODEC, failing)
    manager.check_integrity()
    assert manager.stats()["chunks"] == 0  # evicted for the chunk that failed
    assert manager.stats()["chunks_on_disk_only"] == is_on_disk
    assert manager.on_disk.take_obsolete() == []
