"""Copies on a device in front of a store: a hard budget, the oldest goes first, they go with their owners."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.errors import InvalidRequestError
from kvboost.kv.device_tier import DeviceTier
from tests.fixture_types import MakeEngine

CPU = torch.device("cpu")  # stands for a GPU: the tier does not ask


class Owner:
    """Keeps a tensor of some size."""

    def __init__(self, value: int, size: int) -> None:
        self.kept = (torch.full((size,), value, dtype=torch.uint8),)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=80))
def test_the_budget_holds_and_copies_are_right(steps: list[tuple[int, int]]) -> None:
    tier = DeviceTier(CPU, 250)
    owners = {number: Owner(number, 10 * number) for number in range(10)}
    for number, kind in steps:
        if kind == 0:
            owners[number] = Owner(number, 10 * number)  # the one before is no more
        owner = owners[number]
        tier.begin_round()
        found = tier.found(owner) if kind < 2 else None
        found = found or tier.keep(owner, owner.kept)
        assert found is not None
        assert torch.equal(found[0], owner.kept[0])
        assert found[0].data_ptr() != owner.kept[0].data_ptr() or not number
        assert tier.nbytes <= 250
        tier.sweep()
        assert tier.nbytes == sum(copy.nbytes for copy in tier._copies.values())
        assert all(copy.owner() is not None for copy in tier._copies.values())
    owners.clear()
    owner = found = None  # type: ignore[assignment]
    assert tier.stats()["chunks"] == tier.stats()["bytes"] == 0


def test_the_least_recently_used_goes_first() -> None:
    tier = DeviceTier(CPU, 100)
    owners = [Owner(number, 40) for number in range(3)]
    for owner in owners[:2]:
        assert tier.keep(owner, owner.kept) is not None
    assert tier.keep(owners[2], owners[2].kept) is None  # what is used in one round is not taken away in it
    tier.begin_round()
    assert tier.found(owners[0]) is not None
    assert tier.keep(owners[2], owners[2].kept) is not None
    assert [tier.found(owner) is not None for owner in owners] == [True, False, True]
    assert tier.keep(Owner(9, 101), Owner(9, 101).kept) is None  # it would never fit
    assert tier.stats() == {"budget": 100, "bytes": 80, "chunks": 2, "hits": 3, "misses": 1, "evicted": 1}


def test_there_is_none_without_a_gpu_or_a_budget() -> None:
    assert DeviceTier.of(CPU, None) is None
    assert DeviceTier.of(torch.device("cuda"), 0) is None


def test_what_cannot_be_had_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="gpu_cache_bytes needs a model on a GPU"):
        make_engine(gpu_cache_bytes=1_000)
    with pytest.raises(InvalidRequestError, match='gpu_cache_bytes is for cache_device="cpu"'):
        make_engine(gpu_cache_bytes=1_000, cache_device="model")
    assert "gpu_cache" not in make_engine(gpu_cache_bytes=0).cache_stats()
