"""The parts that exact reuse stands on: attention, layers, positions, the store, batches, bit-exact mode.

Each is compared with the stock model. Knows the engine as far as `Verifiable` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from kvboost.choices import GenerationMode
from kvboost.kv.arena import Arena
from kvboost.models import PastKVType
from kvboost.proof.checks.check import (
    EXACT,
    PLAIN,
    PROBE_TOKENS,
    Check,
    Recorder,
    Stock,
    relative_error,
    some_text,
    tolerance,
)
from kvboost.proof.fresh_engine import Verifiable, fresh_engine
from kvboost.run import decode

_SHIFTS = (1, -1, 2, -2, 3, -3)
_CLASSIFIED_TOKENS = 8
_LONE_TOKEN = 10  # a single token may be this many times further off than all together


def check_attention(engine: Verifiable, _asked: Any) -> list[Check]:
    """The engine's attention over cached KV, for one, few and many new tokens."""
    stock = Stock(engine.model, some_text(engine, PROBE_TOKENS))
    total, worst, where = stock.ids.shape[1], 0.0, ""
    for new in (1, total // 20 + 2, total // 2):
        arena = stock.arena(engine.layout, total - new)
        with decode.running(engine.model, fast=True), torch.no_grad():
            output = engine.model(input_ids=stock.ids[:, -new:], past_key_values=arena, use_cache=True)
        error = relative_error(output.logits[0], stock.logits[-new:])
        if error >= worst:
            worst, where = error, f"{new} new tokens over {total - new} cached"
    bound = tolerance(engine)
    return [
        Check("attention", EXACT, worst <= bound, f"off by {worst:.1g} ({where})", worst, bound),
    ]


def check_prefill(engine: Verifiable, _asked: Any) -> list[Check]:
    """KV that the engine computes in pieces: every layer in its place, every token at its position."""
    ids = np.asarray(some_text(engine, PROBE_TOKENS), dtype=np.int64)
    stock = Stock(engine.model, ids.tolist())
    arena = Arena(engine.layout, len(ids))
    with decode.running(engine.model, fast=True):
        for end in (len(ids) // 4 + 1, len(ids) // 2, len(ids)):
            decode.prefill(engine.model, ids, arena, end)
    fault, error = find_fault(engine, arena.as_past_key_values(), stock.kv, "prefill")
    return _judged(engine, ("layers", "positions", "prefill"), fault, error)


def check_stored(engine: Verifiable, asked: Sequence[Sequence[int]]) -> list[Check]:
    """What the store holds of the prompts must be the KV that the model computes for their tokens."""
    if engine.is_quantized:
        return [Check("stored KV", EXACT, None, "kept in fewer bits: see quantized")]
    if engine.is_lossy:
        return [Check("stored KV", EXACT, None, "overlap encoding: chunks do not see all before them")]
    worst, tokens = 0.0, 0
    for ids in asked:
        found = engine.assembler.assemble(ids, engine.namespace())
        if found.cached_past_kv is None:
            continue
        tokens += found.cached_length
        stock = Stock(engine.model, ids[: found.cached_length], logits=False)
        fault, error = find_fault(engine, found.cached_past_kv, stock.kv, "stored KV")
        worst = max(worst, error)
        if fault is not None:
            return _judged(engine, (fault.part,), fault, error)
    if not tokens:
        return [Check("stored KV", EXACT, None, "nothing of the prompts is stored")]
    detail = f"{tokens:,} tokens, off by {worst:.1g}"
    return [Check("stored KV", EXACT, True, detail, worst, tolerance(engine))]


def _judged(engine: Verifiable, parts: Sequence[str], fault: Fault | None, error: float) -> list[Check]:
    bound = tolerance(engine)
    return [
        Check(part, EXACT, None, f"not judged, since {fault.part} is wrong")
        if fault is not None and fault.part != part
        else Check(part, EXACT, fault is None, fault.detail if fault else f"off by {error:.1g}", error, bound)
        for part in parts
    ]


def check_batches(engine: Verifiable, _asked: Any) -> list[Check]:
    """Sequences that run together, against the model's own generate."""
    ids = some_text(engine, PROBE_TOKENS)
    half = len(ids) // 2
    prompts = [ids[: half + 1], ids[: half + len(ids) // 4], ids]
    with closing(fresh_engine(engine, **PLAIN, bit_exact=False)) as fresh:
        if fresh.why_not_packed and not engine.why_not_packed:  # they ran together when the engine was made
            return [Check("batches", EXACT, False, fresh.why_not_packed)]
        results = [result.token_ids for result in fresh.generate_batch(prompts, 8)]
        expected = [fresh.generate(prompt, 8, GenerationMode.BASELINE).token_ids for prompt in prompts]
    same = sum(a == b for a, b in zip(results, expected, strict=True))
    return [
        Check("batches", EXACT, same == len(prompts), f"{same} of {len(prompts)} sequences equal BASELINE's")
    ]


def check_bit_exact(engine: Verifiable, _asked: Any) -> list[Check]:
    """Logits of a cold and a warm run in bit-exact mode."""
    ids = some_text(engine, 2 * engine.chunk_size + 40)
    with closing(fresh_engine(engine, **PLAIN, bit_exact=True)) as fresh:
        cold, warm, plain = (
            _first_logits(fresh, ids, mode) for mode in ("prefix_cache", "prefix_cache", "baseline")
        )
        reused = fresh.generate(ids, 1, "prefix_cache", min_new_tokens=0).cached_tokens
    if not reused:
        return [Check("bit-exact", EXACT, None, "the model has no room for a whole block to reuse")]
    equal = torch.equal(cold, warm) and torch.equal(cold, plain)
    words = "equal to the last bit" if equal else f"off by {float((cold - warm).abs().max()):.1g}"
    return [Check("bit-exact", EXACT, equal, f"warm and cold logits, {reused} tokens reused: {words}")]


def _first_logits(engine: Verifiable, ids: list[int], mode: str) -> torch.Tensor:
    recorder = Recorder()
    engine.generate(ids, 1, mode, min_new_tokens=0, logits_processor=LogitsProcessorList([recorder]))
    return recorder.logits[0]


# --- what is wrong with KV -----------------------------------------------------------------------


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
