"""Turning keys that moved, in one launch on a GPU: many stretches of an arena, all layers that turn alike.

Knows tensors and angles, no layouts and no chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

try:  # comes with torch for CUDA
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 32  # tokens of a program
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _turn_keys(  # type: ignore[no-untyped-def]
        SLAB, ROWS, PIECES, ANGLES, row_stride, slot_stride,
        PAIRS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        piece = PIECES + tl.program_id(0) * 3
        slot = tl.load(piece)
        tokens = tl.load(piece + 1)
        angles = ANGLES + tl.load(piece + 2) * 2 * PAIRS
        row = tl.load(ROWS + tl.program_id(1))
        token, pair = tl.arange(0, BLOCK), tl.arange(0, P)
        inside = pair < PAIRS
        cos = tl.load(angles + pair, mask=inside, other=1.0)
        sin = tl.load(angles + PAIRS + pair, mask=inside, other=0.0)
        if INTERLEAVED:
            channel, apart = 2 * pair, 1
        else:
            channel, apart = pair, PAIRS
        at = SLAB + row * row_stride + (slot + token)[:, None] * slot_stride + channel[None, :]
        seen = (token < tokens)[:, None] & inside[None, :]
        first = tl.load(at, mask=seen, other=0.0).to(tl.float32)
        second = tl.load(at + apart, mask=seen, other=0.0).to(tl.float32)
        turned_first = first * cos[None, :] - second * sin[None, :]
        turned_second = first * sin[None, :] + second * cos[None, :]
        tl.store(at, turned_first.to(SLAB.dtype.element_ty), mask=seen)
        tl.store(at + apart, turned_second.to(SLAB.dtype.element_ty), mask=seen)


def can_turn(slab: torch.Tensor) -> bool:
    """Whether keys in `slab` `[rows, slots, head_dim]` can be turned in one launch."""
    return triton is not None and slab.is_cuda and slab.dtype in _DTYPES and slab.stride(2) == 1


def turn(
    slab: torch.Tensor,
    rows: Sequence[int],
    stretches: Sequence[tuple[int, int, int]],
    inv_freq: Sequence[float],
    *,
    interleaved: bool,
) -> None:
    """Turn the keys in `rows` of `slab` `[rows, slots, head_dim]`, in place, with one rounding at the end.

    Those in slots `[start, end)` of a stretch turn by its shift in positions, pair i of their channels by
    `inv_freq[i]` radians each. Angles are taken in float64: they may be thousands of turns.
    """
    shifts = sorted({shift for _, _, shift in stretches})
    angles = np.array(shifts, dtype=np.float64)[:, None] * np.array(inv_freq, dtype=np.float64)
    pieces = [
        (at, min(_BLOCK, end - at), shifts.index(shift))
        for start, end, shift in stretches
        for at in range(start, end, _BLOCK)
    ]
    device = slab.device
    both = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    tables = np.concatenate([np.array(rows, dtype=np.int64), np.array(pieces, dtype=np.int64).ravel()])
    on_device = torch.from_numpy(tables).to(device)
    with torch.cuda.device(device) if slab.is_cuda else nullcontext():
        _turn_keys[(len(pieces), len(rows))](
            slab,
            on_device[: len(rows)],
            on_device[len(rows) :],
            torch.from_numpy(both).to(device),
            slab.stride(0),
            slab.stride(1),
            PAIRS=len(inv_freq),
            P=max(2, 1 << (len(inv_freq) - 1).bit_length()),
            BLOCK=_BLOCK,
            INTERLEAVED=interleaved,
            num_warps=4,
        )
