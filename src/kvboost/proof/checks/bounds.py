"""How far off numbers are, and how far off they may be. Knows types and bits, no part of the engine."""

from __future__ import annotations

import torch

from kvboost.proof.checks.check import EXACT, QUANTIZED
from kvboost.proof.verifiable import Verifiable

# How far from the stock model's numbers exact ones may be: relative norms, by type.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# Mean divergence (nats) from full prefill that each kind of reuse may have; half precision adds its noise.
_EXACT_KL = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF_KL = 0.02
_QUANTIZED_KL: dict[object, float] = {8: 0.01, "k8v4": 0.05, 4: 0.1}
_APPROXIMATE_KL = 0.1


def max_kl(engine: Verifiable, kind: str) -> float:
    """Mean divergence in nats that this kind of reuse may have."""
    exact = _EXACT_KL.get(engine.model.dtype, _HALF_KL)
    if kind == EXACT:
        return exact
    bits = engine.kv_cache_bits if engine.is_quantized else 8
    return max(exact, _QUANTIZED_KL[bits] if kind == QUANTIZED else _APPROXIMATE_KL)


def divergence(want: torch.Tensor, got: torch.Tensor) -> float:
    """Mean KL divergence in nats of logits `[n, vocab]` from those wanted."""
    wanted, found = want.float().log_softmax(-1), got.float().log_softmax(-1)
    # Processors may forbid tokens; a token forbidden in both counts as no difference.
    terms = (wanted.exp() * (wanted - found)).nan_to_num(0.0)
    return max(0.0, float(terms.sum(-1).mean()))


def tolerance(engine: Verifiable) -> float:
    """The relative error that exact numbers of this engine may have."""
    return _TOLERANCE.get(engine.model.dtype, 1e-1)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error by the norm; NaN counts as infinitely wrong."""
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
    return error if error == error else float("inf")
