"""`bench homes`: the first token behind cached text, by where its KV lies and by its bits.

On the GPU that computes, or in pinned memory of the host, beside one bare copy of the same bytes from there.
Nothing of it lies in the engine's own batch when a request comes: all of it is placed. Knows no terminal.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.bench.record import at_most, head_of, spread
from kvboost.bench.text import TextSource
from kvboost.errors import InvalidRequestError
from kvboost.kv.pinned import POOL

Report = Callable[[int, int, str], None]
OpenEngine = Callable[..., Any]
HOMES: dict[str, dict[str, Any]] = {
    "device": {"cache_device": "model"},
    "host": {"cache_device": "cpu", "gpu_cache_bytes": 0},
}
BITS = (16, 8, 4)
MAX_OVER_COPY = (1.2, 12.0)  # times the bare copy, and so many ms
MAX_OVER_UNQUANTIZED = 1.25
_WARM_UPS = 3  # steps are captured when they come again


@dataclass(frozen=True)
class HomeSettings:
    """How much is measured."""

    lengths: tuple[int, ...] = (8_192, 32_768)
    tail_tokens: int = 20
    rounds: int = 5
    seed: int = 0


def run(
    engine: Any,
    model: str,
    settings: HomeSettings,
    open_engine: OpenEngine,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure and return the record; `open_engine` opens engines on the model of `engine`."""
    device = engine.model.device
    if device.type != "cuda":
        raise InvalidRequestError("this benchmark needs a GPU: elsewhere KV has one home")
    head = head_of("homes", engine, model, settings)
    engines = {
        f"{home} {bits}": open_engine(kv_cache_bits=bits, **options)
        for home, options in HOMES.items()
        for bits in BITS
    }
    try:
        rows = [_row(engines, device, length, settings, report) for length in settings.lengths]
    finally:
        for each in engines.values():
            each.close()
    return {**head, "lengths": rows, "targets": targets(rows)}


def _row(
    engines: dict[str, Any], device: torch.device, length: int, settings: HomeSettings, report: Report
) -> dict[str, Any]:
    draw = random.Random(settings.seed + length)
    first = next(iter(engines.values()))
    words = TextSource(first.tokenizer, 1_000).prefix(1_000)
    prefix = draw.choices(words, k=length)
    for each in engines.values():
        each.clear()
        each.warm(prefix)
    nbytes = length * first.layout.bytes_per_token
    times: dict[str, list[float]] = {name: [] for name in engines}
    cached = dict.fromkeys(engines, 0)
    for number in range(-_WARM_UPS, settings.rounds):
        report(max(number, 0), settings.rounds, f"{length:,} tokens")
        prompt = prefix + draw.choices(words, k=settings.tail_tokens)
        for name, each in engines.items():
            each.core.resident.drop()
            torch.cuda.synchronize(device)
            result = each.generate(prompt, 2, mode="prefix_cache", min_new_tokens=2)
            times[name] += [result.ttft_ms] if number >= 0 else []
            cached[name] = result.cached_tokens
    copy = _copy_ms(nbytes, device, settings.rounds)
    return {
        "cached_tokens": length,
        "bytes": nbytes,
        "bare_copy_ms": spread(copy),
        "homes": {
            name: {"ttft_ms": spread(values), "reused_tokens": cached[name]} for name, values in times.items()
        },
    }


def _copy_ms(nbytes: int, device: torch.device, rounds: int) -> list[float]:
    """One copy of so many bytes out of pinned memory, again and again."""
    host = POOL.empty((nbytes,), torch.uint8)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        found.append(1000 * (time.perf_counter() - started))
    return found[1:]


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached, and whether it was."""
    found = []
    times, more = MAX_OVER_COPY
    for row in rows:
        ttft = {name: each["ttft_ms"]["median"] for name, each in row["homes"].items()}
        allowed = times * row["bare_copy_ms"]["median"] + more
        where = f"{row['cached_tokens']:,} tokens"
        found.append(
            at_most(
                f"{where}: from the host / ({times:g} x bare copy + {more:g} ms)",
                ttft["host 16"] / allowed,
                1.0,
            )
        )
        for home in HOMES:
            for bits in BITS[1:]:
                over = ttft[f"{home} {bits}"] / ttft[f"{home} 16"]
                found.append(
                    at_most(f"{where}: {home}, {bits} bits / unquantized", over, MAX_OVER_UNQUANTIZED)
                )
    return found
