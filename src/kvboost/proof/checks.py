"""The parts of an engine, each against the stock model: attention, positions, layers, the store, and more.

Those that stand on others come after them; behind a part that failed, no verdict is given on what stands on
it, so that what is named is the cause. Knows the engine as far as `Verifiable` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from kvboost.choices import GenerationMode
from kvboost.compat import SUPPORTED_ARCHITECTURES, architecture_of
from kvboost.errors import InvalidRequestError
from kvboost.identity.namespace import Namespace
from kvboost.kv import rope
from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout
from kvboost.kv.rope import KeyRotation
from kvboost.models import GenerationResult, PastKVType
from kvboost.proof.documents import plain_text
from kvboost.proof.fresh_engine import fresh_engine
from kvboost.proof.quality import ReuseTrial
from kvboost.requests.prompts import Prompt
from kvboost.reuse.assembler import PromptAssembler
from kvboost.run import decode
from kvboost.run.sparse_forward import sparse_forward
from kvboost.settings import EngineSettings

EXACT, QUANTIZED, APPROXIMATE = "exact", "quantized", "approximate"
# How far from the stock model's numbers exact ones may be: relative norms, by type.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# Mean divergence (nats) from full prefill that each kind of reuse may have; half precision adds its noise.
_EXACT_KL = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF_KL = 0.02
_QUANTIZED_KL: dict[object, float] = {8: 0.01, "k8v4": 0.05, 4: 0.1}
_APPROXIMATE_KL = 0.1
_PROBE_TOKENS = 180
_SHIFTS = (1, -1, 2, -2, 3, -3)
_CLASSIFIED_TOKENS = 8
_LONE_TOKEN = 10  # a single token may be this many times further off than all together
# Settings under which stored KV is what the model computed, cut at equal sizes. All others go with them.
_PLAIN: dict[str, Any] = {"kv_cache_bits": 16, "overlap_k": 0, "sink_tokens": 0, "chunk_boundary_window": 0}


class Verifiable(Protocol):
    """An engine, as far as checks need one."""

    model: Any
    tokenizer: Any
    layout: KVLayout
    chunk_size: int
    settings: EngineSettings
    assembler: PromptAssembler

    @property
    def why_not_packed(self) -> str:
        """Why sequences cannot share a forward."""

    @property
    def kv_cache_bits(self) -> object:
        """Bits of a stored number."""

    @property
    def is_quantized(self) -> bool:
        """Whether stored KV has fewer bits than the model's."""

    @property
    def is_lossy(self) -> bool:
        """Whether chunks do not see all that stands before them (overlap encoding)."""

    @property
    def rotation(self) -> KeyRotation | str:
        """What moves keys, or why nothing does."""

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has."""

    def tokenize(self, prompt: Prompt) -> list[int]:
        """A prompt as token ids."""

    def namespace(self, cache_salt: str | None = None) -> Namespace:
        """Whose KV it is."""

    def warm(self, text: Prompt, position_offset: int = 0) -> Any:
        """Read a text and keep its KV."""

    def clear(self) -> None:
        """Forget all cached text."""

    def close(self) -> None:
        """Free what it holds."""

    def generate(
        self, prompt: Prompt, max_new_tokens: int = 64, mode: GenerationMode | str = ..., **options: Any
    ) -> GenerationResult:
        """Answer a prompt."""

    def generate_batch(self, prompts: Sequence[Prompt], max_new_tokens: int = 64) -> list[GenerationResult]:
        """Answer prompts together."""


@dataclass(frozen=True)
class Check:
    """One part of the engine; `passed` is None where it was not judged, and `detail` says why or how far off.

    `kind` is the kind of reuse that stands or falls with it.
    """

    name: str
    kind: str
    passed: bool | None
    detail: str = ""
    value: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Fault:
    """What is wrong with KV: the part to blame, and how it shows."""

    part: str
    detail: str


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
    """What `run` finds. A part that raises is wrong, but for lack of memory and what an engine refuses."""
    try:
        return run(engine, asked)
    except (InvalidRequestError, MemoryError, torch.OutOfMemoryError) as error:
        return [Check(name, _KINDS[name], None, f"not judged: {_told(error)}")]
    except (
        Exception
    ) as error:  # whatever the model, its cache or our kernels raise: the report names the part
        return [Check(name, _KINDS[name], False, f"raised {_told(error)}")]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


# --- the numbers -----------------------------------------------------------------------------


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
    # Processors may forbid tokens: what neither can be says nothing.
    terms = (wanted.exp() * (wanted - found)).nan_to_num(0.0)
    return max(0.0, float(terms.sum(-1).mean()))


def some_text(engine: Verifiable, tokens: int, skip: int = 0) -> list[int]:
    """`tokens` ids of English behind the first `skip`, fewer where the model has less room."""
    room = engine.max_positions
    exact = rope.exact_range_tokens(engine.model)
    limits = [limit // 2 for limit in (room, exact) if limit is not None]
    tokens = max(8, min(tokens, *limits)) if limits else tokens
    text = plain_text()[: 12 * (tokens + skip)]
    ids: list[int] = engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids[skip : skip + tokens]


def _tolerance(engine: Verifiable) -> float:
    return _TOLERANCE.get(engine.model.dtype, 1e-1)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error by the norm; NaN counts as infinitely wrong."""
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
    return error if error == error else float("inf")


class Stock:
    """KV and logits `[tokens, vocab]` of a text by the stock model, cache and attention."""

    def __init__(self, model: Any, token_ids: Sequence[int], *, logits: bool = True) -> None:
        device = model.get_input_embeddings().weight.device
        self.ids = torch.tensor([list(token_ids)], device=device)
        cache = DynamicCache()
        with decode.running(model, fast=False), torch.no_grad():
            rope.reset_dynamic_frequencies(model)
            keep = {} if logits else {"logits_to_keep": 1}
            output = model(input_ids=self.ids, past_key_values=cache, use_cache=True, **keep)
        self.logits = output.logits[0]
        self.kv: PastKVType = tuple((layer.keys, layer.values) for layer in cache.layers)

    def arena(self, layout: KVLayout, tokens: int) -> Arena:
        """An arena for all of it that holds the KV of the first `tokens`."""
        arena = Arena(layout, self.ids.shape[1])
        packed = layout.pack(tuple((key[:, :, :tokens], value[:, :, :tokens]) for key, value in self.kv))
        arena.place_at(packed, torch.arange(tokens))
        arena.set_length(tokens)
        return arena


# --- exact reuse -----------------------------------------------------------------------------


def _attention(engine: Verifiable, _asked: Any) -> list[Check]:
    """The engine's attention over cached KV, for one, few and many new tokens."""
    stock = Stock(engine.model, some_text(engine, _PROBE_TOKENS))
    total, worst, where = stock.ids.shape[1], 0.0, ""
    for new in (1, total // 20 + 2, total // 2):
        arena = stock.arena(engine.layout, total - new)
        with decode.running(engine.model, fast=True), torch.no_grad():
            output = engine.model(input_ids=stock.ids[:, -new:], past_key_values=arena, use_cache=True)
        error = _relative(output.logits[0], stock.logits[-new:])
        if error >= worst:
            worst, where = error, f"{new} new tokens over {total - new} cached"
    bound = _tolerance(engine)
    return [
        Check("attention", EXACT, worst <= bound, f"off by {worst:.1g} ({where})", worst, bound),
    ]


def _prefill(engine: Verifiable, _asked: Any) -> list[Check]:
    """KV that the engine computes in pieces: every layer in its place, every token at its position."""
    ids = np.asarray(some_text(engine, _PROBE_TOKENS), dtype=np.int64)
    stock = Stock(engine.model, ids.tolist())
    arena = Arena(engine.layout, len(ids))
    with decode.running(engine.model, fast=True):
        for end in (len(ids) // 4 + 1, len(ids) // 2, len(ids)):
            decode.prefill(engine.model, ids, arena, end)
    fault, error = find_fault(engine, arena.as_past_key_values(), stock.kv, "prefill")
    return _judged(engine, ("layers", "positions", "prefill"), fault, error)


def _stored(engine: Verifiable, asked: Sequence[Sequence[int]]) -> list[Check]:
    """What the store holds of the prompts: the KV of their very tokens, as the model computes it."""
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
    return [Check("stored KV", EXACT, True, detail, worst, _tolerance(engine))]


def _judged(engine: Verifiable, parts: Sequence[str], fault: Fault | None, error: float) -> list[Check]:
    bound = _tolerance(engine)
    return [
        Check(part, EXACT, None, f"not judged, since {fault.part} is wrong")
        if fault is not None and fault.part != part
        else Check(part, EXACT, fault is None, fault.detail if fault else f"off by {error:.1g}", error, bound)
        for part in parts
    ]


def find_fault(
    engine: Verifiable, got: PastKVType, want: PastKVType, otherwise: str
) -> tuple[Fault | None, float]:
    """What is wrong with KV `got`, if anything, and the largest relative error of a layer.

    Layers that hold what belongs to others, and keys turned to other positions, are told apart from KV that
    is of something else altogether, which is blamed on `otherwise`.
    """
    bound = _tolerance(engine)
    errors = [
        torch.stack([_token_errors(*parts) for parts in zip(*pairs, strict=True)]).amax(0)
        for pairs in zip(got, want, strict=True)
    ]
    worst = max(
        _relative(*parts) for pairs in zip(got, want, strict=True) for parts in zip(*pairs, strict=True)
    )
    if worst <= bound and all(float(tokens.max()) <= _LONE_TOKEN * bound for tokens in errors):
        return None, worst
    wrong = [tokens > bound for tokens in errors]
    firsts = [int(tokens.nonzero()[0]) if bool(tokens.any()) else tokens.shape[0] for tokens in wrong]
    start = min(*firsts, want[0][0].shape[2] - 1)
    layer = firsts.index(min(firsts))
    where = slice(start, start + _CLASSIFIED_TOKENS)  # what comes behind may be wrong for their sake
    for other in range(len(want)):
        mine, theirs = got[layer][1][:, :, where], want[other][1][:, :, where]
        if other != layer and mine.shape == theirs.shape and _relative(mine, theirs) <= bound:
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

    Only in the first layer a key depends on nothing but its token and its position.
    """
    rotation = engine.rotation
    if isinstance(rotation, str) or rotation.layers[0] is None:
        return 0
    for shift in _SHIFTS:
        moved = engine.layout.pack(want)
        rotation.rotate_(moved, engine.layout, 0, want[0][0].shape[2], shift)
        if _relative(got, engine.layout.unpack(moved)[0][0][:, :, where]) <= _tolerance(engine):
            return shift
    return 0


def _batches(engine: Verifiable, _asked: Any) -> list[Check]:
    """Rows that run together, against the model's own generate."""
    ids = some_text(engine, _PROBE_TOKENS)
    half = len(ids) // 2
    prompts = [ids[: half + 1], ids[: half + len(ids) // 4], ids]
    with closing(fresh_engine(engine, **_PLAIN, bit_exact=False)) as fresh:
        if fresh.why_not_packed and not engine.why_not_packed:  # rows that ran when the engine was made
            return [Check("batches", EXACT, False, fresh.why_not_packed)]
        results = [result.token_ids for result in fresh.generate_batch(prompts, 8)]
        expected = [fresh.generate(prompt, 8, GenerationMode.BASELINE).token_ids for prompt in prompts]
    same = sum(a == b for a, b in zip(results, expected, strict=True))
    return [Check("batches", EXACT, same == len(prompts), f"{same} of {len(prompts)} rows equal BASELINE's")]


def _bit_exact(engine: Verifiable, _asked: Any) -> list[Check]:
    """Logits of a cold and a warm run in bit-exact mode."""
    ids = some_text(engine, 2 * engine.chunk_size + 40)
    with closing(fresh_engine(engine, **_PLAIN, bit_exact=True)) as fresh:
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
    return recorder.rows[0]


# --- reuse that is not exact -----------------------------------------------------------------


def _rotation(engine: Verifiable, _asked: Any) -> list[Check]:
    """Keys turned to other positions, against keys that the model computes there."""
    rotation = engine.rotation
    if isinstance(rotation, str):
        broken = "error" in rotation and architecture_of(engine.model) in SUPPORTED_ARCHITECTURES
        return [Check("rotation", APPROXIMATE, False if broken else None, rotation)]
    ids = some_text(engine, 48)
    still = Stock(engine.model, ids, logits=False)
    room = engine.max_positions
    worst, bound = 0.0, max(2e-3, _tolerance(engine))
    for wanted in (1, 29, 700):
        shift = wanted if room is None else min(wanted, room - len(ids))
        there = Arena(engine.layout, len(ids))
        positions = torch.arange(shift, shift + len(ids), device=still.ids.device).unsqueeze(0)
        with decode.running(engine.model, fast=False), torch.no_grad():
            engine.model(input_ids=still.ids, position_ids=positions, past_key_values=there, use_cache=True)
        moved = still.arena(engine.layout, len(ids))
        rotation.rotate_(moved.slabs, engine.layout, 0, len(ids), shift)
        pairs = zip(moved.as_past_key_values(), there.as_past_key_values(), strict=True)
        worst = max(worst, *(_relative(got[0], want[0]) for got, want in pairs))
    return [
        Check("rotation", APPROXIMATE, worst <= bound, f"moved keys are off by {worst:.1g}", worst, bound)
    ]


def _sparse_forward(engine: Verifiable, _asked: Any) -> list[Check]:
    """Tokens computed again among others that are kept, against the same tokens in a full prefill."""
    if isinstance(engine.rotation, str):
        return [Check("sparse pass", APPROXIMATE, None, engine.rotation)]
    ids = np.asarray(some_text(engine, _PROBE_TOKENS), dtype=np.int64)
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
    worst = max(_relative(g, w) for got, want in pairs for g, w in zip(got, want, strict=True))
    bound = _tolerance(engine)
    detail = f"{len(again)} of {len(ids)} tokens computed again are off by {worst:.1g}"
    return [Check("sparse pass", APPROXIMATE, worst <= bound, detail, worst, bound)]


def _quantized(engine: Verifiable, _asked: Any) -> list[Check]:
    """The error of reuse from fewer bits: this engine's, or 8."""
    bits = engine.kv_cache_bits if engine.is_quantized else 8
    ids = some_text(engine, 3 * _PROBE_TOKENS)
    with closing(fresh_engine(engine, **{**_PLAIN, "kv_cache_bits": bits}, bit_exact=False)) as fresh:
        fresh.warm(ids)
        kl = ReuseTrial(fresh, np.asarray(ids), 16).measure("nothing", 0.0).kl
    bound = max_kl(engine, QUANTIZED)
    return [Check("quantized", QUANTIZED, kl <= bound, f"{bits} bits: mean KL {kl:.2g}", kl, bound)]


def _approximate(engine: Verifiable, _asked: Any) -> list[Check]:
    """Two texts in another order: repaired as usual, and with everything computed again."""
    if isinstance(engine.rotation, str):
        return [Check("moved text", APPROXIMATE, None, engine.rotation)]
    room = 3 * _PROBE_TOKENS
    if (window := rope.approximate_limit_tokens(engine.model)) is not None:
        room = min(room, window - 8)
    ids = some_text(engine, room)
    third = len(ids) // 5 * 2
    first, second, tail = ids[:third], ids[third : 2 * third], ids[2 * third :]
    if third < 64:
        return [Check("moved text", APPROXIMATE, None, "the model has no room for text to be moved")]
    with closing(fresh_engine(engine, **_PLAIN, bit_exact=False)) as fresh:
        fresh.warm(first + second)
        trial = ReuseTrial(fresh, np.asarray(second + first + tail), 16)
        guided, complete = trial.measure("guided", 0.15), trial.measure("all", 1.0)
    bound, exact = max_kl(engine, APPROXIMATE), max_kl(engine, EXACT)
    right = guided.kl <= bound and complete.kl <= 10 * exact
    detail = f"15% computed again: mean KL {guided.kl:.2g}; all of it: {complete.kl:.2g}"
    return [Check("moved text", APPROXIMATE, right, detail, guided.kl, bound)]


_PLAN: tuple[tuple[str, tuple[str, ...], Callable[[Verifiable, Any], list[Check]]], ...] = (
    ("attention", (), _attention),
    ("prefill", ("attention",), _prefill),
    ("stored KV", ("attention", "prefill", "layers", "positions"), _stored),
    ("bit-exact", (), _bit_exact),
    ("batches", ("attention", "prefill", "layers", "positions"), _batches),
    ("quantized", ("attention", "prefill", "layers", "positions"), _quantized),
    ("rotation", (), _rotation),
    ("sparse pass", ("attention",), _sparse_forward),
    ("moved text", ("attention", "rotation", "sparse pass"), _approximate),
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


class Recorder(LogitsProcessor):
    """Keeps the logits `[vocab]` of every step; with `path`, makes generation go along it."""

    def __init__(self, path: Sequence[int] | None = None) -> None:
        self.rows: list[torch.Tensor] = []
        self._path = path

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self.rows.append(scores[0].float().cpu().clone())
        if self._path is None or len(self.rows) > len(self._path):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._path[len(self.rows) - 1]] = 0.0
        return forced
