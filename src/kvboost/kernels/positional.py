"""Attention by positions, in Triton: queries over keys that lie anywhere in an arena.

A query sees the keys of its ranges up to its own position, within a window where the layer has one. Heads of
a group are rows of the same program, so that keys are read once for them. Everything that changes from
step to step (ranges, positions, how many there are) is read from tables on the device. Knows tensors and
tables of work, no cache and no model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kvboost.kernels.scope import HARMLESS, SINKS, SOFTCAP, AttentionCall, heeded
from kvboost.kernels.work import Tile, Work

try:  # comes with torch for CUDA
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_MAX_HEAD_DIM = 256
_MAX_GROUP = 64
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MERGED_AT_ONCE = 32  # parts


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _one_block(  # type: ignore[no-untyped-def]
        q, K, V, first_slot, k, end, at, position, most, total, out, scale, cap, k_head, k_slot, v_head, v_slot,
        HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
        WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        index = k + tl.arange(0, KEYS)
        d, dv = tl.arange(0, D), tl.arange(0, DV)
        slot = (first_slot + index).to(tl.int64)
        there = index < end
        key_at = K + k_head + slot[None, :] * k_slot + d[:, None]
        value_at = V + v_head + slot[:, None] * v_slot + dv[None, :]
        if MASKED:
            keys = tl.load(key_at, mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        elif D != HEAD_DIM:
            keys = tl.load(key_at, mask=(d < HEAD_DIM)[:, None], other=0.0)
        else:
            keys = tl.load(key_at)
        scores = tl.dot(q, keys, input_precision=PRECISION) * scale
        if CAPPED:
            scores = cap * (2 * tl.sigmoid(2 * scores) - 1)  # tanh; `scale` is by the cap then
        if MASKED:
            key_position = at + index
            seen = there[None, :] & (key_position[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key_position[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -1e30)
        larger = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        shrunk = tl.exp2(most - larger)
        total = total * shrunk + tl.sum(weights, 1)
        if MASKED:
            values = tl.load(value_at, mask=there[:, None] & (dv < VALUE_DIM)[None, :], other=0.0)
        elif DV != VALUE_DIM:
            values = tl.load(value_at, mask=(dv < VALUE_DIM)[None, :], other=0.0)
        else:
            values = tl.load(value_at)
        out = tl.dot(weights.to(values.dtype), values, out * shrunk[:, None], input_precision=PRECISION)
        return larger, total, out

    @triton.jit  # type: ignore[untyped-decorator]
    def _attend_items(  # type: ignore[no-untyped-def]
        Q, K, V, OUT, PARTS, SUMS, ITEMS, RANGES, POSITIONS, SINKS,
        scale, cap, q_head, q_token, k_head, k_slot, v_head, v_slot,
        GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
        D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
        CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        item = ITEMS + tl.program_id(0) * 5
        kv_head = tl.program_id(1)
        count = tl.load(item + 1).to(tl.int32)
        if count > 0:
            first = tl.load(item).to(tl.int32)
            range_from = tl.load(item + 2).to(tl.int32)
            range_to = tl.load(item + 3).to(tl.int32)
            part = tl.load(item + 4).to(tl.int32)
            row = tl.arange(0, ROWS)
            token = row // GROUP
            inside = row < count * GROUP
            head = kv_head * GROUP + row % GROUP
            position = tl.load(POSITIONS + first + token, mask=inside, other=-1).to(tl.int32)
            newest = tl.max(position, 0)
            oldest = tl.min(tl.where(inside, position, 2147483647), 0)
            d, dv = tl.arange(0, D), tl.arange(0, DV)
            q_at = Q + (first + token)[:, None] * q_token + head[:, None] * q_head + d[None, :]
            q = tl.load(q_at, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
            most = tl.full([ROWS], -1e30, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            out = tl.zeros([ROWS, DV], tl.float32)
            k_from, v_from = kv_head.to(tl.int64) * k_head, kv_head.to(tl.int64) * v_head
            for index in range(range_from, range_to):
                slot = tl.load(RANGES + index * 3).to(tl.int32)
                length = tl.load(RANGES + index * 3 + 1).to(tl.int32)
                at = tl.load(RANGES + index * 3 + 2).to(tl.int32)
                end = tl.minimum(length, newest - at + 1)
                begin = 0
                open_end = 0
                if WINDOW > 0:
                    begin = tl.maximum(0, oldest - WINDOW + 1 - at)
                    open_end = begin
                else:  # all rows see these
                    open_end = tl.maximum(0, tl.minimum(end, oldest - at + 1)) // KEYS * KEYS
                for k in range(begin, open_end, KEYS):
                    most, total, out = _one_block(
                        q, K, V, slot, k, end, at, position, most, total, out, scale, cap, k_from, k_slot,
                        v_from, v_slot, HEAD_DIM, VALUE_DIM, KEYS, D, DV, WINDOW, CAPPED, False, PRECISION,
                    )  # fmt: skip
                for k in range(open_end, end, KEYS):
                    most, total, out = _one_block(
                        q, K, V, slot, k, end, at, position, most, total, out, scale, cap, k_from, k_slot,
                        v_from, v_slot, HEAD_DIM, VALUE_DIM, KEYS, D, DV, WINDOW, CAPPED, True, PRECISION,
                    )  # fmt: skip
            within = inside[:, None] & (dv < VALUE_DIM)[None, :]
            if part < 0:
                if HAS_SINKS:
                    sink = tl.load(SINKS + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
                    larger = tl.maximum(most, sink)
                    total = total * tl.exp2(most - larger) + tl.exp2(sink - larger)
                    out = out * tl.exp2(most - larger)[:, None]
                out = out / tl.where(total > 0, total, 1.0)[:, None]
                to = OUT + ((first + token) * HEADS + head)[:, None] * VALUE_DIM + dv[None, :]
                tl.store(to, out.to(OUT.dtype.element_ty), mask=within)
            else:
                base = ((part + token) * HEADS + head).to(tl.int64)
                tl.store(PARTS + base[:, None] * VALUE_DIM + dv[None, :], out, mask=within)
                tl.store(SUMS + base * 2, most, mask=inside)
                tl.store(SUMS + base * 2 + 1, total, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _merge_parts(  # type: ignore[no-untyped-def]
        OUT, PARTS, SUMS, PART_ENDS, PART_ROWS, SINKS, LSE,
        HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, AT_ONCE: tl.constexpr,
        HAS_SINKS: tl.constexpr, FILL: tl.constexpr, TELLS_LSE: tl.constexpr,
    ):  # fmt: skip
        query, head = tl.program_id(0), tl.program_id(1)
        start = tl.load(PART_ENDS + query).to(tl.int32)
        stop = tl.load(PART_ENDS + query + 1).to(tl.int32)
        if (stop > start) or FILL:
            dv = tl.arange(0, DV)
            most = -1e30
            total = 0.0
            out = tl.zeros([DV], tl.float32)
            for at in range(start, stop, AT_ONCE):
                index = at + tl.arange(0, AT_ONCE)
                there = index < stop
                row = tl.load(PART_ROWS + index, mask=there, other=0)
                base = row * HEADS + head
                each_most = tl.load(SUMS + base * 2, mask=there, other=-1e30)
                each_total = tl.load(SUMS + base * 2 + 1, mask=there, other=0.0)
                part = tl.load(
                    PARTS + base[:, None] * VALUE_DIM + dv[None, :],
                    mask=there[:, None] & (dv < VALUE_DIM)[None, :],
                    other=0.0,
                )
                larger = tl.maximum(most, tl.max(each_most, 0))
                share = tl.exp2(each_most - larger)
                shrunk = tl.exp2(most - larger)
                out = out * shrunk + tl.sum(part * share[:, None], 0)
                total = total * shrunk + tl.sum(each_total * share, 0)
                most = larger
            if HAS_SINKS:
                sink = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
                larger = tl.maximum(most, sink)
                total = total * tl.exp2(most - larger) + tl.exp2(sink - larger)
                out = out * tl.exp2(most - larger)
                most = larger
            if TELLS_LSE:  # of a query that sees nothing it is infinite, so that it pays nothing to any key
                lse = tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
                tl.store(LSE + query * HEADS + head, lse)
            out = out / tl.where(total > 0, total, 1.0)
            to = OUT + (query * HEADS + head) * VALUE_DIM + dv
            tl.store(to, out.to(OUT.dtype.element_ty), mask=dv < VALUE_DIM)


LOG2_E = 1.4426950408889634


class DeviceWork(NamedTuple):
    """Tables of work on the device (see work.py), with `positions` `[n]` of the queries.

    `parts` `[parts, heads, value_dim]` and `sums` `[parts, heads, 2]` (float32) hold what is merged; None
    where nothing is. With `fill`, the output of a query that is in no item is zero.
    """

    narrow: torch.Tensor
    wide: torch.Tensor
    ranges: torch.Tensor
    positions: torch.Tensor
    part_ends: torch.Tensor
    part_rows: torch.Tensor
    parts: torch.Tensor | None
    sums: torch.Tensor | None
    tile: Tile
    fill: bool = False

    @classmethod
    def of(cls, work: Work, positions: torch.Tensor, heads: int, value_dim: int, tile: Tile) -> DeviceWork:
        """Tables of one forward, in one transfer, and memory for its parts."""
        device = positions.device
        tables = (work.narrow, work.wide, work.ranges, work.part_ends, work.part_rows)
        whole = torch.from_numpy(np.concatenate([each.ravel() for each in tables])).to(device)
        starts = np.cumsum([0, *(each.size for each in tables)]).tolist()
        narrow, wide, ranges, ends, rows = (
            whole[start : start + each.size].view(each.shape)
            for start, each in zip(starts, tables, strict=False)
        )
        parts: torch.Tensor | None = None
        sums: torch.Tensor | None = None
        if work.parts:
            parts, sums = work_buffers(work.parts, heads, value_dim, device)
        return cls(narrow, wide, ranges, positions, ends, rows, parts, sums, tile)


def is_available() -> bool:
    """Whether the kernel can be made here."""
    return triton is not None


def is_on_gpu(call: AttentionCall, device: torch.device) -> bool:
    """Whether a call is one for the kernel: on a GPU, where the tables are."""
    return call.query.is_cuda and call.query.device == device


def why_not(call: AttentionCall) -> str:
    """Why the kernel cannot compute a call; empty if it can."""
    query, key, value = call.query, call.key, call.value
    if triton is None:
        return "Triton is missing"
    if query.shape[0] != 1 or call.dropout:
        return "attention with dropout or of several rows"
    extra = sorted(
        name
        for name, argument in call.extra.items()
        if argument is not None and name not in HARMLESS and name not in (SOFTCAP, SINKS)
    )
    if extra:
        return f"attention with {', '.join(extra)}"
    if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"attention in {query.dtype}"
    if max(query.shape[3], value.shape[3]) > _MAX_HEAD_DIM or call.group > _MAX_GROUP:
        return f"head size {query.shape[3]} in groups of {call.group}"
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return "keys that do not lie in one piece"
    return ""


def tile_of(group: int, head_dim: int, dtype: torch.dtype, queries: int) -> Tile:
    """Rows of a program, for few and for many rows, where a forward has so many queries."""
    least = max(16, _power_of_two(group))
    if dtype is torch.float32:  # without tensor cores: larger ones take long to compile, and are no faster
        return Tile(least, max(least, 32 if head_dim <= 128 else 16))
    many = 128 if queries * group > 1024 and head_dim <= 128 else 64
    return Tile(least, max(least, many))


def attend(
    call: AttentionCall, work: DeviceWork, window: int | None, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention `[1, n, heads, head_dim]` of queries `[1, heads, n, head_dim]`.

    Keys and values are slots `[1, kv_heads, slots, head_dim]`; the work says which of them are read. Where all
    of it is in parts, `lse` `[n * heads]` takes the base-2 logarithm of every query's sum of exponentials.
    """
    query, value = call.query, call.value
    _, heads, tokens, _ = query.shape
    value_dim = value.shape[3]
    out = query.new_empty(1, tokens, heads, value_dim)
    cap, sinks = heeded(call, SOFTCAP), heeded(call, SINKS)
    if sinks is not None:
        sinks = sinks.reshape(-1)
    for items, rows in ((work.narrow, work.tile.narrow), (work.wide, work.tile.wide)):
        if len(items):
            _launch(call, work, out, items, rows, window, cap, sinks)
    if work.parts is not None:
        _merge_parts[(tokens, heads)](
            out,
            work.parts,
            work.sums,
            work.part_ends,
            work.part_rows,
            out if sinks is None else sinks,
            out if lse is None else lse,
            HEADS=heads,
            VALUE_DIM=value_dim,
            DV=_power_of_two(value_dim),
            AT_ONCE=_MERGED_AT_ONCE,
            HAS_SINKS=sinks is not None,
            FILL=work.fill,
            TELLS_LSE=lse is not None,
            num_warps=4,
        )
    return out


def _launch(
    call: AttentionCall,
    work: DeviceWork,
    out: torch.Tensor,
    items: torch.Tensor,
    rows: int,
    window: int | None,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    query, key, value = call.query, call.key, call.value
    _, heads, _, head_dim = query.shape
    keys, stages = 64, 2  # on an H200 no other choice was faster
    if query.dtype is torch.float32:
        keys = 16
    _attend_items[(len(items), key.shape[1])](
        query,
        key,
        value,
        out,
        out if work.parts is None else work.parts,
        out if work.sums is None else work.sums,
        items,
        work.ranges,
        work.positions,
        out if sinks is None else sinks,
        call.scale * (LOG2_E if cap is None else 1 / cap),
        LOG2_E * (cap or 0.0),
        query.stride(1),
        query.stride(2),
        key.stride(1),
        key.stride(2),
        value.stride(1),
        value.stride(2),
        GROUP=call.group,
        HEADS=heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value.shape[3],
        D=_power_of_two(head_dim),
        DV=_power_of_two(value.shape[3]),
        ROWS=rows,
        KEYS=keys,
        WINDOW=window or 0,
        CAPPED=cap is not None,
        HAS_SINKS=sinks is not None,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_warps=8 if rows >= 128 else 4,
        num_stages=stages,
    )


def _power_of_two(number: int) -> int:
    """The next power of two from 16 on."""
    return max(16, 1 << (number - 1).bit_length())


def work_buffers(parts: int, heads: int, value_dim: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for so many parts: `[parts, heads, value_dim]` and `[parts, heads, 2]`."""
    made = torch.empty(parts, heads, value_dim, dtype=torch.float32, device=device)
    return made, torch.empty(parts, heads, 2, dtype=torch.float32, device=device)
