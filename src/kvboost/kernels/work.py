"""The work of attention in one packed forward, cut into items that programs of a GPU take one by one.

An item is a block of adjacent queries and some ranges of keys that all of them may see; what each query sees
of these is decided by positions alone. Queries of several sequences that share text are one block there, so
that shared keys are read once. Where there are few queries, keys are split among items, and the parts of a
query are merged. All of it is tables of integers, so that a captured graph can run any of them. Knows slots
and positions, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ITEM_FIELDS = 5  # first query, queries, first range, end of the ranges, first part (or -1)
RANGE_FIELDS = 3  # first slot, keys, position of the first key
LEAST_SPLIT = 128  # keys of an item
_KEY_BLOCK = 64
_PROGRAMS = 528  # as many as keep a large GPU busy


def most_split(kv_heads: int) -> int:
    """How many items keys may be split into, beyond one per block of queries."""
    return -(-_PROGRAMS // kv_heads)


class Stretch(NamedTuple):
    """KV in slots `[start, start + length)`, of tokens at positions from `position` on."""

    start: int
    length: int
    position: int


class SeenKeys(NamedTuple):
    """Queries `[first, last)` of the forward, which see the same ranges of keys, each up to its position."""

    first: int
    last: int
    ranges: Sequence[Stretch]


class Tile(NamedTuple):
    """How many rows (a query of one head each) the programs for few and for many rows take."""

    narrow: int
    wide: int


@dataclass(frozen=True)
class Work:
    """Tables: `narrow` and `wide` items `[n, 5]`, `ranges` `[n, 3]`, and which parts each query has.

    The parts of query `q` are `part_rows[part_ends[q] : part_ends[q + 1]]`; a query that has none there is
    complete in the one item that it is in. `parts` says how many there are.
    """

    narrow: np.ndarray
    wide: np.ndarray
    ranges: np.ndarray
    part_ends: np.ndarray
    part_rows: np.ndarray

    @property
    def parts(self) -> int:
        return len(self.part_rows)


def work_of(
    seen: Sequence[SeenKeys],
    positions: np.ndarray,
    *,
    group: int,
    kv_heads: int,
    tile: Tile,
    all_in_parts: bool = False,
    least_split: int = LEAST_SPLIT,
) -> Work:
    """Cut what queries at `positions` `[n]` see into items; `group` heads share the keys of a KV head.

    With `all_in_parts`, no item completes a query by itself. Items have `least_split` keys or more.
    """
    blocks = list(_blocks(seen, positions, group, tile))
    keys = sum(block.keys for block in blocks)
    split = max(least_split, -(-keys * kv_heads // _PROGRAMS))
    split = -(-split // _KEY_BLOCK) * _KEY_BLOCK
    items: list[tuple[int, int, int, int]] = []
    is_wide: list[bool] = []
    ranges: list[Stretch] = []
    for block in blocks:
        count, rows_are_many = block.last - block.first, (block.last - block.first) * group > tile.narrow
        for piece in _pieces(block, split):
            items.append((block.first, count, len(ranges), len(ranges) + len(piece)))
            ranges += piece
            is_wide.append(rows_are_many)
    table = np.array(items, dtype=np.int64).reshape(-1, ITEM_FIELDS - 1)
    first_parts, part_ends, part_rows = _parts(table, len(positions), all_in_parts=all_in_parts)
    table = np.concatenate([table, first_parts[:, None]], axis=1)
    wide = np.array(is_wide, dtype=bool)
    return Work(
        np.ascontiguousarray(table[~wide]),
        np.ascontiguousarray(table[wide]),
        np.array(ranges, dtype=np.int64).reshape(-1, RANGE_FIELDS),
        part_ends,
        part_rows,
    )


class _Block(NamedTuple):
    """Queries `[first, last)`, the ranges as far as the last of them sees, and how many keys these have."""

    first: int
    last: int
    ranges: Sequence[Stretch]
    keys: int


def _blocks(seen: Sequence[SeenKeys], positions: np.ndarray, group: int, tile: Tile) -> Iterator[_Block]:
    at = positions.tolist()
    for first, last, ranges in seen:
        rows = (last - first) * group
        size = max(1, (tile.narrow if rows <= tile.narrow else tile.wide) // group)
        for start in range(first, last, size):
            end = min(last, start + size)
            newest = at[start] if end == start + 1 else max(at[start:end])
            visible = [
                each if each.position + each.length <= newest + 1 else each._replace(length=length)
                for each in ranges
                if (length := min(each.length, newest + 1 - each.position)) > 0
            ]
            yield _Block(start, end, visible, sum(each.length for each in visible))


def _pieces(block: _Block, split: int) -> Iterator[list[Stretch]]:
    """The keys of a block, at most `split` at a time."""
    if block.keys <= split:
        yield list(block.ranges)
        return
    size = -(-block.keys // -(-block.keys // split))  # equal ones
    size = -(-size // _KEY_BLOCK) * _KEY_BLOCK
    piece: list[Stretch] = []
    left = size
    for start, length, position in block.ranges:
        done = 0
        while done < length:
            taken = min(left, length - done)
            piece.append(Stretch(start + done, taken, position + done))
            done += taken
            left -= taken
            if not left:
                yield piece
                piece, left = [], size
    if piece:
        yield piece


def _parts(
    items: np.ndarray, queries: int, *, all_in_parts: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first part of every item, where each query's parts end, and these parts."""
    first, count = items[:, 0], items[:, 1]
    if not all_in_parts:
        opened = np.zeros(queries + 1, dtype=np.int64)
        np.add.at(opened, first, 1)
        np.add.at(opened, first + count, -1)
        of_query = np.cumsum(opened)[:-1]
        is_split = of_query > 1
        several = np.concatenate([[0], np.cumsum(is_split)])
        has_parts = several[first + count] > several[first]
    else:
        has_parts = np.ones(len(items), dtype=bool)
    sizes = np.where(has_parts, count, 0)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    rows = np.arange(int(ends[-1]) if len(ends) else 0)
    query = rows + np.repeat(first - starts, sizes)
    order = np.argsort(query, kind="stable")
    part_ends = np.concatenate([[0], np.cumsum(np.bincount(query, minlength=queries))]).astype(np.int64)
    return np.where(has_parts, starts, -1), part_ends, rows[order]
