"""What prompts have in common: shared prefixes, groups, and the order in which to run many of them.

Knows tokens, no model and no cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvboost.models import PastKVType, TokenIds, chained_hash

# A shared prefix of at least this many tokens is a branch of its own.
MIN_SHARED_TOKENS = 16


def find_common_chunk_prefix(all_token_ids: Sequence[TokenIds], chunk_size: int) -> int:
    """Length of the longest prefix in whole chunks of `chunk_size` tokens that all prompts share."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if not all_token_ids:
        return 0
    first = np.asarray(all_token_ids[0])
    common = min((common_tokens(first, np.asarray(ids)) for ids in all_token_ids[1:]), default=len(first))
    return common - common % chunk_size


def broadcast_kv(kv: PastKVType, batch_size: int) -> PastKVType:
    """KV of `[1, kv_heads, tokens, head_dim]` per layer as `[batch_size, ...]`, without copying it."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if any(tensor.shape[0] != 1 for pair in kv for tensor in pair):
        raise ValueError("broadcast_kv takes KV of one sequence, [1, kv_heads, tokens, head_dim] per layer")
    return tuple(
        (key.expand(batch_size, -1, -1, -1), value.expand(batch_size, -1, -1, -1)) for key, value in kv
    )


def group_by_prefix(
    prompts: Sequence[Any],
    token_ids_list: Sequence[TokenIds],
    chunk_size: int,
    n_prefix_chunks: int = 3,
) -> dict[str, list[int]]:
    """Indices of `prompts` by the hash of their first `n_prefix_chunks` chunks, in order of appearance.

    A prompt with fewer tokens is keyed by those it has.
    """
    if len(prompts) != len(token_ids_list):
        raise ValueError(f"{len(prompts)} prompts need as many token lists, got {len(token_ids_list)}")
    if chunk_size < 1 or n_prefix_chunks < 1:
        raise ValueError(
            f"chunk_size and n_prefix_chunks must be at least 1, got {chunk_size} and {n_prefix_chunks}"
        )
    groups: dict[str, list[int]] = {}
    for index, ids in enumerate(token_ids_list):
        key: str | None = None
        for start in range(0, min(len(ids), n_prefix_chunks * chunk_size), chunk_size):
            key = chained_hash(ids[start : min(start + chunk_size, n_prefix_chunks * chunk_size)], key)
        groups.setdefault(key or chained_hash(()), []).append(index)
    return groups


def common_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens two prompts `[tokens]` share from the start."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(np.argmax(differs)) if differs.any() else size


# --- trees -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Branch:
    """Positions `[start, end)` that `sequences` (indices) share, behind those of `parent`."""

    start: int
    end: int
    sequences: tuple[int, ...]
    parent: Branch | None = None

    @property
    def path(self) -> tuple[Branch, ...]:
        """The branch and all before it, from the root."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return tuple(path[::-1])


@dataclass(frozen=True)
class Forest:
    """The prefixes that sequences share, as a forest of branches.

    In `order`, sequences that share the most are adjacent; `branch_of` has each one's last branch. In
    `branches`, parents come before their children.
    """

    order: tuple[int, ...]
    branches: tuple[Branch, ...]
    branch_of: dict[int, Branch | None]

    def start_of(self, index: int) -> int:
        """Where the sequence's own tokens begin."""
        branch = self.branch_of[index]
        return branch.end if branch is not None else 0

    def slots(self, lengths: Sequence[int]) -> int:
        """Tokens of KV for sequences of `lengths` tokens each, with lanes of one size."""
        lane = max((lengths[index] - self.start_of(index) for index in self.order), default=0)
        return lane * len(self.order) + sum(branch.end - branch.start for branch in self.branches)


def sorted_by_tokens(token_ids: Sequence[np.ndarray]) -> list[int]:
    """Indices of prompts `[tokens]`, so that those that share the most are adjacent."""
    keys = [ids.astype(">u4").tobytes() for ids in token_ids]
    return sorted(range(len(keys)), key=keys.__getitem__)


def plan_forest(token_ids: Sequence[np.ndarray], limits: Sequence[int]) -> Forest:
    """What the prompts share, as branches; of prompt i at most the first `limits[i]` tokens.

    Linear in the tokens. Shared parts shorter than `MIN_SHARED_TOKENS` stay with their sequences.
    """
    order = sorted_by_tokens(token_ids)
    shared = _shared_with_next(order, token_ids, limits)
    branches: list[Branch] = []
    branch_of: dict[int, Branch | None] = {}
    pending: list[tuple[int, int, Branch | None]] = [(0, len(order), None)] if order else []
    while pending:
        first, last, parent = pending.pop()
        if last - first == 1:
            branch_of[order[first]] = parent
            continue
        start = parent.end if parent is not None else 0
        common = min(shared[first : last - 1])
        branch = parent
        if common - start >= MIN_SHARED_TOKENS:
            branch = Branch(start, common, tuple(order[first:last]), parent)
            branches.append(branch)
        cuts = [index + 1 for index in range(first, last - 1) if shared[index] == common]
        pending += [(left, right, branch) for left, right in pairwise([first, *cuts, last])][::-1]
    return Forest(tuple(order), tuple(branches), branch_of)


def _shared_with_next(
    order: Sequence[int], token_ids: Sequence[np.ndarray], limits: Sequence[int]
) -> list[int]:
    return [
        min(common_tokens(token_ids[left], token_ids[right]), limits[left], limits[right])
        for left, right in pairwise(order)
    ]


def split_into_batches(
    token_ids: Sequence[np.ndarray],
    limits: Sequence[int],
    lengths: Sequence[int],
    *,
    max_tokens: int,
    max_sequences: int,
    unshared_alone: bool,
) -> Iterator[list[int]]:
    """Indices of prompts that run together: adjacent in sorted order, each batch within its bounds.

    `lengths` are prompts with their answers. A batch has at least one prompt, however long. Cuts are made
    where adjacent prompts share little. With `unshared_alone`, a prompt that shares fewer than
    `MIN_SHARED_TOKENS` tokens with any other has a batch of its own.
    """
    order = sorted_by_tokens(token_ids)
    shared = [0, *_shared_with_next(order, token_ids, limits), 0]
    if unshared_alone:
        alone = [
            place for place in range(len(order)) if max(shared[place], shared[place + 1]) < MIN_SHARED_TOKENS
        ]
        yield from ([order[place]] for place in alone)
        together = sorted(set(range(len(order))) - set(alone))
        order, shared = [order[place] for place in together], [shared[place] for place in together] + [0]
    start = 0
    while start < len(order):
        size = min(max_sequences, len(order) - start)
        while size > 1 and _slots(order[start : start + size], token_ids, limits, lengths) > max_tokens:
            size -= max(1, size // 4)
        if start + size < len(order):
            size = max(range(size // 2 + 1, size + 1), key=lambda n: (-shared[start + n], n))
        yield order[start : start + size]
        start += size


def _slots(
    indices: Sequence[int], token_ids: Sequence[np.ndarray], limits: Sequence[int], lengths: Sequence[int]
) -> int:
    forest = plan_forest([token_ids[index] for index in indices], [limits[index] for index in indices])
    return forest.slots([lengths[index] for index in indices])
