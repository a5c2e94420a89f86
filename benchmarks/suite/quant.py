"""`bench quant`: what 8 and 4 bits cost in error, bytes and time, against KV as it was computed.

Error: a prompt's KV is quantized chunk by chunk, and the next tokens are compared with those over the KV as
it was. Besides the widths that the engine offers, the ways that were not taken are measured: keys before
their rotation, other Hadamard rotations, one step per token for all. Time: the same long prefix behind
engines of every width, taking turns. Knows no terminal.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from kvboost.bench.record import machine_record, spread
from kvboost.choices import BITS, KVBits
from kvboost.errors import InvalidRequestError
from kvboost.kv.arena import Arena
from kvboost.kv.codec import KVCodec
from kvboost.kv.layout import KVLayout, head_blocks
from kvboost.kv.quantize import KEYS, VALUES
from kvboost.kv.quantized_tensor import Scheme, dequantize_into, quantize
from kvboost.kv.rope import KeyRotation, learn_rotation
from kvboost.locks import model_lock
from kvboost.proof.documents import ALONE, Case, Group, make_cases
from kvboost.run import decode

Report = Callable[[int, int, str], None]
OpenEngine = Callable[..., Any]
MAX_BYTES: dict[KVBits, float] = {8: 0.55, "k8v4": 0.43, 4: 0.31}  # of float16
MAX_KL: dict[KVBits, float] = {8: 0.0005, "k8v4": 0.003}
MIN_AGREEMENT_8 = 0.99
MAX_OVER_NAIVE = 0.4
MAX_TTFT: dict[KVBits, float] = {8: 1.25, 4: 1.35}
NAIVE = "4, a step per token"
_DOCUMENTS = 4
_QUESTION_TOKENS = 24
_RESAMPLES = 2_000


@dataclass(frozen=True)
class Variant:
    """A way to quantize: how keys and values are, and whether keys are turned back to position 0 first."""

    name: str
    keys: Scheme
    values: Scheme
    before_rotation: bool = False
    bits: KVBits | None = None  # what the engine calls it


def _plain(scheme: Scheme) -> Scheme:
    return dataclasses.replace(scheme, hadamard=1)


def _rotated(scheme: Scheme) -> Scheme:
    return dataclasses.replace(scheme, hadamard=64)


def _per_token(bits: Any) -> Scheme:
    return Scheme(bits, "token", 64, keep_first=False)


def _unprotected(scheme: Scheme) -> Scheme:
    return dataclasses.replace(scheme, keep_first=False)


VARIANTS = (
    Variant("8", KEYS[8], VALUES[8], bits=8),
    Variant("8, keys before rotation", KEYS[8], VALUES[8], before_rotation=True),
    Variant("8, Hadamard", _rotated(KEYS[8]), _rotated(VALUES[8])),
    Variant("8, a step per token", _per_token(8), _per_token(8)),
    Variant("k8v4", KEYS[8], VALUES[4], bits="k8v4"),
    Variant("k8v4, keys before rotation", KEYS[8], VALUES[4], before_rotation=True),
    Variant("k8v4, no Hadamard", KEYS[8], _plain(VALUES[4])),
    Variant("4", KEYS[4], VALUES[4], bits=4),
    Variant("4, keys before rotation", KEYS[4], VALUES[4], before_rotation=True),
    Variant("4, no Hadamard", _plain(KEYS[4]), _plain(VALUES[4])),
    Variant("4, no Hadamard, keys before rotation", _plain(KEYS[4]), _plain(VALUES[4]), before_rotation=True),
    Variant("4, first token as the others", _unprotected(KEYS[4]), _unprotected(VALUES[4])),
    Variant(NAIVE, _per_token(4), _per_token(4)),
)


@dataclass(frozen=True)
class QuantSettings:
    """What is measured: error on `prompts` prompts with from `least` to `most` cached tokens, time on one."""

    prompts: int = 40
    least: int = 500
    most: int = 3_000
    continuation_tokens: int = 32
    ttft_tokens: int = 4_096
    ttft_rounds: int = 11
    seed: int = 0

    def check(self) -> None:
        """Raise where nothing sensible could be measured."""
        if not 100 <= self.least <= self.most // 2:
            raise InvalidRequestError(
                "cached tokens must go from at least 100 to at least twice as many, got "
                f"{self.least} to {self.most}"
            )


def run(
    engine: Any,
    model: str,
    settings: QuantSettings,
    open_engine: OpenEngine,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure error and time, and return the record. `engine` keeps KV as computed."""
    settings.check()
    machine = machine_record(engine.model.get_input_embeddings().weight.device)
    steps = settings.prompts + settings.ttft_rounds
    with model_lock(engine.model):
        rotation = learn_rotation(engine.model, engine.layout)
    trials = []
    for number, case in enumerate(_cases(engine, settings)):
        report(number, steps, f"error, {_cached_tokens(case):,} cached tokens")
        trials.append(_trial(engine, case, settings, rotation))
    times = _times(engine, settings, open_engine, lambda n: report(settings.prompts + n, steps, "time"))
    report(steps, steps, "done")
    errors = _errors(trials)
    for variant in (one for one in VARIANTS if one.name in errors):
        errors[variant.name]["bytes_of_float16"] = round(bytes_of_float16(engine, variant), 4)
    widths = {str(bits): _width(engine, settings, bits, times) for bits in BITS}
    cached = [trial["cached_tokens"] for trial in trials]
    return {
        "benchmark": "quant",
        "model": model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "cached_tokens": [min(cached), round(statistics.fmean(cached)), max(cached)],
        "errors": errors,
        "widths": widths,
        "targets": targets(errors, widths),
        "prompts": trials,
    }


# --- error ---------------------------------------------------------------------------------------


def _cases(engine: Any, settings: QuantSettings) -> Iterator[Case]:
    """Questions over documents, from short to long, whose documents fit the range of cached tokens."""
    lengths = np.linspace(settings.least, settings.most, settings.prompts)
    for number, wanted in enumerate(lengths):
        share = wanted * 0.8 / _DOCUMENTS  # the facts and the question come on top
        for attempt in range(20):
            size = max(2, round(share))
            group = Group(ALONE, _DOCUMENTS, (size * 9 // 10, size * 11 // 10))
            seed = settings.seed * 1_000 + number + 100_000 * attempt
            case = next(make_cases(engine.tokenizer, (group,), 1, seed))
            cached = _cached_tokens(case)
            if settings.least <= cached <= settings.most:
                yield case
                break
            share *= wanted / cached
        else:
            raise InvalidRequestError(
                f"no documents of about {wanted:.0f} tokens can be made for this model: raise --cached-tokens"
            )


def _cached_tokens(case: Case) -> int:
    return max(end for _, end in case.prompt.spans)


def _trial(engine: Any, case: Case, settings: QuantSettings, rotation: KeyRotation | str) -> dict[str, Any]:
    """All variants on one prompt: everything up to the last document is quantized, the question is live."""
    model, ids = engine.model, case.prompt.token_ids
    cached = _cached_tokens(case)
    capacity = len(ids) + settings.continuation_tokens
    arena = Arena(engine.layout, capacity)
    with decode.running(model, fast=True):
        decode.prefill(model, ids, arena, cached, block=None)
        original = [slab[:, :, :cached].clone() for slab in arena.slabs]
        answer = _greedy(model, ids[cached:], arena, settings.continuation_tokens)
        fed = np.concatenate([ids[cached:], np.asarray(answer[:-1], dtype=np.int64)])

        def log_probs() -> torch.Tensor:
            arena.set_length(cached)
            return _log_probs(model, fed, arena, settings.continuation_tokens)

        _restore(arena, original)
        reference = log_probs()
        found = {}
        for variant in VARIANTS:
            if variant.before_rotation and isinstance(rotation, str):
                continue
            _restore(arena, original)
            quantize_in_place(arena, engine.layout, cached, engine.chunk_size, variant, rotation)
            other = log_probs()
            kl = (reference.exp() * (reference - other)).sum(-1)
            agreed = reference.argmax(-1) == other.argmax(-1)
            found[variant.name] = {
                "kl": _rounded(max(float(kl.mean()), 0.0)),
                "agreement": round(float(agreed.float().mean()), 4),
            }
    return {"cached_tokens": cached, "prompt_tokens": len(ids), "variants": found}


def _restore(arena: Arena, original: Sequence[torch.Tensor]) -> None:
    for slab, saved in zip(arena.slabs, original, strict=True):
        slab[:, :, : saved.shape[2]] = saved


def _greedy(model: Any, live: np.ndarray, arena: Arena, tokens: int) -> list[int]:
    answer: list[int] = []
    fed = live
    for _ in range(tokens):
        answer.append(int(_log_probs(model, fed, arena, 1)[-1].argmax()))
        fed = np.asarray(answer[-1:], dtype=np.int64)
    return answer


def _log_probs(model: Any, fed: np.ndarray, arena: Arena, last: int) -> torch.Tensor:
    """Log-probabilities `[last, vocab]` behind the last of `fed` `[n]`, which the arena takes up."""
    device = model.get_input_embeddings().weight.device
    with torch.no_grad():
        logits = model(
            torch.from_numpy(fed).to(device).unsqueeze(0),
            past_key_values=arena,
            use_cache=True,
            logits_to_keep=last,
        ).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def quantize_in_place(
    arena: Arena,
    layout: KVLayout,
    tokens: int,
    chunk_size: int,
    variant: Variant,
    rotation: KeyRotation | str,
) -> None:
    """Put the first `tokens` positions through `variant`, chunk by chunk."""
    slabs = [slab[0] for slab in arena.slabs]
    positions = torch.arange(tokens)
    if variant.before_rotation and isinstance(rotation, KeyRotation):
        rotation.rotate_(slabs, layout, 0, tokens, -positions)
    for side, scheme in enumerate((variant.keys, variant.values)):
        for block in head_blocks(pair[side] for pair in layout.layers):
            for start in range(0, tokens, chunk_size):
                view = block.of(slabs[block.slab][:, start : min(start + chunk_size, tokens)])
                dequantize_into(quantize(view, scheme), view)
    if variant.before_rotation and isinstance(rotation, KeyRotation):
        rotation.rotate_(slabs, layout, 0, tokens, positions)


def _errors(trials: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By variant: mean KL with a 95% interval (bootstrap over prompts), median, agreement."""
    found = {}
    for name in trials[0]["variants"]:
        kl = np.asarray([trial["variants"][name]["kl"] for trial in trials])
        chosen = np.random.default_rng(0).integers(0, len(kl), (_RESAMPLES, len(kl)))
        low, high = np.quantile(kl[chosen].mean(axis=1), [0.025, 0.975])
        found[name] = {
            "kl_mean": _rounded(kl.mean()),
            "kl_mean_low": _rounded(low),
            "kl_mean_high": _rounded(high),
            "kl_median": _rounded(float(np.median(kl))),
            "agreement": round(statistics.fmean(trial["variants"][name]["agreement"] for trial in trials), 4),
        }
    return found


def bytes_of_float16(engine: Any, variant: Variant) -> float:
    """Bytes of a whole chunk, as `variant` would keep it, against float16."""
    size, layout = engine.chunk_size, engine.layout
    stored = numbers = 0
    for pair in layout.layers:
        for where, scheme in zip(pair, (variant.keys, variant.values), strict=True):
            heads, head_dim = where.end - where.start, layout.slabs[where.slab].head_dim
            stored += heads * scheme.head_bytes(size, head_dim)
            numbers += heads * size * head_dim
    return stored / (2 * numbers)


def _rounded(value: float) -> float:
    """To four digits, however small."""
    return float(f"{value:.4g}")


# --- time ----------------------------------------------------------------------------------------


@dataclass
class _Times:
    ttft_ms: list[float] = dataclasses.field(default_factory=list)
    store_s: list[float] = dataclasses.field(default_factory=list)
    load_s: list[float] = dataclasses.field(default_factory=list)


def _times(
    engine: Any, settings: QuantSettings, open_engine: OpenEngine, report: Callable[[int], None]
) -> dict[KVBits, _Times]:
    """Time to the first token behind one long prefix, and the codecs by themselves; widths take turns."""
    random = Random(settings.seed)
    vocabulary = engine.model.config.get_text_config(decoder=True).vocab_size

    def some_ids(count: int) -> list[int]:
        return [random.randrange(vocabulary) for _ in range(count)]

    prefix = some_ids(settings.ttft_tokens)
    engines = {bits: open_engine(kv_cache_bits=bits, max_chunks=None) for bits in BITS}
    for other in engines.values():
        other.warm(prefix)
    times: dict[KVBits, _Times] = {bits: _Times() for bits in BITS}
    for number in range(settings.ttft_rounds + 1):
        report(number)
        elsewhere, question = some_ids(_QUESTION_TOKENS), some_ids(_QUESTION_TOKENS)
        for bits in random.sample(BITS, len(BITS)):
            # Another prompt in between, so that nothing of the prefix lies in the engine's arena by now.
            engines[bits].generate(elsewhere, max_new_tokens=1, mode="prefix_cache")
            result = engines[bits].generate(prefix + question, max_new_tokens=1, mode="prefix_cache")
            store_s, load_s = _codec_seconds(engines[bits], settings.ttft_tokens)
            if number:  # the first round only warms up
                times[bits].ttft_ms.append(result.ttft_ms)
                times[bits].store_s.append(store_s)
                times[bits].load_s.append(load_s)
    for other in engines.values():
        other.close()
    return times


def _codec_seconds(engine: Any, tokens: int) -> tuple[float, float]:
    """Seconds to encode `tokens` tokens as chunks, and to place them into an arena."""
    size = engine.chunk_size
    codec: KVCodec = engine.codec
    arena = Arena(engine.layout, tokens)
    for slab in arena.slabs:
        slab.normal_()
    starts = range(0, tokens - size + 1, size)
    started = _now(arena)
    kept = [codec.encode(arena.between(start, start + size)) for start in starts]
    stored = _now(arena)
    for start, kv in zip(starts, kept, strict=True):
        kv.place(arena, start, 0, size)
    return stored - started, _now(arena) - stored


def _now(arena: Arena) -> float:
    if arena.slabs[0].is_cuda:
        torch.cuda.synchronize(arena.slabs[0].device)
    return time.perf_counter()


def _width(
    engine: Any, settings: QuantSettings, bits: KVBits, all_times: dict[KVBits, _Times]
) -> dict[str, Any]:
    """What a width takes: bytes of a whole chunk, and time; speeds are GB of KV as computed a second."""
    size, layout, times = engine.chunk_size, engine.layout, all_times[bits]
    numbers = sum(spec.heads * spec.head_dim for spec in layout.slabs) * size
    moved_bytes = settings.ttft_tokens // size * size * layout.bytes_per_token
    stored = KVCodec(layout, bits).bytes_for(size)
    ratios = [mine / plain for mine, plain in zip(times.ttft_ms, all_times[16].ttft_ms, strict=True)]
    return {
        "chunk_bytes": stored,
        "bytes_of_float16": round(stored / (2 * numbers), 4),
        "bytes_of_computed": round(stored / (size * layout.bytes_per_token), 4),
        "ttft_ms": spread(times.ttft_ms),
        "ttft_ratio": round(statistics.median(ratios), 3),
        "store_gb_s": round(moved_bytes / statistics.median(times.store_s) / 1e9, 2),
        "load_gb_s": round(moved_bytes / statistics.median(times.load_s) / 1e9, 2),
    }


# --- what was to be reached ----------------------------------------------------------------------


def targets(errors: dict[str, dict[str, Any]], widths: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough."""
    found = [
        _at_most(f"bytes of float16, {bits}", widths[str(bits)]["bytes_of_float16"], limit)
        for bits, limit in MAX_BYTES.items()
    ]
    found += [
        _at_most(f"mean KL, {bits}", errors[str(bits)]["kl_mean"], limit) for bits, limit in MAX_KL.items()
    ]
    agreement = errors["8"]["agreement"]
    found.append(
        {
            "name": "same top token, 8",
            "value": agreement,
            "at_least": MIN_AGREEMENT_8,
            "met": agreement >= MIN_AGREEMENT_8,
        }
    )
    four = errors["4"]["kl_mean"]
    found.append(_at_most("mean KL, 4 / a step per token", four / errors[NAIVE]["kl_mean"], MAX_OVER_NAIVE))
    others = [error["kl_mean"] for name, error in errors.items() if name.startswith("4, ")]
    found.append(_at_most("mean KL, 4 / best other way of 4 bits", four / min(others), 1.0))
    found += [
        _at_most(f"time to the first token, {bits} / 16", widths[str(bits)]["ttft_ratio"], limit)
        for bits, limit in MAX_TTFT.items()
    ]
    return found


def _at_most(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": _rounded(value), "at_most": limit, "met": value <= limit}
