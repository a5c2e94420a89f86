"""What tests do with an engine that has a disk: save, evict, damage, ask and compare."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvboost import GenerationResult, KVBoost
from kvboost.choices import Origin
from kvboost.disk.tier import SLOTS, DiskTier
from tests.engine.reuse_checks import check_spans, fresh_kv, joined

Hang = Callable[..., threading.Event]
ALL_CALLS = ("preadv", "pwritev", "fdatasync")
DEADLINE_S = 1.0  # in tests with a disk that hangs
SLOT_BYTES = 16_384  # of a chunk of 16 tokens of the tiny llama: 12 KiB and a header
REAL_CALLS = {name: getattr(os, name) for name in ALL_CALLS}


def tier_of(engine: KVBoost) -> DiskTier:
    assert engine.core.parts.disk is not None
    tier = engine.core.parts.disk.tier
    assert isinstance(tier, DiskTier)
    return tier


def slots_of(engine: KVBoost) -> Path:
    return tier_of(engine).folder / SLOTS


def flush(engine: KVBoost) -> None:
    assert engine.core.parts.disk is not None
    assert engine.core.parts.disk.flush(20.0)


def go_cold(engine: KVBoost) -> None:
    """Save all, and evict from RAM what is on disk."""
    flush(engine)
    manager = engine.cache_manager
    with manager._store.lock:
        pool = manager._store
        while keys := [key for key in pool.budget.evictable() if key in pool.saved]:
            for key in keys:
                pool._evict(pool.entries[key])
    engine.core.parts.workspace.drop()
    manager.check_integrity()


def answer(
    engine: KVBoost, prompt: Sequence[int], mode: str = "prefix_cache", *, tokens: int = 4, **options: Any
) -> GenerationResult:
    result = engine.generate(list(prompt), max_new_tokens=tokens, mode=mode, **options)
    check_spans(result)
    return result


def answers_as_baseline(engine: KVBoost, prompt: Sequence[int], **options: Any) -> GenerationResult:
    """An exact answer with reuse, which must be BASELINE's."""
    result = answer(engine, prompt, **options)
    assert result.token_ids == answer(engine, prompt, "baseline").token_ids
    return result


def shape_of(result: GenerationResult) -> list[tuple[int, int, Origin, str, str]]:
    return [(span.start, span.end, span.origin, span.reason, span.donor) for span in result.spans]


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns; fails where it takes longer."""
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not through after {seconds} s"
    if errors:
        raise errors[0]
    return outcome[0]


def check_exact_on_disk(engine: KVBoost) -> int:
    """Every chunk on disk of the exact chains holds what a full prefill gives; returns their number."""
    tier = tier_of(engine)
    ours = {
        entry.header.key: chunk
        for entry in tier.entries()
        if entry.header.meta["namespace"] == engine.namespace().key
        and (chunk := tier.load(entry)) is not None
    }
    for chunk in ours.values():
        path = [chunk]
        while path[-1].parent_hash in ours:
            path.append(ours[path[-1].parent_hash])
        if path[-1].parent_hash != engine.namespace().key:
            continue  # what it follows was evicted
        full = fresh_kv(engine.model, joined([part.token_ids for part in reversed(path)]))
        for pair, wanted in zip(chunk.past_key_values, full, strict=True):
            for part, whole in zip(pair, wanted, strict=True):
                piece = whole[:, :, chunk.position_start : chunk.position_end]
                assert float((part - piece).norm() / piece.norm()) <= 1e-4
    return len(ours)


def flip(engine: KVBoost, text: Sequence[int], chunk_number: int, at: int = 5000) -> None:
    """Damage one byte of a chunk of `text` on disk."""
    match = engine.cache_manager.match_prefix(list(text), engine.namespace())
    entry = tier_of(engine).entry(match.matches[chunk_number].chunk.chunk_id)
    assert entry is not None
    with slots_of(engine).open("r+b") as file:
        file.seek(entry.slot * tier_of(engine).slot_bytes + at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
