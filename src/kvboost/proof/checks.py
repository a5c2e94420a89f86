"""The parts of an engine, each checked by itself, and what a failed one means for those that stand on it.

Exact reuse stands on attention, layers, positions, the store, batches and bit-exact mode; approximate reuse
on moved keys, the sparse pass, fewer bits, and moved text as a whole. Each is compared with the stock model.
Parts that stand on others come after them. Behind a part that failed, the parts that stand on it get no
verdict, so that the report names the cause. Knows the engine as far as `Verifiable` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from kvboost.choices import GenerationMode
from kvboost.compat import SUPPORTED_ARCHITECTURES, architecture_of
from kvboost.errors import InvalidRequestError
from kvboost.kv import rope
from kvboost.kv.arena import Arena
from kvboost.models import PastKVType
from kvboost.proof.documents import needle_cases
from kvboost.proof.fresh_engine import Verifiable, fresh_engine
from kvboost.proof.measures import (
    APPROXIMATE,
    EXACT,
    PLAIN,
    PROBE_TOKENS,
    QUANTIZED,
    Check,
    Recorder,
    Stock,
    max_kl,
    relative_error,
    some_text,
    tolerance,
)
from kvboost.proof.needles import measure_facts
from kvboost.proof.quality import ReuseTrial, strategy_of
from kvboost.run import decode
from kvboost.run.sparse_forward import sparse_forward

_SHIFTS = (1, -1, 2, -2, 3, -3)
_CLASSIFIED_TOKENS = 8
_FACTS = 4  # questions about moved documents
_LONE_TOKEN = 10  # a single token may be this many times further off than all together


# --- exact reuse ---------------------------------------------------------------------------------


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


# --- reuse that is not exact ---------------------------------------------------------------------


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
        facts = _facts_kept(fresh, len(ids))
    bound, exact = max_kl(engine, APPROXIMATE), max_kl(engine, EXACT)
    right = guided.kl <= bound and complete.kl <= 10 * exact
    detail = f"15% computed again: mean KL {guided.kl:.2g}{facts}; all of it: {complete.kl:.2g}"
    return [Check("moved text", APPROXIMATE, right, detail, guided.kl, bound)]


def _facts_kept(engine: Verifiable, prompt_tokens: int) -> str:
    """Of the facts that full prefill finds in documents, how many are found in moved ones too, in words."""
    cases = islice(needle_cases(engine.tokenizer, (3,), prompt_tokens, seed=0), _FACTS)
    scores = measure_facts(engine, {"guided": strategy_of("guided", 0.15)}, cases, questions=_FACTS)
    if not scores.answered:
        return ""
    kept = ", ".join(f"{kept['guided']} read {way}" for way, kept in scores.kept.items())
    return f", of {scores.answered} facts kept: {kept}"


# --- all of them ---------------------------------------------------------------------------------

# Name, the parts it stands on, and the check.
_PLAN: tuple[tuple[str, tuple[str, ...], Callable[[Verifiable, Any], list[Check]]], ...] = (
    ("attention", (), check_attention),
    ("prefill", ("attention",), check_prefill),
    ("stored KV", ("attention", "prefill", "layers", "positions"), check_stored),
    ("bit-exact", (), check_bit_exact),
    ("batches", ("attention", "prefill", "layers", "positions"), check_batches),
    ("quantized", ("attention", "prefill", "layers", "positions"), check_quantized),
    ("rotation", (), check_rotation),
    ("sparse pass", ("attention",), check_sparse_forward),
    ("moved text", ("attention", "rotation", "sparse pass"), check_moved_text),
)
_KINDS = {
    "attention": EXACT,
    "positions": EXACT,
    "layers": EXACT,
    "prefill": EXACT,
    "stored KV": EXACT,
    "bit-exact": EXACT,
    "batches": EXACT,
    "quantized": QUANTIZED,
    "rotation": APPROXIMATE,
    "sparse pass": APPROXIMATE,
    "moved text": APPROXIMATE,
}


def run_checks(
    engine: Verifiable, asked: Sequence[Sequence[int]], tell: Callable[[str], None] = lambda _what: None
) -> Iterator[Check]:
    """Check all parts; `asked` are prompts of which the engine has stored something."""
    done: dict[str, Check] = {}
    for name, needs, run in _PLAN:
        tell(name)
        blamed = [each for each in needs if each in done and done[each].passed is False]
        if blamed:
            found = [Check(name, _KINDS[name], None, f"not judged, since {blamed[0]} is wrong")]
        else:
            found = _run(name, run, engine, asked)
        for check in found:
            if done.get(check.name) is None or done[check.name].passed is not False:
                done[check.name] = check
    yield from (done[name] for name in _KINDS if name in done)


def _run(
    name: str,
    run: Callable[[Verifiable, Any], list[Check]],
    engine: Verifiable,
    asked: Sequence[Sequence[int]],
) -> list[Check]:
    """What `run` finds. A part that raises is wrong, unless memory is short or the request is refused."""
    try:
        return run(engine, asked)
    except (InvalidRequestError, MemoryError, torch.OutOfMemoryError) as error:
        return [Check(name, _KINDS[name], None, f"not judged: {_told(error)}")]
    except Exception as error:  # of the model, its cache or our kernels: the report names the part
        return [Check(name, _KINDS[name], False, f"raised {_told(error)}")]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
