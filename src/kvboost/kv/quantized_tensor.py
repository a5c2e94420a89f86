"""One tensor in 8 or 4 bits: asymmetric, grouped, and packed two codes to a byte with 4 bits.

A group of numbers shares a step and a minimum. Both are float16, and rounded so that nothing is clipped:
no number is off by more than half a stored step. A scheme says what forms a group, whether head vectors go
through a Hadamard rotation first (it spreads loud channels over all of them), and whether the first token
keeps 16 bits. Knows tensors only; which schemes are used is said in quantize.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from kvboost.errors import InvalidRequestError, UnstorableKVError
from kvboost.kernels.dequantizing import Form, Rotation, padded

NOT_FINITE = "not finite"
TOO_LARGE = "too large to be quantized"

# A head's largest number is scaled to at least 2**9 and below 2**10, so that float16 holds steps and
# minima of any size, and a Hadamard rotation of up to 1,024 channels does not overflow it.
_TOP_EXPONENT = 10
_LEAST_EXPONENT = -112  # numbers below 2**-112 lose precision rather than overflow the scaling
_MOST_SCRATCH_BYTES = 64 << 20
_buffers = threading.local()
_FLOAT16_MAX = torch.finfo(torch.float16).max
# Steps are rounded up unless they miss by this share: then re-encoding what was decoded gives the same
# steps, and the group's largest number still comes back within a thousandth of a step.
_STEP_SLACK = 2.0**-20


@dataclass(frozen=True)
class Scheme:
    """How one tensor `[..., tokens, head_dim]` is quantized.

    `per` says what shares a step: numbers of one "channel" over `group` tokens, or numbers of one "token"
    over `group` channels (all of them where `group` does not divide the head size). With `hadamard` above 1,
    blocks of at most so many channels are rotated first.
    """

    bits: Literal[4, 8]
    per: Literal["channel", "token"]
    group: int
    hadamard: int = 1
    keep_first: bool = True

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of the codes of one token and head."""
        return head_dim if self.bits == 8 else (head_dim + 1) // 2

    def steps_shape(self, tokens: int, head_dim: int) -> tuple[int, int]:
        """The shape of a head's steps, and of its minima."""
        if self.per == "channel":
            return -(-tokens // self.group), head_dim
        return tokens, head_dim // self.group if head_dim % self.group == 0 else 1

    def head_bytes(self, tokens: int, head_dim: int) -> int:
        """Bytes of all that is stored of one head; the first token counts where it is kept."""
        groups = math.prod(self.steps_shape(tokens, head_dim))
        kept = 2 * head_dim if self.keep_first else 0
        return tokens * self.code_bytes(head_dim) + 2 * 2 * groups + 2 + kept


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor `[..., tokens, head_dim]` as integers.

    `codes` is uint8 `[..., tokens, head_dim]`, or with 4 bits two to a byte: the low half of byte i is
    channel i, the high half channel i + ceil(head_dim / 2). A number is (code * step + minimum) *
    2**exponent, followed by the inverse Hadamard rotation where the scheme has one. `steps` and `minima`
    are float16 `[..., groups, head_dim]` per channel or `[..., tokens, groups]` per token, `exponents`
    int16 `[..., 1, 1]`, and `first` the first token as float16 `[..., 1, head_dim]`, over 2**exponent.
    """

    scheme: Scheme
    head_dim: int
    codes: torch.Tensor
    steps: torch.Tensor
    minima: torch.Tensor
    exponents: torch.Tensor
    first: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.codes.shape[-2]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is stored."""
        return self.codes, self.steps, self.minima, self.exponents, self.first

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def quantize(tensor: torch.Tensor, scheme: Scheme) -> QuantizedTensor:
    """Quantize `[..., tokens, head_dim]`, of which there must be at least one token."""
    tokens, head_dim = tensor.shape[-2:]
    if tokens == 0 or head_dim == 0:
        raise InvalidRequestError(f"there is nothing to quantize in shape {list(tensor.shape)}")
    work = _scratch("numbers", tensor, torch.promote_types(tensor.dtype, torch.float32)).copy_(tensor)
    largest = work.abs().amax((-2, -1), keepdim=True)
    if not bool(torch.isfinite(largest).all()):
        raise UnstorableKVError(NOT_FINITE)
    # Half a step further there is only infinity, and a rotation adds up numbers.
    limit = torch.finfo(work.dtype).max / (2 * math.sqrt(scheme.hadamard))
    if bool((largest > limit).any()):
        raise UnstorableKVError(TOO_LARGE)
    exponents = (torch.frexp(largest).exponent - _TOP_EXPONENT).clamp_min_(_LEAST_EXPONENT).to(torch.int16)
    work.mul_(_power_of_two(-exponents, work.dtype))
    first = work[..., :1, :].to(torch.float16)
    if scheme.keep_first and tokens > 1:
        work[..., 0, :] = work[..., 1, :]  # or it would widen its group
    if scheme.hadamard > 1:
        work = _rotated(work, scheme.hadamard, _scratch("rotated", work, work.dtype))
    grouped = [_group_view(part, scheme) for part in _whole_and_rest(work, scheme)]
    axis = _axis(scheme)
    lows = [_rounded_down(part.amin(axis)) for part in grouped]
    highs = [part.amax(axis) for part in grouped]
    steps = [_step(high - low, scheme) for high, low in zip(highs, lows, strict=True)]
    codes = []
    for part, low, step in zip(grouped, lows, steps, strict=True):
        divisor = torch.where(step > 0, step, 1).unsqueeze(axis)
        scaled = part.sub_(low.unsqueeze(axis)).div_(divisor).round_().clamp_(0, scheme.levels)
        codes.append(_pack(_ungroup(scaled.to(torch.uint8), scheme), scheme))
    return QuantizedTensor(
        scheme,
        head_dim,
        codes=torch.cat(codes, dim=-2),
        steps=torch.cat(steps, dim=-2).to(torch.float16),
        minima=torch.cat(lows, dim=-2).to(torch.float16),
        exponents=exponents,
        first=first,
    )


def dequantize(
    quantized: QuantizedTensor, dtype: torch.dtype, start: int = 0, end: int | None = None
) -> torch.Tensor:
    """Tokens `[start, end)` as `[..., tokens, head_dim]`."""
    end = quantized.tokens if end is None else end
    shape = (*quantized.codes.shape[:-2], end - start, quantized.head_dim)
    out = torch.empty(shape, dtype=dtype, device=quantized.codes.device)
    dequantize_into(quantized, out, start)
    return out


def dequantize_into(quantized: QuantizedTensor, out: torch.Tensor, start: int = 0) -> None:
    """Write the tokens from `start` on into `out` `[..., n, head_dim]`, a view of any stride."""
    scheme = quantized.scheme
    end = start + out.shape[-2]
    work_dtype = torch.promote_types(out.dtype, torch.float32)
    unit = _power_of_two(quantized.exponents, work_dtype)
    steps, minima = quantized.steps * unit, quantized.minima * unit
    direct = scheme.hadamard == 1 and out.dtype == work_dtype
    for first, last in _pieces(start, end, scheme):
        target = out[..., first - start : last - start, :]
        numbers = target if direct else _scratch("numbers", target, work_dtype)
        _unpack_into(numbers, quantized.codes[..., first:last, :], scheme)
        part = _group_view(numbers, scheme)
        groups = _groups_of(first, last, scheme)
        low = minima[..., groups, :].unsqueeze(_axis(scheme))
        step = steps[..., groups, :].unsqueeze(_axis(scheme))
        if scheme.per == "channel":
            torch.addcmul(low, part, step, out=part)
        else:  # faster where all numbers of a token share one step
            part.mul_(step).add_(low)
        if direct:
            continue
        if scheme.hadamard > 1:
            numbers = _rotated(numbers, scheme.hadamard, _scratch("rotated", target, work_dtype))
        if out.dtype is torch.float16:  # half a step beyond its largest number there is only infinity
            numbers.clamp_(-_FLOAT16_MAX, _FLOAT16_MAX)
        target.copy_(numbers)
    if scheme.keep_first and start == 0 < end:
        out[..., :1, :] = quantized.first * unit


def _axis(scheme: Scheme) -> int:
    """The axis of a grouped view along which numbers share a step."""
    return -2 if scheme.per == "channel" else -1


def _whole_and_rest(work: torch.Tensor, scheme: Scheme) -> list[torch.Tensor]:
    """Views of the whole groups of tokens and of the last, partial one; either may be missing."""
    if scheme.per == "token":
        return [work]
    tokens = work.shape[-2]
    whole = tokens - tokens % scheme.group
    return [part for part in (work[..., :whole, :], work[..., whole:, :]) if part.shape[-2]]


def _pieces(start: int, end: int, scheme: Scheme) -> Iterator[tuple[int, int]]:
    """Tokens `[start, end)` cut into pieces of whole groups, or inside one group."""
    if scheme.per == "token":
        if end > start:
            yield start, end
        return
    while start < end:
        if start % scheme.group or end - start < scheme.group:
            last = min(end, start - start % scheme.group + scheme.group)
        else:
            last = end - end % scheme.group
        yield start, last
        start = last


def _groups_of(first: int, last: int, scheme: Scheme) -> slice:
    """Which groups of steps belong to tokens `[first, last)`."""
    if scheme.per == "token":
        return slice(first, last)
    return slice(first // scheme.group, -(-last // scheme.group))


def _group_view(part: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """`[..., groups, group, head_dim]` per channel, `[..., tokens, groups, group]` per token."""
    if scheme.per == "channel":
        return _cut(part, -2, min(scheme.group, part.shape[-2]))
    head_dim = part.shape[-1]
    return _cut(part, -1, scheme.group if head_dim % scheme.group == 0 else head_dim)


def _cut(part: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """The view with an axis cut into pieces of `size`."""
    pieces: torch.Tensor = part.unflatten(axis, (-1, size))  # type: ignore[no-untyped-call]
    return pieces


def _ungroup(grouped: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return grouped.flatten(-3, -2) if scheme.per == "channel" else grouped.flatten(-2, -1)


def _step(span: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The step for groups of that span, rounded to float16 so that it is never too small."""
    step = span / scheme.levels
    rounded = step.to(torch.float16)
    too_small = rounded < step * (1 - _STEP_SLACK)
    return torch.where(too_small, _next(rounded, torch.inf), rounded).to(span.dtype)


def _rounded_down(numbers: torch.Tensor) -> torch.Tensor:
    """The largest float16 numbers that are not above `numbers`."""
    rounded = numbers.to(torch.float16)
    return torch.where(rounded > numbers, _next(rounded, -torch.inf), rounded).to(numbers.dtype)


def _next(numbers: torch.Tensor, towards: float) -> torch.Tensor:
    return torch.nextafter(numbers, torch.full_like(numbers, towards))


def _power_of_two(exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Exactly 2**exponents, made from its bits."""
    if dtype is torch.float64:
        return ((exponents.to(torch.int64) + 1023) << 52).view(dtype)
    return ((exponents.to(torch.int32) + 127) << 23).view(dtype)


def _pack(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    if scheme.bits == 8:
        return codes
    head_dim = codes.shape[-1]
    if head_dim % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def _unpack_into(numbers: torch.Tensor, codes: torch.Tensor, scheme: Scheme) -> None:
    """Write the codes as numbers `[..., tokens, head_dim]`."""
    if scheme.bits == 8:
        numbers.copy_(codes)
        return
    half = codes.shape[-1]
    numbers[..., :half] = codes & 15
    numbers[..., half:] = (codes >> 4)[..., : numbers.shape[-1] - half]


def _rotated(numbers: torch.Tensor, most: int, out: torch.Tensor) -> torch.Tensor:
    """`[..., head_dim]` through orthonormal Hadamard matrices of at most so many channels, own inverses.

    Both tensors are contiguous; `out` may be used for the result.
    """
    size = min(most, numbers.shape[-1] & -numbers.shape[-1])  # the largest power of two that divides it
    if size == 1:
        return numbers
    matrix = _hadamard(size, numbers.dtype, numbers.device)
    torch.mm(numbers.view(-1, size), matrix, out=out.view(-1, size))
    return out


def _scratch(use: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of that shape to write to; on a CPU the last such buffer again, if it fits.

    Fresh memory for every chunk would cost more than the arithmetic: page faults tripled the time.
    """
    if like.device.type != "cpu":
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    kept: dict[tuple[str, torch.dtype], torch.Tensor] = _buffers.__dict__.setdefault("kept", {})
    buffer = kept.get((use, dtype))
    if buffer is None or buffer.numel() < like.numel():
        with torch.inference_mode(False):  # it is kept, and written to in any mode
            buffer = torch.empty(like.numel(), dtype=dtype)
        if buffer.nbytes <= _MOST_SCRATCH_BYTES:
            kept[use, dtype] = buffer
    return buffer[: like.numel()].view(like.shape)


def form_of(scheme: Scheme, head_dim: int) -> Form:
    """A scheme as the kernel for GPUs takes it."""
    per_channel = scheme.per == "channel"
    groups = 1 if per_channel else scheme.steps_shape(1, head_dim)[1]
    return Form(
        scheme.bits,
        per_channel,
        scheme.group if per_channel else head_dim // groups,
        groups,
        scheme.keep_first,
        scheme.code_bytes(head_dim),
    )


@lru_cache(maxsize=32)
def rotation_of(scheme: Scheme, head_dim: int, device: torch.device) -> Rotation | None:
    """What heads are multiplied with after decoding; None: nothing."""
    size = min(scheme.hadamard, head_dim & -head_dim)
    if size == 1:
        return None
    matrix = torch.zeros(padded(head_dim), padded(head_dim), device=device)
    for at in range(0, head_dim, size):
        matrix[at : at + size, at : at + size] = _hadamard(size, torch.float32, device)
    return Rotation(matrix.sign().bfloat16(), size**-0.5)


@lru_cache(maxsize=32)
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div(size**0.5).to(device, dtype)
