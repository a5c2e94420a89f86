"""What an engine writes to the logger "kvboost", and what `warm` says of chunks that had to go."""

from __future__ import annotations

import logging

import pytest

from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    assert all(record.name.startswith("kvboost.") for record in caplog.records)
    return [record.message for record in caplog.records if record.levelno == level]


def test_an_engine_says_what_it_was_made_with(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvboost"):
        make_engine(chunk_size=32, max_chunks=7, cache_salt="secret")
    (line,) = lines(caplog, logging.INFO)
    assert line.startswith("engine for LlamaForCausalLM, float32 on cpu: chunk_size=32, max_chunks=7, ")
    assert "secret" not in line


def test_a_line_for_every_request_and_every_warm(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    prompt = random_ids(50, seed=1)
    with caplog.at_level(logging.DEBUG, "kvboost"):
        engine.warm(prompt[:32])
        result = engine.generate(prompt, 4)
        engine.generate_many([prompt, [*prompt, 5]], 2)
    warmed, *answered = lines(caplog, logging.DEBUG)
    assert warmed == "warmed 32 tokens: 2 chunks stored, 0 there before, 0 evicted"
    assert answered[0] == (
        f"chunk_kv_reuse: 4 tokens, the first after {result.ttft_ms:.0f} ms; of 50 prompt tokens "
        "32 from the cache exactly, 0 approximately, 0 computed again"
    )
    assert len(answered) == 3
    assert all(line.startswith("prefix_cache: 2 tokens") for line in answered[1:])


def test_no_handlers_come_with_the_package() -> None:
    assert logging.getLogger("kvboost").handlers == []


def test_warm_says_what_had_to_go(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(max_chunks=4)
    assert engine.warm(random_ids(48, seed=1)).evicted_chunks == 0
    second, third = (engine.warm(random_ids(48, seed=seed)) for seed in (2, 3))
    assert second.evicted_chunks > 0
    assert f"{second.evicted_chunks} evicted" in repr(second)
    assert engine.cache_stats()["evicted_chunks"] == second.evicted_chunks + third.evicted_chunks
    (line,) = lines(caplog, logging.WARNING)
    assert line.startswith("max_chunks=4 is reached")
