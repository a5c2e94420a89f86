"""What prompts have in common: shared prefixes, groups, and an order in which like ones are adjacent.

Knows tokens, no model and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvboost.models import PastKVType, TokenIds, chained_hash

# A shared prefix of fewer tokens is not worth a node of its own.
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


def sorted_by_tokens(token_ids: Sequence[np.ndarray]) -> list[int]:
    """Indices of prompts `[tokens]`, so that those that share the most are adjacent."""
    keys = [ids.astype(">u4").tobytes() for ids in token_ids]
    return sorted(range(len(keys)), key=keys.__getitem__)
