"""Faster linear layers for few rows on a CPU.

`torch.nn.functional.linear` in float32 runs MKL's gemm, which for an input of few rows (tokens) reaches a
third of the memory bandwidth on some processors. oneDNN, which torch ships as well, reads the same weights up
to twice as fast, and half as fast again if they are packed in its own layout. The order of summation differs,
so results agree within float error. Like folded attention it is on only while the engine runs a forward,
never for BASELINE and never in bit-exact mode. Knows no cache and no engine.

Packed weights (`pack`) are copies: they take as much memory as the weights again, and are made anew when
a reading of the model's state says that the weights have changed. The model itself is not touched.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as functional

from kvboost import locks
from kvboost.identity.model_state import ModelWatch, watch_of

# oneDNN compiles a kernel for every number of rows that it meets: milliseconds and half a megabyte each. So
# it gets few different numbers: every small one, then multiples of a step, to which inputs are padded. Inputs
# that would need more padding than this share, and longer ones, keep the stock kernel.
_EXACT_ROWS = 32
_STEPS = ((64, 8), (1024, 64))  # (up to so many rows, multiples of this)
_MAX_PADDING_SHARE = 0.12
_PACKED_FOR_ROWS = 16  # the layout for so few is at least as good as the plain one up to hundreds
_MEMORY_SHARE = 8  # packed by default if the copies take at most 1/8 of the machine's memory

Operator = Callable[..., torch.Tensor]


class _InOneDNN(threading.local):
    """A lock per thread, held in oneDNN: a fork waits for it, since oneDNN's own stay held in a child."""

    def __init__(self) -> None:
        self.lock = locks.fork_safe_lock(around_data=True)


_in_onednn = _InOneDNN()


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
def _onednn_packing() -> Operator | None:
    """torch's operator that packs a weight for oneDNN, or None if its linear cannot use the result."""
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


# --- packed weights ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packed:
    """A weight in oneDNN's layout, and the checksum of the weight that it was made from."""

    weight: torch.Tensor
    checksum: bytes | None

    def is_current(self, module: torch.nn.Linear, watch: ModelWatch) -> bool:
        return self.checksum is not None and self.checksum == watch.checksum_of(module.weight)


_PACKS: WeakKeyDictionary[torch.nn.Module, _Packed] = WeakKeyDictionary()
_USERS: WeakKeyDictionary[torch.nn.Module, WeakSet[Any]] = WeakKeyDictionary()  # who uses a model's copies


def pack(model: Any, wanted: bool | None = None, user: object | None = None) -> None:
    """Pack the weights of a model's plain float32 linear layers on the CPU for oneDNN.

    With `wanted=None`, only if the copies take at most an eighth of the machine's memory. Engines on one
    model share the copies; they stay until the last `user` has released them, or the model is gone.
    """
    modules = [module for module in model.modules() if _is_plain(module)]
    size = sum(module.weight.nbytes for module in modules)
    if wanted is None:
        wanted = size * _MEMORY_SHARE <= _memory_bytes()
    if wanted and _onednn_packing() is not None:
        if user is not None:
            _USERS.setdefault(model, WeakSet()).add(user)
        watch = watch_of(model)
        watch.read()
        for module in modules:
            if module not in _PACKS or not _PACKS[module].is_current(module, watch):
                _pack_one(module, watch)


def unpack(model: Any, user: object) -> None:
    """Release a model's copies; they are freed when no other user is left."""
    users = _USERS.get(model)
    if users is None or user not in users:
        return
    users.discard(user)
    if not users:
        _USERS.pop(model, None)
        for module in model.modules():
            _PACKS.pop(module, None)


def packed_bytes(model: Any) -> int:
    """The size of the copies of a model's weights."""
    return sum(module.weight.nbytes for module in model.modules() if module in _PACKS)


def _pack_one(module: torch.nn.Linear, watch: ModelWatch) -> _Packed:
    order = _onednn_packing()
    assert order is not None  # a pack was wanted, so it is there
    with torch.inference_mode(False), _in_onednn.lock:
        packed = _Packed(order(module.weight.detach()), watch.checksum_of(module.weight))
    _PACKS[module] = packed
    return packed


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
    """To how many rows an input of `rows` is padded; 0 = the stock kernel is better."""
    if rows <= _EXACT_ROWS:
        return rows
    for most, step in _STEPS:
        used = -(-rows // step) * step
        if used <= most:
            return used if used <= _STEPS[0][0] or used - rows <= _MAX_PADDING_SHARE * rows else 0
    return 0


class _Faster:
    """Replaces a linear layer's forward inside `faster`; in other threads it does what the layer's own does.

    A copy of the layer gets the forward of its class: it must not compute with the weights of the original.
    """

    is_kvboosts = True

    def __init__(self, module: torch.nn.Linear, operator: Operator, weight: torch.Tensor) -> None:
        self._module = module
        self._operator = operator
        self._weight = weight
        self._bias = module.bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        count = rows.numel() // rows.shape[-1]
        used = _rows_used(count)
        if not used or rows.dtype is not torch.float32 or not _ACTIVE.get():
            return functional.linear(rows, self._module.weight, self._module.bias)
        if used == count:
            return self._compute(rows)
        padded = functional.pad(rows.reshape(count, -1), (0, 0, 0, used - count))
        return self._compute(padded)[:count].view(*rows.shape[:-1], -1)

    def _compute(self, rows: torch.Tensor) -> torch.Tensor:
        with _in_onednn.lock:
            return self._operator(rows, self._weight, self._bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _stock_forward(memo.get(id(self._module), self._module))

    def __reduce__(self) -> tuple[Any, ...]:
        return _stock_forward, (self._module,)


def _stock_forward(module: torch.nn.Module) -> Operator:
    return MethodType(torch.nn.Linear.forward, module)


_ACTIVE: ContextVar[bool] = ContextVar("kvboost_faster_linears", default=False)
_SWITCHED: set[torch.nn.Module] = set()  # layers whose forward is ours now


@contextmanager
def faster(model: Any, *, was_read: bool = False) -> Iterator[None]:
    """Inside, plain float32 linear layers on the CPU use oneDNN for few rows.

    `was_read` says that the caller has read the model's state for this forward already.
    """
    operator = _onednn_linear()
    changed: list[torch.nn.Module] = []
    active = _ACTIVE.set(True)
    try:
        if operator is not None and next(model.parameters()).device.type == "cpu":
            watch = watch_of(model)
            if not was_read:
                watch.read()
            for module in model.modules():
                if _is_plain(module) and not isinstance(module.__dict__.get("forward"), _Faster):
                    packed = _PACKS.get(module)
                    if packed is not None and not packed.is_current(module, watch):
                        packed = _pack_one(module, watch)
                    weight = module.weight if packed is None else packed.weight
                    changed.append(module)
                    _SWITCHED.add(module)  # first: the child of a fork restores these
                    module.__dict__["forward"] = _Faster(module, operator, weight)
        yield
    finally:
        _ACTIVE.reset(active)
        _restore(changed)


def _restore(modules: list[torch.nn.Module]) -> None:
    for module in modules:
        if not _has_other_forward(module):  # somebody may have put another one there meanwhile
            module.__dict__.pop("forward", None)
        _SWITCHED.discard(module)


locks.undo_in_child(lambda: _restore(list(_SWITCHED)))


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether it is torch's own linear layer, untouched, in float32 on the CPU."""
    return (
        type(module) is torch.nn.Linear
        and not _has_other_forward(module)
        and module.weight.dtype is torch.float32
        and module.weight.device.type == "cpu"
    )


def _has_other_forward(module: torch.nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    if forward is None or isinstance(forward, _Faster):
        return False
    return getattr(forward, "__func__", None) is not torch.nn.Linear.forward
