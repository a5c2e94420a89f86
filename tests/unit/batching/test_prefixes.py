"""Shared prefixes, and groups of prompts."""

from __future__ import annotations

import pytest
import torch

from kvboost.batching.prefixes import (
    broadcast_kv,
    find_common_chunk_prefix,
    group_by_prefix,
)
from kvboost.models import chained_hash

# --- the public functions --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "chunk_size", "expected"),
    [
        ([], 4, 0),
        ([[1, 2, 3, 4, 5]], 4, 4),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 4, 4),
        ([[1, 2, 3, 4], [1, 2, 3, 9]], 4, 0),
        ([[1, 2, 3, 4], [1, 2, 3, 9]], 1, 3),
        ([[1, 2, 3, 4], []], 2, 0),
        ([[1, 2, 3, 4], [1, 2], [1, 2, 3]], 2, 2),
        ([[1, 2] * 8] * 3, 16, 16),
    ],
)
def test_common_chunks(prompts: list[list[int]], chunk_size: int, expected: int) -> None:
    assert find_common_chunk_prefix(prompts, chunk_size) == expected


def test_chunks_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        find_common_chunk_prefix([[1]], 0)


def test_broadcasting_copies_nothing() -> None:
    kv = tuple((torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 8)) for _ in range(3))
    wide = broadcast_kv(kv, 7)
    for (key, value), (wide_key, wide_value) in zip(kv, wide, strict=True):
        assert wide_key.shape == (7, 2, 5, 4)
        assert wide_value.shape == (7, 2, 5, 8)
        assert wide_key.data_ptr() == key.data_ptr()
        assert wide_value.untyped_storage().nbytes() == value.untyped_storage().nbytes()
        assert torch.equal(wide_key[6:], key)


def test_broadcasting_wants_one_row() -> None:
    with pytest.raises(ValueError, match="KV of one sequence"):
        broadcast_kv(((torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1)),), 3)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        broadcast_kv((), 0)


def test_groups_have_the_same_first_chunks() -> None:
    ids = [[1, 2, 3, 4, 5], [9, 9, 9, 9], [1, 2, 3, 4, 7], [1, 2], [1, 2], [1, 2, 3, 4]]
    groups = group_by_prefix(["a", "b", "c", "d", "e", "f"], ids, chunk_size=2, n_prefix_chunks=2)
    assert sorted(groups.values()) == [[0, 2, 5], [1], [3, 4]]
    assert groups[chained_hash([3, 4], chained_hash([1, 2]))] == [0, 2, 5]
    assert next(iter(groups.values())) == [0, 2, 5]  # in order of appearance


def test_groups_of_bad_input() -> None:
    with pytest.raises(ValueError, match="2 prompts need as many token lists, got 1"):
        group_by_prefix(["a", "b"], [[1]], 2)
    with pytest.raises(ValueError, match="at least 1"):
        group_by_prefix(["a"], [[1]], 2, 0)
    assert group_by_prefix([], [], 2) == {}
    assert list(group_by_prefix(["a"], [[]], 2).values()) == [[0]]
