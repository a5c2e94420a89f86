"""`bench lookup`: what it costs to find a long prompt, and whether that grows with what is stored.

No model: the store alone, with tiny KV. All stores are filled first and then take turns, so that
whatever else the machine does hits them alike. Knows no terminal.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.suite import tiny_kv
from kvboost.bench.record import machine_record, spread
from kvboost.errors import InvalidRequestError
from kvboost.models import chained_hash_from_bytes, token_bytes
from kvboost.store.manager import KVCacheManager
from kvboost.store.prefix_tree import TOKEN_BYTES

Tell = Callable[[str], None]
SHAPES = ("separate texts", "texts under one parent")
MAX_RATIO = 1.5  # time with the most chunks over time with the fewest
MAX_TOTAL_MS = 150.0
MAX_HASH_MS = 60.0
_VOCABULARY = 150_000
_TEXT_CHUNKS = 8  # length of the other texts, where they are separate ones


@dataclass(frozen=True)
class LookupSettings:
    """How much is stored and measured. `sizes` count all chunks of a store, the prompt's included."""

    sizes: tuple[int, ...] = (1_000, 10_000, 100_000)
    prompt_tokens: int = 100_000
    chunk_size: int = 128
    rounds: int = 15
    seed: int = 0

    @property
    def prompt_chunks(self) -> int:
        return -(-self.prompt_tokens // self.chunk_size)

    def check(self) -> None:
        """Raise where a store could not even hold the prompt."""
        if min(self.sizes) < self.prompt_chunks:
            raise InvalidRequestError(
                f"a prompt of {self.prompt_tokens} tokens has {self.prompt_chunks} chunks; every size must "
                f"be at least that, got {min(self.sizes)}"
            )


@dataclass
class FilledStore:
    """A store that holds the prompt among `size` chunks, and the times measured on it."""

    shape: str
    size: int
    manager: KVCacheManager
    fill_us_per_chunk: float
    times_ms: list[float] = dataclasses.field(default_factory=list)


def run(settings: LookupSettings, tell: Tell = lambda _text: None) -> dict[str, Any]:
    """Fill all stores, measure in turns, return the record; `tell` hears what is being done."""
    settings.check()
    machine = machine_record(torch.device("cpu"))
    random = np.random.default_rng(settings.seed)
    prompt = _tokens(random, settings.prompt_tokens)
    stores = []
    for size in settings.sizes:
        for shape in SHAPES:
            tell(f"filling a store: {size:,} chunks, {shape}")
            stores.append(_filled(settings, shape, size, prompt, random))
    pieces: dict[str, list[float]] = {"bytes": [], "hashes": []}
    for number in range(-1, settings.rounds):  # the first round warms up
        tell(f"round {max(number, 0) + 1} of {settings.rounds}")
        for store in stores:
            elapsed = _lookup_ms(store.manager, prompt)
            if number >= 0:
                store.times_ms.append(elapsed)
        for name, elapsed in _pieces_ms(prompt, settings.chunk_size).items():
            pieces[name].append(elapsed)
    parts = {name: spread(times) for name, times in pieces.items()}
    return {
        "benchmark": "lookup",
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "prompt_chunks": settings.prompt_chunks,
        "stores": [_outcome(store, parts["hashes"]["median"]) for store in stores],
        "pieces_ms": parts,
        "targets": _targets(stores, parts["hashes"]["median"]),
    }


def _tokens(random: np.random.Generator, count: int) -> np.ndarray:
    return random.integers(0, _VOCABULARY, count)


def _filled(
    settings: LookupSettings, shape: str, size: int, prompt: np.ndarray, random: np.random.Generator
) -> FilledStore:
    """A store with the prompt and, up to `size` chunks, other texts: separate ones, or all behind
    the prompt's first chunk."""
    manager = KVCacheManager(None, chunk_size=settings.chunk_size)
    started = time.perf_counter()
    tiny_kv.store(manager, prompt)
    others = size - settings.prompt_chunks
    shared = prompt[: settings.chunk_size] if shape == SHAPES[1] else prompt[:0]
    chunks_each = 1 if len(shared) else _TEXT_CHUNKS
    for first in range(0, others, chunks_each):
        new = _tokens(random, min(chunks_each, others - first) * settings.chunk_size)
        tiny_kv.store(manager, np.concatenate([shared, new]))
    elapsed = time.perf_counter() - started
    if len(manager) != size:
        raise AssertionError(f"{len(manager)} chunks are stored, {size} were meant to be")
    return FilledStore(shape, size, manager, elapsed / size * 1e6)


def _lookup_ms(manager: KVCacheManager, prompt: np.ndarray) -> float:
    """A look-up as a request does it: found, held, released and counted as used."""
    started = time.perf_counter()
    match = manager.match_prefix(prompt, hold=True)
    manager.release(match)
    elapsed = time.perf_counter() - started
    if match.length != len(prompt):
        raise AssertionError(f"{match.length} of {len(prompt)} tokens were found, all are stored")
    return elapsed * 1e3


def _pieces_ms(prompt: np.ndarray, chunk_size: int) -> dict[str, float]:
    """Apart from the store: ids to bytes, and the chained hashes that storing the prompt needs."""
    started = time.perf_counter()
    raw = token_bytes(prompt)
    bytes_done = time.perf_counter()
    key: str | None = None
    for first in range(0, len(raw), chunk_size * TOKEN_BYTES):
        key = chained_hash_from_bytes(raw[first : first + chunk_size * TOKEN_BYTES], key)
    hashes_done = time.perf_counter()
    return {"bytes": (bytes_done - started) * 1e3, "hashes": (hashes_done - bytes_done) * 1e3}


def _outcome(store: FilledStore, hashes_ms: float) -> dict[str, Any]:
    times = spread(store.times_ms)
    return {
        "shape": store.shape,
        "chunks": store.size,
        "lookup_ms": times,
        "total_ms": round(times["median"] + hashes_ms, 2),
        "fill_us_per_chunk": round(store.fill_us_per_chunk, 1),
    }


def _targets(stores: list[FilledStore], hashes_ms: float) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough."""
    found: list[tuple[str, float, float]] = []
    for shape in SHAPES:
        of_shape = sorted((store for store in stores if store.shape == shape), key=lambda store: store.size)
        few, many = (statistics.median(store.times_ms) for store in (of_shape[0], of_shape[-1]))
        name = f"time, {of_shape[-1].size:,} chunks / {of_shape[0].size:,}, {shape}"
        found.append((name, many / few, MAX_RATIO))
    slowest = max(statistics.median(store.times_ms) for store in stores)
    found.append(("look-up and hashes, slowest store, ms", slowest + hashes_ms, MAX_TOTAL_MS))
    found.append(("hashes of the whole prompt, ms", hashes_ms, MAX_HASH_MS))
    return [
        {"name": name, "value": round(value, 2), "at_most": limit, "met": value <= limit}
        for name, value, limit in found
    ]
