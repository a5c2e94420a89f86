"""Faster linear layers for few rows on a CPU.

`torch.nn.functional.linear` in float32 runs MKL's gemm, which on a few rows reaches a third of the
memory bandwidth on some processors; oneDNN, which torch carries as well, reads the same weights up
to twice as fast, and half as fast again where they lie in its own order. Both sum in another order,
so results agree within float error. Like the folded attention it is switched on only while the engine
runs a forward, never for BASELINE and never in bit-exact mode. Knows no cache and no engine.

Weights in oneDNN's order (`pack`) are copies: they cost as much memory as the weights again, and are
made over when the weights change. The model itself is not touched.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as functional

# oneDNN makes a kernel for every number of rows that it meets, which takes milliseconds and half a megabyte
# each. So few numbers are used: all of the smallest, then steps, to which rows are filled up. Rows that would
# be filled up by more than the share, and longer stretches, keep the stock kernel.
_EXACT_ROWS = 32
_STEPS = ((64, 8), (1024, 64))  # up to so many rows, multiples of this
_MAX_FILLED_SHARE = 0.12
_PACKED_FOR_ROWS = 16  # the order for few rows is at least as good as the plain one up to hundreds
_MEMORY_SHARE = 8  # packed of their own accord where they take at most this part of the machine's memory
_PROBES = 64  # values looked at per weight and request, to see changes that torch does not count

Operator = Callable[..., torch.Tensor]


@cache
def _onednn_linear() -> Operator | None:
    """torch's oneDNN linear, or None where there is none that gives the right numbers."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return (
        operator if operator is not None and _gives_right_numbers(operator, lambda weight: weight) else None
    )


@cache
def _onednn_order() -> Operator | None:
    """torch's operator that brings a weight into oneDNN's order, or None where its linear cannot use it."""
    operator, reorder = _onednn_linear(), getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    if operator is None or reorder is None:
        return None

    def order(weight: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = reorder(weight, _PACKED_FOR_ROWS)
        return packed

    return order if _gives_right_numbers(operator, order) else None


def _gives_right_numbers(operator: Operator, order: Operator) -> bool:
    for rows in (1, 3, 40):
        data, weight, bias = torch.randn(rows, 40), torch.randn(24, 40), torch.randn(24)
        try:
            result = operator(data, order(weight), bias, "none", [], "")
        except (RuntimeError, TypeError, NotImplementedError):  # another torch, another signature
            return False
        if not torch.allclose(result, functional.linear(data, weight, bias), atol=1e-4):
            return False
    return True


# --- weights in oneDNN's order -------------------------------------------------------------------


@dataclass(frozen=True)
class _Packed:
    """A weight in oneDNN's order, and what the weight was like when it was made."""

    weight: torch.Tensor
    state: tuple[Any, ...]
    probe: np.ndarray  # some values of the original, where they lie
    values: bytes

    def is_current(self, module: torch.nn.Linear) -> bool:
        return self.state == _state(module.weight) and self.probe.tobytes() == self.values


_PACKS: WeakKeyDictionary[torch.nn.Module, _Packed] = WeakKeyDictionary()


def pack(model: Any, wanted: bool | None = None) -> None:
    """Bring the weights of a model's plain float32 linear layers on the CPU into oneDNN's order.

    `None` does so where the copies take at most an eighth of the machine's memory. Engines on one model
    share the copies.
    """
    modules = [module for module in model.modules() if _is_plain(module)]
    size = sum(module.weight.nbytes for module in modules)
    if wanted is None:
        wanted = size * _MEMORY_SHARE <= _memory_bytes()
    if wanted and _onednn_order() is not None:
        for module in modules:
            if module not in _PACKS or not _PACKS[module].is_current(module):
                _pack_one(module)


def packed_bytes(model: Any) -> int:
    """What the copies of a model's weights take."""
    return sum(module.weight.nbytes for module in model.modules() if module in _PACKS)


def _pack_one(module: torch.nn.Linear) -> _Packed:
    order = _onednn_order()
    assert order is not None  # a pack was wanted, so it is there
    weight = module.weight.detach()
    flat = weight.contiguous().numpy().reshape(-1)  # a view of the weight, unless it is strided
    probe = flat[:: max(1, flat.size // _PROBES) | 1]
    packed = _Packed(order(weight), _state(module.weight), probe, probe.tobytes())
    _PACKS[module] = packed
    return packed


def _state(weight: torch.Tensor) -> tuple[Any, ...]:
    version = 0 if weight.is_inference() else weight._version
    return id(weight), version, weight.data_ptr(), weight.dtype, weight.shape


def _memory_bytes() -> int:
    """The memory of this machine, or of the container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


# --- in use --------------------------------------------------------------------------------------


@cache
def _rows_used(rows: int) -> int:
    """To how many rows so many are filled up; 0 = the stock kernel is better."""
    if rows <= _EXACT_ROWS:
        return rows
    for most, step in _STEPS:
        used = -(-rows // step) * step
        if used <= most:
            return used if used <= _STEPS[0][0] or used - rows <= _MAX_FILLED_SHARE * rows else 0
    return 0


def _faster(module: torch.nn.Linear, operator: Operator, weight: torch.Tensor) -> Operator:
    bias = module.bias

    def forward(rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        count = rows.numel() // rows.shape[-1]
        used = _rows_used(count)
        if not used or rows.dtype is not torch.float32:
            return functional.linear(rows, module.weight, bias)
        if used == count:
            return operator(rows, weight, bias, "none", [], "")
        filled = functional.pad(rows.reshape(count, -1), (0, 0, 0, used - count))
        return operator(filled, weight, bias, "none", [], "")[:count].view(*rows.shape[:-1], -1)

    return forward


@contextmanager
def faster(model: Any) -> Iterator[None]:
    """Inside, plain float32 linear layers on the CPU use oneDNN for few rows."""
    operator = _onednn_linear()
    changed: list[torch.nn.Module] = []
    try:
        if operator is not None:
            for module in model.modules():
                if _is_plain(module):
                    packed = _PACKS.get(module)
                    if packed is not None and not packed.is_current(module):
                        packed = _pack_one(module)
                    weight = module.weight if packed is None else packed.weight
                    module.__dict__["forward"] = _faster(module, operator, weight)
                    changed.append(module)
        yield
    finally:
        for module in changed:
            module.__dict__.pop("forward", None)


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether it is torch's own linear layer, untouched, in float32 on the CPU."""
    return (
        type(module) is torch.nn.Linear
        and "forward" not in module.__dict__
        and module.weight.dtype is torch.float32
        and module.weight.device.type == "cpu"
    )
