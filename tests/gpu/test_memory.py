"""Two thousand mixed requests: memory stays flat, and graphs take what the statistics say."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

from kvboost import KVBoost

pytestmark = [
    pytest.mark.usefixtures("approximate_reuse"),
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

REQUESTS = 2_000
WARM_UP = 400
SLACK = 64 << 20


def ask(engine: KVBoost, draw: random.Random, shared: list[list[int]]) -> None:
    """One request of any kind."""

    def prompt() -> list[int]:
        return [
            *draw.choice(shared)[: draw.randint(1, 900)],
            *(draw.randint(1, 250) for _ in range(draw.randint(1, 200))),
        ]

    options: dict[str, Any] = draw.choice(
        [{}, {}, {"do_sample": True, "seed": 1}, {"repetition_penalty": 1.2}]
    )
    kind = draw.random()
    tokens = draw.randint(1, 24)
    if kind < 0.7:
        engine.generate(prompt(), tokens, mode="prefix_cache", cache_salt=draw.choice(["", "a"]), **options)
    elif kind < 0.8:
        engine.generate_batch([prompt() for _ in range(draw.randint(2, 12))], tokens, mode="prefix_cache")
    elif kind < 0.9:
        engine.score([prompt()], [[draw.randint(1, 250) for _ in range(5)]])
    elif kind < 0.95:
        engine.stream(prompt(), tokens, mode="prefix_cache").close()
    else:
        engine.generate(prompt(), tokens, mode="chunk_kv_reuse")


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_memory_stays_flat() -> None:
    draw = random.Random(0)
    shared = [[draw.randint(1, 250) for _ in range(900)] for _ in range(5)]
    with KVBoost.from_pretrained("random:1b", device="cuda", dtype="bfloat16", max_chunks=200) as engine:
        for _ in range(WARM_UP):
            ask(engine, draw, shared)
        before, graphs = allocated(), engine.cache_stats()["steps"]
        for _ in range(REQUESTS - WARM_UP):
            ask(engine, draw, shared)
        after, later = allocated(), engine.cache_stats()["steps"]
        grown = later["graph_bytes"] - graphs["graph_bytes"]
        assert after - before <= grown + SLACK, (before, after, grown)
        assert later["captured"] > graphs["captured"]
        assert not later["not_captured"]
