"""Shared prefixes, groups, trees of prompts, and how many prompts are cut into batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.batching.prefixes import (
    MIN_SHARED_TOKENS,
    broadcast_kv,
    find_common_chunk_prefix,
    group_by_prefix,
    plan_forest,
    split_into_batches,
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


# --- trees -----------------------------------------------------------------------------------


@st.composite
def families(draw: st.DrawFn) -> list[np.ndarray]:
    """Prompts that branch off each other at all kinds of places."""
    prompts: list[list[int]] = [draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))]
    for _ in range(draw(st.integers(0, 12))):
        base = draw(st.sampled_from(prompts))
        cut = draw(st.integers(0, len(base)))
        prompts.append(base[:cut] + draw(st.lists(st.integers(0, 3), min_size=1, max_size=40)))
    return [np.array(prompt, dtype=np.int64) for prompt in prompts]


@settings(max_examples=300, deadline=None)
@given(families())
def test_a_forest_holds_every_prompt_once(prompts: list[np.ndarray]) -> None:
    limits = [len(prompt) - 1 for prompt in prompts]
    forest = plan_forest(prompts, limits)
    assert sorted(forest.order) == list(range(len(prompts)))
    assert set(forest.branch_of) == set(forest.order)
    places = {index: place for place, index in enumerate(forest.order)}
    known: set[int] = set()
    for branch in forest.branches:
        assert branch.end - branch.start >= MIN_SHARED_TOKENS
        assert len(branch.sequences) >= 2
        where = [places[index] for index in branch.sequences]
        assert where == list(range(where[0], where[0] + len(where)))  # neighbours
        assert len({prompts[index][: branch.end].tobytes() for index in branch.sequences}) == 1
        assert branch.end <= min(limits[index] for index in branch.sequences)
        assert branch.start == (branch.parent.end if branch.parent else 0)
        assert branch.parent is None or id(branch.parent) in known
        assert branch.parent is None or set(branch.sequences) <= set(branch.parent.sequences)
        known.add(id(branch))
        assert branch.path[0].start == 0
    for index, branch in forest.branch_of.items():
        for each in branch.path if branch is not None else ():
            assert index in each.sequences


@settings(max_examples=200, deadline=None)
@given(families())
def test_two_rows_share_what_they_can(prompts: list[np.ndarray]) -> None:
    """What neighbours have in common is shared, but for less than the least that counts."""
    limits = [len(prompt) - 1 for prompt in prompts]
    forest = plan_forest(prompts, limits)
    for left, right in zip(forest.order, forest.order[1:], strict=False):
        size = min(len(prompts[left]), len(prompts[right]))
        same = prompts[left][:size] == prompts[right][:size]
        common = min(size if same.all() else int(np.argmin(same)), limits[left], limits[right])
        shared = max(
            (b.end for b in forest.branches if left in b.sequences and right in b.sequences), default=0
        )
        assert common - MIN_SHARED_TOKENS < shared <= common


@settings(max_examples=200, deadline=None)
@given(families(), st.integers(1, 400), st.integers(1, 8), st.booleans())
def test_batches_hold_every_prompt_once_and_keep_their_bounds(
    prompts: list[np.ndarray], max_tokens: int, max_sequences: int, unshared_alone: bool
) -> None:
    limits = [len(prompt) - 1 for prompt in prompts]
    lengths = [len(prompt) + 5 for prompt in prompts]
    batches = list(
        split_into_batches(
            prompts,
            limits,
            lengths,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            unshared_alone=unshared_alone,
        )
    )
    assert sorted(index for batch in batches for index in batch) == list(range(len(prompts)))
    for batch in batches:
        assert 1 <= len(batch) <= max_sequences
        if len(batch) > 1:
            chosen = [prompts[index] for index in batch]
            forest = plan_forest(chosen, [limits[index] for index in batch])
            assert forest.slots([lengths[index] for index in batch]) <= max_tokens


def test_loners_have_batches_of_their_own() -> None:
    family = [np.array([5] * 30 + [i, i]) for i in range(4)]
    loners = [np.array([100 + i] * 9) for i in range(3)]
    prompts = [loners[0], family[0], family[1], loners[1], family[2], loners[2], family[3]]
    limits = [len(prompt) - 1 for prompt in prompts]
    lengths = [len(prompt) + 1 for prompt in prompts]

    def split(unshared_alone: bool) -> list[list[int]]:
        bounds = {"max_tokens": 10_000, "max_sequences": 64}
        return [
            sorted(batch)
            for batch in split_into_batches(prompts, limits, lengths, **bounds, unshared_alone=unshared_alone)
        ]

    assert sorted(split(True)) == [[0], [1, 2, 4, 6], [3], [5]]
    assert split(False) == [[0, 1, 2, 3, 4, 5, 6]]


def test_cuts_fall_between_families() -> None:
    prompts = [np.array([family] * 40 + [index]) for family in (1, 2) for index in range(5)]
    limits = [40] * 10
    batches = list(
        split_into_batches(
            prompts, limits, [45] * 10, max_tokens=10_000, max_sequences=8, unshared_alone=True
        )
    )
    assert batches == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
