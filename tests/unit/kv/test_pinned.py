"""Pinned memory: tensors never overlap, what is gone is used again, and a refusal is no error."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.kv.pinned import PinnedPool

REGION = 1 << 16


class Pinning:
    """Notes what is pinned, and does nothing."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.pinned: dict[int, int] = {}
        self.finished = 0
        self.limit = limit

    def serves(self, device: torch.device) -> None:
        pass

    def pin(self, address: int, nbytes: int) -> None:
        if sum(self.pinned.values()) + nbytes > self.limit:
            raise OSError("too much")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def finish(self) -> None:
        self.finished += 1


def make_pool(limit: int = 1 << 30) -> tuple[PinnedPool, Pinning]:
    pinning = Pinning(limit)
    return PinnedPool(pinning, REGION), pinning


def settle(pool: PinnedPool) -> None:
    """Until nothing is being made."""
    for thread in threading.enumerate():
        if thread.name == "kvboost-pinned":
            thread.join()
    assert not pool._refusal


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9_000), st.booleans()), max_size=40))
def test_tensors_never_overlap(steps: list[tuple[int, bool]]) -> None:
    pool, pinning = make_pool()
    live: list[tuple[torch.Tensor, int]] = []
    for number, (count, frees) in enumerate(steps):
        tensor = pool.empty((count, 2), torch.int32)
        assert tensor.shape == (count, 2)
        assert tensor.data_ptr() % 256 == 0
        assert any(
            start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + size
            for start, size in pinning.pinned.items()
        )
        live.append((tensor.fill_(number), number))
        if frees and len(live) > 1:
            live.pop(number % len(live))
        assert all(bool((each == value).all()) for each, value in live)
        del tensor
    settle(pool)
    live.clear()
    pool.trim()
    assert not pinning.pinned
    assert pool.nbytes == 0


def test_what_is_gone_is_used_again() -> None:
    pool, pinning = make_pool()
    for _ in range(100):
        tensor = pool.empty((REGION // 8,), torch.float32)  # half a region
        tensor.zero_()
        del tensor
        time.sleep(0.001)  # the background has its turn
    settle(pool)
    assert pool.nbytes <= 10 * REGION
    assert pinning.finished  # nothing of the device's is under way in what is used again


def test_a_large_one_has_a_region_of_its_own() -> None:
    pool, pinning = make_pool()
    tensor = pool.empty((3 * REGION,), torch.uint8)
    assert 3 * REGION in pinning.pinned.values()
    with torch.inference_mode():
        assert not pool.empty((2, 3), torch.bfloat16).is_inference()
    settle(pool)
    pool.trim()
    assert pool.nbytes >= 3 * REGION  # somebody has it
    tensor.zero_()


def test_memory_is_made_ahead_in_the_background() -> None:
    pool, _ = make_pool()
    assert pool.nbytes == 0
    pool.make_ahead()
    settle(pool)
    assert pool.free_bytes == pool.nbytes == 8 * REGION


@pytest.mark.parametrize("limit", [0, REGION])
def test_where_memory_cannot_be_pinned_torch_gives_it(limit: int, caplog: pytest.LogCaptureFixture) -> None:
    pool, pinning = make_pool(limit)
    held = [pool.empty((REGION // 2,), torch.uint8).fill_(number) for number in range(5)]
    assert [int(each[7]) for each in held] == list(range(5))
    assert sum(pinning.pinned.values()) <= limit
    assert "cannot be pinned in advance (too much)" in caplog.text
    assert pool.empty((0, 3), torch.float32).shape == (0, 3)


def test_what_goes_while_the_device_is_waited_for_is_not_used_yet() -> None:
    pool, pinning = make_pool()
    pool._ahead_bytes = 0
    held = [pool.empty((REGION // 2,), torch.uint8) for _ in range(2)]  # one region, full
    going = [pool.empty((REGION // 2,), torch.uint8) for _ in range(2)]  # another one
    address = going[1].data_ptr()
    going.pop(0)

    def finish() -> None:
        going.clear()  # with a copy under way

    pinning.finish = finish  # type: ignore[method-assign]
    taken = pool.empty((REGION // 2,), torch.uint8)
    assert taken.data_ptr() != address
    other = pool.empty((REGION // 4,), torch.uint8)  # now it was waited for
    assert other.data_ptr() == address
    assert len(held) == 2


def test_after_a_refusal_what_is_there_is_used() -> None:
    pool, _ = make_pool(REGION)
    small = pool.empty((256,), torch.uint8)
    assert not pool.owns(pool.empty((2 * REGION,), torch.uint8))
    assert pool.owns(pool.empty((256,), torch.uint8))
    assert pool.owns(small)
    pool.trim()
    assert not pool._refusal


def test_nothing_is_made_for_nobody() -> None:
    pool, pinning = make_pool()
    pool.make_ahead()
    pool.trim()
    settle(pool)
    assert not pinning.pinned


def test_threads_get_memory_of_their_own() -> None:
    pool, _ = make_pool()
    wrong: list[int] = []

    def work(number: int) -> None:
        held: list[torch.Tensor] = []
        for step in range(100):
            held.append(pool.empty((50 + 13 * (step % 7),), torch.int64).fill_(number))
            if len(held) > 8:
                held.pop(step % 8)
            wrong.extend(1 for each in held if not bool((each == number).all()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
