"""Faster linear layers for few rows on a CPU.

`torch.nn.functional.linear` in float32 runs MKL's gemm, which on a few rows reaches a third of the
memory bandwidth on some processors; oneDNN, which torch carries as well, reads the same weights up
to twice as fast. Both sum in another order, so results agree within float error. Like the folded
attention it is switched on only while the engine runs a forward, never for BASELINE and never in
bit-exact mode. Knows no cache and no engine.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as functional

_MAX_ROWS = 1024  # prefill of longer stretches keeps the stock kernel


@cache
def _onednn_linear() -> Callable[..., torch.Tensor] | None:
    """torch's oneDNN linear, or None where there is none that gives the right numbers."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None:
        return None
    rows, weight, bias = torch.randn(3, 40), torch.randn(24, 40), torch.randn(24)
    try:
        result = operator(rows, weight, bias, "none", [], "")
    except (RuntimeError, TypeError):  # another torch, another signature
        return None
    close = torch.allclose(result, functional.linear(rows, weight, bias), atol=1e-4)
    return operator if close else None


def _faster(module: torch.nn.Linear, operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        weight = module.weight
        if rows.numel() <= _MAX_ROWS * weight.shape[1] and rows.dtype is torch.float32:
            return operator(rows, weight, module.bias, "none", [], "")
        return functional.linear(rows, weight, module.bias)

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
                    module.__dict__["forward"] = _faster(module, operator)
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
