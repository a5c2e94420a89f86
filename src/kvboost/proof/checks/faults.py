"""What is wrong with KV: layers in each other's places, other positions, or another text. Knows no store."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost.models import PastKVType
from kvboost.proof.checks.bounds import relative_error, tolerance
from kvboost.proof.verifiable import Verifiable

_SHIFTS = (1, -1, 2, -2, 3, -3)
_CLASSIFIED_TOKENS = 8
_LONE_TOKEN = 10  # a single token may be this many times further off than all together


@dataclass(frozen=True)
class Fault:
    """What is wrong with KV: the part to blame, and how it shows."""

    part: str
    detail: str


def find_fault(
    engine: Verifiable, got: PastKVType, want: PastKVType, otherwise: str
) -> tuple[Fault | None, float]:
    """What is wrong with KV `got`, if anything, and the largest relative error of a layer.

    Layers that hold the KV of other layers, and keys rotated to other positions, are recognized. KV of
    anything else is blamed on `otherwise`.
    """
    bound = tolerance(engine)
    errors = [
        torch.stack([_token_errors(*parts) for parts in zip(*pairs, strict=True)]).amax(0)
        for pairs in zip(got, want, strict=True)
    ]
    worst = max(
        relative_error(*parts) for pairs in zip(got, want, strict=True) for parts in zip(*pairs, strict=True)
    )
    if worst <= bound and all(float(tokens.max()) <= _LONE_TOKEN * bound for tokens in errors):
        return None, worst
    wrong = [tokens > bound for tokens in errors]
    firsts = [int(tokens.nonzero()[0]) if bool(tokens.any()) else tokens.shape[0] for tokens in wrong]
    start = min(*firsts, want[0][0].shape[2] - 1)
    layer = firsts.index(min(firsts))
    where = slice(start, start + _CLASSIFIED_TOKENS)  # later tokens may be wrong because of these
    for other in range(len(want)):
        mine, theirs = got[layer][1][:, :, where], want[other][1][:, :, where]
        if other != layer and mine.shape == theirs.shape and relative_error(mine, theirs) <= bound:
            return Fault("layers", f"layer {layer} holds what belongs to layer {other}"), worst
    shift = _common_shift(engine, got[0][0][:, :, where], want, where)
    if shift:
        detail = f"keys stand {shift:+d} positions from where they belong, from token {start} on"
        return Fault("positions", detail), worst
    detail = f"layer {layer} is off by {worst:.1g} from token {start} on: this is not the KV of these tokens"
    return Fault(otherwise, detail), worst


def _token_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative error `[tokens]` of `[1, kv_heads, tokens, head_dim]`, by the size of a usual token."""
    wanted, found = (part[0].double().transpose(0, 1).flatten(1) for part in (want, got))
    errors: torch.Tensor = (found - wanted).norm(dim=1) / wanted.norm(dim=1).median().clamp_min(1e-12)
    return errors.nan_to_num(float("inf"))


def _common_shift(engine: Verifiable, got: torch.Tensor, want: PastKVType, where: slice) -> int:
    """By how many positions the first layer's keys `[1, kv_heads, tokens, head_dim]` are off; 0 = not that.

    Only in the first layer does a key depend on nothing but its token and its position.
    """
    rotation = engine.rotation
    if isinstance(rotation, str) or rotation.layers[0] is None:
        return 0
    for shift in _SHIFTS:
        moved = engine.layout.pack(want)
        rotation.rotate_(moved, engine.layout, 0, want[0][0].shape[2], shift)
        if relative_error(got, engine.layout.unpack(moved)[0][0][:, :, where]) <= tolerance(engine):
            return shift
    return 0
