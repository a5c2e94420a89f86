"""The books of the RAM tier."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.store.budget import MemoryTier


def filled(*entries: tuple[str, int]) -> MemoryTier:
    """A tier with entries in order of their last use, each used so many times."""
    tier = MemoryTier(None, None)
    for name, uses in entries:
        tier.touch(name, uses)
        tier.set_evictable(name, True)
    return tier


def order_of(tier: MemoryTier) -> list[str]:
    gone = []
    while (victim := tier.next_victim()) is not None:
        gone.append(victim)
        tier.forget(victim)
    return gone


def test_fits_counts_bytes_and_entries_exactly() -> None:
    tier = MemoryTier(2, 100)
    assert tier.fits(100)
    assert not tier.fits(101)
    tier.charge(60)
    assert tier.fits(40)
    assert not tier.fits(41)
    tier.charge(40)
    assert tier.fits(0, 0)
    assert not tier.fits(0, 1)
    with pytest.raises(ValueError, match="budget"):
        tier.charge(1, 0)
    tier.refund(60)
    assert (tier.used_bytes, tier.used_entries) == (40, 1)
    assert tier.fits(60)


def test_none_means_no_limit() -> None:
    tier = MemoryTier(None, None)
    tier.charge(10**15, 10**6)
    assert tier.fits(10**15, 10**6)
    assert tier.could_ever_fit(10**18)


def test_could_ever_fit_looks_at_an_empty_tier() -> None:
    tier = MemoryTier(1, 100)
    tier.charge(100)
    assert tier.could_ever_fit(100)
    assert not tier.could_ever_fit(101)
    assert not MemoryTier(0, None).could_ever_fit(1)
    assert not MemoryTier(None, 0).could_ever_fit(1)


def test_least_used_goes_first_then_the_oldest() -> None:
    assert order_of(filled(("a", 2), ("b", 0), ("c", 1), ("d", 0))) == ["b", "d", "c", "a"]


def test_a_touch_makes_young_and_counts_uses() -> None:
    tier = filled(("a", 0), ("b", 0), ("c", 0))
    tier.touch("a", 0)
    assert tier.next_victim() == "b"
    tier.touch("b", 1)
    assert order_of(tier) == ["c", "a", "b"]


def test_what_is_not_evictable_never_goes() -> None:
    tier = filled(("a", 0), ("b", 0))
    tier.set_evictable("a", False)
    assert tier.evictable() == {"b"}
    assert order_of(tier) == ["b"]
    tier.set_evictable("a", True)
    assert order_of(tier) == ["a"]
    assert order_of(tier) == []


def test_a_victim_stays_until_it_is_forgotten() -> None:
    tier = filled(("a", 0))
    assert tier.next_victim() == tier.next_victim() == "a"


def test_old_fame_fades() -> None:
    """Once eviction has climbed to a level, newcomers start there and old favourites are equals."""
    tier = filled(("once popular", 5), ("b", 4))
    assert tier.next_victim() == "b"  # eviction reaches level 4
    tier.forget("b")
    tier.touch("new", 2)  # counts from there: 4 + 2
    tier.set_evictable("new", True)
    assert order_of(tier) == ["once popular", "new"]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(["touch", "free", "bind", "forget", "pop"])),
        max_size=60,
    )
)
@settings(deadline=None, max_examples=150)
def test_the_victim_is_always_the_lowest_rank(steps: list[tuple[str, str]]) -> None:
    tier = MemoryTier(None, None)
    ranks: dict[str, tuple[int, int]] = {}
    uses: dict[str, int] = {}
    free: set[str] = set()
    level = 0
    for clock, (name, step) in enumerate(steps):
        if step == "touch":
            uses[name] = uses.get(name, -1) + 1
            tier.touch(name, uses[name])
            ranks[name] = (level + 1 + 8 * uses[name], clock)
        elif step == "forget" or name not in ranks:
            tier.forget(name)
            for known in (ranks, uses):
                known.pop(name, None)
            free.discard(name)
        elif step == "free":
            tier.set_evictable(name, True)
            free.add(name)
        elif step == "bind":
            tier.set_evictable(name, False)
            free.discard(name)
        else:
            expected = min(free, key=lambda entry: ranks[entry], default=None)
            assert tier.next_victim() == expected
            if expected is not None:
                level = max(level, ranks[expected][0])
        assert tier.evictable() == free


def test_the_heap_does_not_grow_with_touches() -> None:
    tier = filled(("a", 0), ("b", 0))
    for uses in range(10_000):
        tier.touch("a", uses)
    assert len(tier._heap) < 200
    assert order_of(tier) == ["b", "a"]
