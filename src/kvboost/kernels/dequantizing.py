"""Numbers out of 8 or 4 bits, straight into an arena: many chunks in one launch on a GPU.

What quantized_tensor does in passes over one chunk is here one program per head and some tokens: codes, steps
and minima are read where they lie, turned back by a matrix product where they were rotated, and written to
their slots. Knows tensors, addresses and how numbers are grouped, no chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch

try:  # comes with torch for CUDA
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK, _ROTATED_BLOCK = 32, 64  # tokens of a program
_FIELDS, _FIRST, _LENGTH, _SLOT = 9, 6, 7, 8  # of a piece, and where some of them stand
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT16_MAX = 65504.0
_MOST_CHANNELS = 256

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _dequantize_runs(  # type: ignore[no-untyped-def]
        SLAB, PIECES, ROWS, MATRIX, scale, row_stride, slot_stride,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, CODE_BYTES: tl.constexpr, BITS: tl.constexpr,
        PER_CHANNEL: tl.constexpr, GROUP: tl.constexpr, TOKEN_GROUPS: tl.constexpr, ROTATED: tl.constexpr,
        KEEP_FIRST: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr, IN_HALVES: tl.constexpr,
    ):  # fmt: skip
        piece = PIECES + tl.program_id(0) * 9
        head = tl.program_id(1)
        slab_row = tl.load(ROWS + head)
        codes_at = tl.load(piece).to(tl.pointer_type(tl.uint8))
        steps_at = tl.load(piece + 1).to(tl.pointer_type(tl.float16))
        minima_at = tl.load(piece + 2).to(tl.pointer_type(tl.float16))
        exponents_at = tl.load(piece + 3).to(tl.pointer_type(tl.int16))
        first_at = tl.load(piece + 4).to(tl.pointer_type(tl.float16))
        tokens = tl.load(piece + 5)
        start = tl.load(piece + 6)
        count = tl.load(piece + 7)
        slot = tl.load(piece + 8)
        row, d = tl.arange(0, BLOCK), tl.arange(0, D)
        token = start + row
        inside = (row < count)[:, None] & (d < HEAD_DIM)[None, :]
        exponent = tl.load(exponents_at + head).to(tl.int32)
        unit = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        if BITS == 8:
            byte, shift = d, d * 0
        else:
            byte, shift = tl.where(d < CODE_BYTES, d, d - CODE_BYTES), tl.where(d < CODE_BYTES, 0, 4)
        code_at = codes_at + (head * tokens + token)[:, None] * CODE_BYTES + byte[None, :]
        codes = tl.load(code_at, mask=inside, other=0).to(tl.int32)
        if BITS == 4:
            codes = (codes >> shift[None, :]) & 15
        if PER_CHANNEL:
            groups = (tokens + GROUP - 1) // GROUP
            group_at = (head * groups + token // GROUP)[:, None] * HEAD_DIM + d[None, :]
        else:
            group_at = (head * tokens + token)[:, None] * TOKEN_GROUPS + (d // GROUP)[None, :]
        steps = tl.load(steps_at + group_at, mask=inside, other=0.0).to(tl.float32) * unit
        minima = tl.load(minima_at + group_at, mask=inside, other=0.0).to(tl.float32) * unit
        numbers = tl.where(inside, codes.to(tl.float32) * steps + minima, 0.0)
        if ROTATED:
            matrix = tl.load(MATRIX + d[:, None] * D + d[None, :])
            if IN_HALVES:  # signs are exact in 16 bits, and numbers nearly so in two parts
                rough = numbers.to(tl.bfloat16)
                rest = (numbers - rough.to(tl.float32)).to(tl.bfloat16)
                numbers = tl.dot(rest, matrix, tl.dot(rough, matrix))
            else:
                numbers = tl.dot(numbers, matrix, input_precision="ieee")
            numbers = numbers * scale
        if KEEP_FIRST:
            first = (
                tl.load(first_at + head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32) * unit
            )
            numbers = tl.where((token == 0)[:, None], first[None, :], numbers)
        if CLAMPED:
            numbers = tl.minimum(tl.maximum(numbers, -65504.0), 65504.0)
        to = SLAB + slab_row * row_stride + (slot + row)[:, None] * slot_stride + d[None, :]
        tl.store(to, numbers.to(SLAB.dtype.element_ty), mask=inside)


class Form(NamedTuple):
    """How the numbers of some heads are kept; see quantized_tensor.Scheme. `group` numbers share a step."""

    bits: int
    per_channel: bool
    group: int
    token_groups: int
    keep_first: bool
    code_bytes: int


class Rotation(NamedTuple):
    """What numbers are multiplied with: `signs` `[channels, channels]`, padded as `padded` says, by `scale`.

    Signs are 1, -1 and, between blocks of channels, 0, in bfloat16.
    """

    signs: torch.Tensor
    scale: float


def can_dequantize(slab: torch.Tensor, head_dim: int) -> bool:
    """Whether runs can be written to `slab` `[rows, slots, head_dim]` in one launch."""
    return (
        triton is not None
        and slab.is_cuda
        and slab.dtype in _DTYPES
        and slab.stride(2) == 1
        and head_dim <= _MOST_CHANNELS
    )


def dequantize_runs(
    slab: torch.Tensor,
    rows: Sequence[int],
    runs: np.ndarray,
    form: Form,
    rotation: Rotation | None,
) -> None:
    """Write runs of heads `[len(rows)]` into these rows of `slab` `[rows, slots, head_dim]`.

    A run, of `[n, 9]`, is the addresses of a tensor's codes, steps, minima, exponents and first tokens, which
    the slab's device can read; how many tokens it has; and of those to be written the first, how many, and
    the slot of the first. Numbers are multiplied with `rotation` last.
    """
    head_dim, device = slab.shape[2], slab.device
    in_halves = slab.dtype is not torch.float32
    # A program reads the whole matrix, so it should have many tokens; float32 products take long to compile.
    block = _ROTATED_BLOCK if rotation is not None and in_halves else _BLOCK
    blocks = -(-runs[:, _LENGTH] // block)
    pieces = np.repeat(runs, blocks, axis=0)
    at = block * (np.arange(len(pieces)) - np.repeat(np.cumsum(blocks) - blocks, blocks))
    pieces[:, _FIRST] += at
    pieces[:, _SLOT] += at
    pieces[:, _LENGTH] = np.minimum(block, pieces[:, _LENGTH] - at)
    tables = np.concatenate([pieces.ravel(), np.array(rows, dtype=np.int64)])
    on_device = torch.from_numpy(tables).to(device)
    with torch.cuda.device(device) if slab.is_cuda else nullcontext():
        _dequantize_runs[(len(pieces), len(rows))](
            slab,
            on_device[: len(pieces) * _FIELDS],
            on_device[len(pieces) * _FIELDS :],
            on_device if rotation is None else rotation.signs if in_halves else rotation.signs.float(),
            1.0 if rotation is None else rotation.scale,
            slab.stride(0),
            slab.stride(1),
            HEAD_DIM=head_dim,
            D=padded(head_dim),
            CODE_BYTES=form.code_bytes,
            BITS=form.bits,
            PER_CHANNEL=form.per_channel,
            GROUP=form.group,
            TOKEN_GROUPS=form.token_groups,
            ROTATED=rotation is not None,
            KEEP_FIRST=form.keep_first,
            CLAMPED=slab.dtype is torch.float16,
            BLOCK=block,
            IN_HALVES=in_halves,
            num_warps=4,
        )


def padded(head_dim: int) -> int:
    """Channels of a program."""
    return max(16, 1 << (head_dim - 1).bit_length())
