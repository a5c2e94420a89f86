"""Free slots as ranges."""

from __future__ import annotations

import pytest

from kvboost.batching.slot_pool import SlotPool


def test_ranges_are_taken_and_joined_again() -> None:
    pool = SlotPool(10, 30)
    assert pool.take(5) == [(10, 15)]
    assert pool.take(5) == [(15, 20)]
    pool.give(10, 15)
    assert pool.take(12) == [(20, 30), (10, 12)]
    assert pool.free == 3
    with pytest.raises(ValueError, match="4 slots are wanted, 3 are free"):
        pool.take(4)
    for start, end in [(15, 20), (10, 12), (20, 30)]:
        pool.give(start, end)
    assert pool._ranges == [(10, 30)]
