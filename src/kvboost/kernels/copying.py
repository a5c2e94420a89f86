"""Copies of many runs of tokens between an arena and other memory, in one launch on a GPU.

Chunk by chunk it is launches that take the time, and Python's way to each of them. Memory of the host that is
pinned is read and written where it lies. Knows tensors, no chunks and no arenas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

try:  # comes with torch for CUDA
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_UNIT = 16  # bytes that are moved at once; all addresses and lengths are multiples of it
_BLOCK = 2048  # words of 4 bytes
_STAGED_BYTES = 256 << 20
_LEAST_STAGED = 0.5  # of a tensor: less of it is read from where it lies

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _copy_runs(SLAB, TABLE, row_units, INTO: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        piece = TABLE + tl.program_id(0) * 4
        row = tl.program_id(1).to(tl.int64)
        address = tl.load(piece) * 16
        stride = tl.load(piece + 1)
        slot = tl.load(piece + 2)
        words = tl.load(piece + 3) * 4
        there = address.to(tl.pointer_type(tl.int32)) + row * stride * 4
        here = SLAB + (row * row_units + slot) * 4
        for at in range(0, words, BLOCK):
            index = at + tl.arange(0, BLOCK)
            inside = index < words
            if INTO:
                tl.store(here + index, tl.load(there + index, mask=inside), mask=inside)
            else:
                tl.store(there + index, tl.load(here + index, mask=inside), mask=inside)


class Run(NamedTuple):
    """Tokens `[first, first + tokens)` of `tensor` `[rows, n, head_dim]`, and their first slot in a slab."""

    tensor: torch.Tensor
    first: int
    tokens: int
    slot: int


def takes_runs(slab: torch.Tensor) -> bool:
    """Whether runs can be copied to and from `slab` `[rows, slots, head_dim]`."""
    return (
        triton is not None
        and slab.is_cuda
        and slab.is_contiguous()
        and slab.shape[2] * slab.itemsize % _UNIT == 0
        and slab.data_ptr() % _UNIT == 0
    )


def is_reachable(tensor: torch.Tensor) -> bool:
    """Whether a GPU can read and write `tensor` `[rows, n, head_dim]` where it lies: its own, or pinned."""
    return (
        (tensor.is_cuda or (tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned()))
        and tensor.is_contiguous()
        and tensor.data_ptr() % _UNIT == 0
    )


def copy_in(slab: torch.Tensor, runs: Sequence[Run]) -> None:
    """Copy runs into the slots of `slab` `[rows, slots, head_dim]`, in the order of its stream.

    What comes from the host is brought over as it lies first: a GPU copies whole tensors faster than its
    programs read them over the bus.
    """
    near = [run for run in runs if not _is_far(run)]
    if near:
        _launch(slab, near, into=True)
    for batch in _batches([run for run in runs if _is_far(run)]):
        staged = [run._replace(tensor=run.tensor.to(slab.device, non_blocking=True)) for run in batch]
        _launch(slab, staged, into=True)


def _is_far(run: Run) -> bool:
    """Whether most of a tensor comes from the host."""
    return not run.tensor.is_cuda and run.tokens >= _LEAST_STAGED * run.tensor.shape[1]


def _batches(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """As many at a time as there is room for on the device."""
    batch: list[Run] = []
    nbytes = 0
    for run in runs:
        if batch and nbytes + run.tensor.nbytes > _STAGED_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(run)
        nbytes += run.tensor.nbytes
    if batch:
        yield batch


def copy_out(slab: torch.Tensor, runs: Sequence[Run]) -> None:
    """Copy slots of `slab` `[rows, slots, head_dim]` into runs, in the order of its stream."""
    _launch(slab, runs, into=False)


def _check(slab: torch.Tensor, runs: Sequence[Run]) -> None:
    """Bytes are copied as they are: a run must have the slab's rows, and lie in its GPU's reach."""
    like, own = (slab.dtype, slab.shape[0], slab.shape[2]), slab.device.index
    for tensor, *_ in runs:
        if (tensor.dtype, tensor.shape[0], tensor.shape[2]) != like or tensor.device.index not in (None, own):
            found, wanted = (f"{tuple(each.shape)} {each.dtype} on {each.device}" for each in (tensor, slab))
            raise ValueError(f"a run of {found} does not fit {wanted}")


def _launch(slab: torch.Tensor, runs: Sequence[Run], *, into: bool) -> None:
    units = slab.shape[2] * slab.itemsize // _UNIT  # of a token
    _check(slab, runs)
    table = np.array(
        [
            (
                tensor.data_ptr() // _UNIT + first * units,
                tensor.shape[1] * units,
                slot * units,
                tokens * units,
            )
            for tensor, first, tokens, slot in runs
        ],
        dtype=np.int64,
    )
    # Pinned, so that nobody waits for what the stream has to do before.
    on_device = torch.from_numpy(table).pin_memory().to(slab.device, non_blocking=True)
    with torch.cuda.device(slab.device):
        _copy_runs[(len(runs), slab.shape[0])](
            slab.view(torch.int32), on_device, slab.shape[1] * units, INTO=into, BLOCK=_BLOCK, num_warps=4
        )
