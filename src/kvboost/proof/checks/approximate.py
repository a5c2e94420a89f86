"""The parts of reuse that is not exact: moved keys, the sparse pass, fewer bits, and moved text as a whole.

Each is compared with the stock model. Knows the engine as far as `Verifiable` says.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import torch

from kvboost.compat import SUPPORTED_ARCHITECTURES, architecture_of
from kvboost.kv import rope
from kvboost.kv.arena import Arena
from kvboost.proof.checks.check import (
    APPROXIMATE,
    EXACT,
    PLAIN,
    PROBE_TOKENS,
    QUANTIZED,
    Check,
    Stock,
    max_kl,
    relative_error,
    some_text,
    tolerance,
)
from kvboost.proof.fresh_engine import Verifiable, fresh_engine
from kvboost.proof.quality import ReuseTrial
from kvboost.run import decode
from kvboost.run.sparse_forward import sparse_forward


def check_rotation(engine: Verifiable, _asked: Any) -> list[Check]:
    """Keys rotated to other positions, against keys that the model computes there."""
    rotation = engine.rotation
    if isinstance(rotation, str):
        broken = "error" in rotation and architecture_of(engine.model) in SUPPORTED_ARCHITECTURES
        return [Check("rotation", APPROXIMATE, False if broken else None, rotation)]
    ids = some_text(engine, 48)
    still = Stock(engine.model, ids, logits=False)
    room = engine.max_positions
    worst, bound = 0.0, max(2e-3, tolerance(engine))
    for wanted in (1, 29, 700):
        shift = wanted if room is None else min(wanted, room - len(ids))
        there = Arena(engine.layout, len(ids))
        positions = torch.arange(shift, shift + len(ids), device=still.ids.device).unsqueeze(0)
        with decode.running(engine.model, fast=False), torch.no_grad():
            engine.model(input_ids=still.ids, position_ids=positions, past_key_values=there, use_cache=True)
        moved = still.arena(engine.layout, len(ids))
        rotation.rotate_(moved.slabs, engine.layout, 0, len(ids), shift)
        pairs = zip(moved.as_past_key_values(), there.as_past_key_values(), strict=True)
        worst = max(worst, *(relative_error(got[0], want[0]) for got, want in pairs))
    return [
        Check("rotation", APPROXIMATE, worst <= bound, f"moved keys are off by {worst:.1g}", worst, bound)
    ]


def check_sparse_forward(engine: Verifiable, _asked: Any) -> list[Check]:
    """Tokens recomputed among others that are kept, against the same tokens in a full prefill."""
    if isinstance(engine.rotation, str):
        return [Check("sparse pass", APPROXIMATE, None, engine.rotation)]
    ids = np.asarray(some_text(engine, PROBE_TOKENS), dtype=np.int64)
    window = rope.approximate_limit_tokens(engine.model)
    ids = ids if window is None else ids[:window]
    stock = Stock(engine.model, ids.tolist(), logits=False)
    arena = stock.arena(engine.layout, len(ids))
    again = np.concatenate([np.arange(3, len(ids) - 12, 5), np.arange(len(ids) - 9, len(ids))])
    for slab in arena.slabs:
        slab[:, :, torch.from_numpy(again).to(slab.device)] = 1.0
    with decode.running(engine.model, fast=True):
        sparse_forward(engine.model, ids, arena, again)
    pairs = zip(arena.as_past_key_values(), stock.kv, strict=True)
    worst = max(relative_error(g, w) for got, want in pairs for g, w in zip(got, want, strict=True))
    bound = tolerance(engine)
    detail = f"{len(again)} of {len(ids)} tokens computed again are off by {worst:.1g}"
    return [Check("sparse pass", APPROXIMATE, worst <= bound, detail, worst, bound)]


def check_quantized(engine: Verifiable, _asked: Any) -> list[Check]:
    """The error of reuse from quantized KV, of this engine's bits or 8."""
    bits = engine.kv_cache_bits if engine.is_quantized else 8
    ids = some_text(engine, 3 * PROBE_TOKENS)
    with closing(fresh_engine(engine, **{**PLAIN, "kv_cache_bits": bits}, bit_exact=False)) as fresh:
        fresh.warm(ids)
        kl = ReuseTrial(fresh, np.asarray(ids), 16).measure("nothing", 0.0).kl
    bound = max_kl(engine, QUANTIZED)
    return [Check("quantized", QUANTIZED, kl <= bound, f"{bits} bits: mean KL {kl:.2g}", kl, bound)]


def check_moved_text(engine: Verifiable, _asked: Any) -> list[Check]:
    """Two texts in another order: repaired as usual, and with all tokens recomputed."""
    if isinstance(engine.rotation, str):
        return [Check("moved text", APPROXIMATE, None, engine.rotation)]
    room = 3 * PROBE_TOKENS
    if (window := rope.approximate_limit_tokens(engine.model)) is not None:
        room = min(room, window - 8)
    ids = some_text(engine, room)
    third = len(ids) // 5 * 2
    first, second, tail = ids[:third], ids[third : 2 * third], ids[2 * third :]
    if third < 64:
        return [Check("moved text", APPROXIMATE, None, "the model has no room for text to be moved")]
    with closing(fresh_engine(engine, **PLAIN, bit_exact=False)) as fresh:
        fresh.warm(first + second)
        trial = ReuseTrial(fresh, np.asarray(second + first + tail), 16)
        guided, complete = trial.measure("guided", 0.15), trial.measure("all", 1.0)
    bound, exact = max_kl(engine, APPROXIMATE), max_kl(engine, EXACT)
    right = guided.kl <= bound and complete.kl <= 10 * exact
    detail = f"15% computed again: mean KL {guided.kl:.2g}; all of it: {complete.kl:.2g}"
    return [Check("moved text", APPROXIMATE, right, detail, guided.kl, bound)]
