"""An engine says once that it reuses text approximately, when the answers are there and stored."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvboost import ApproximateReuseWarning, GenerationMode, KVBoost
from kvboost.errors import PartialResultsError
from kvboost.proof.fresh_engine import fresh_engine
from tests.engine.reuse_checks import documents, joined, pay_always, shelf_engine
from tests.fixture_types import MakeEngine
from tests.threads import in_threads
from tests.tiny_models import long_model, random_ids

SHELF = documents(3, seed=91, low=80, high=120)
PROMPT = [*random_ids(5, seed=1), *joined(SHELF[::-1]), *random_ids(9, seed=2)]
OTHER = [*random_ids(7, seed=3), *joined(SHELF[::-1]), *random_ids(9, seed=4)]
MOVED = GenerationMode.CHUNK_KV_REUSE


@pytest.fixture
def engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> KVBoost:
    pay_always(monkeypatch)
    return shelf_engine(make_engine, SHELF, model=long_model())


@contextmanager
def raised() -> Iterator[Any]:
    """The warning as an error, which is what this suite makes of all warnings."""
    with pytest.raises(ApproximateReuseWarning) as caught:
        yield caught


def streamed(engine: KVBoost) -> list[Any]:
    found = dict(engine.stream_many([PROMPT, OTHER], 3, mode=MOVED))
    return [found[index] for index in sorted(found)]


WAYS: dict[str, Callable[[KVBoost], Any]] = {
    "generate": lambda engine: [engine.generate(PROMPT, 3)],
    "stream": lambda engine: [engine.stream(PROMPT, 3).result],
    "generate_batch": lambda engine: engine.generate_batch([PROMPT, OTHER], 3, mode=MOVED),
    "generate_many": lambda engine: engine.generate_many([PROMPT, OTHER], 3, mode=MOVED),
    "stream_many": streamed,
    "score": lambda engine: engine.score([PROMPT, OTHER], [[5, 6], [7]], mode=MOVED),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_warns_once(
    engine: KVBoost, way: str, approximate_reuse: list[ApproximateReuseWarning]
) -> None:
    for _ in range(2):
        results = WAYS[way](engine)
        (warning,) = approximate_reuse
    approximate = sum(result.approximate_tokens for result in warning.results)
    total = sum(result.prompt_tokens for result in results)
    assert str(warning).startswith(f"{approximate:,} of {total:,} prompt tokens were reused approximately")
    assert 'mode="prefix_cache"' in str(warning)
    assert "docs/limits.md" in str(warning)
    engine.generate([*random_ids(3, seed=9), *PROMPT], 2)
    assert len(approximate_reuse) == 1


@pytest.mark.parametrize("way", WAYS)
def test_as_an_error_it_loses_nothing(engine: KVBoost, way: str) -> None:
    with raised() as caught:
        WAYS[way](engine)
    stats = engine.cache_stats()
    results = caught.value.results
    assert stats["requests"] == len(results)
    assert stats["hits"]["approximate"] > 0
    for before, after in zip(results, WAYS[way](engine), strict=True):
        assert after.saved_tokens > before.saved_tokens  # what was repaired is in the cache, too
    engine.cache_manager.check_integrity()


def test_it_points_at_the_line_that_asked(engine: KVBoost) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.generate_many([PROMPT, OTHER], 3, mode=MOVED)
    (warning,) = caught
    assert warning.filename == __file__
    assert warning.category is ApproximateReuseWarning


def test_a_stream_warns_its_reader_and_keeps_text_and_result(engine: KVBoost) -> None:
    stream = engine.stream(PROMPT, 4)
    pieces: list[str] = []
    with raised() as caught:
        pieces.extend(stream)
    assert next(stream, None) is None
    assert "".join(pieces) == stream.result.output_text
    assert caught.value.results == [stream.result]


def test_a_stream_that_is_closed_early_leaves_it_to_the_next_call(engine: KVBoost) -> None:
    with engine.stream(PROMPT, 50) as stream:
        next(stream)
    with raised():
        engine.generate(OTHER, 2)


def test_where_prompts_fail_it_is_logged(engine: KVBoost, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(ids: Any, scores: Any) -> Any:
        if ids[0, : len(OTHER)].tolist() == OTHER:
            raise RuntimeError("not this one")
        return scores

    with pytest.raises(PartialResultsError) as caught:
        engine.generate_many([PROMPT, OTHER], 3, mode=MOVED, logits_processor=[refuse])
    assert caught.value.results[0].approximate_tokens > 0
    (record,) = [each for each in caplog.records if "reused approximately" in each.message]
    assert record.name.startswith("kvboost.")
    assert record.levelno == logging.WARNING
    engine.generate([*random_ids(3, seed=9), *PROMPT], 2)


def test_own_loops_hear_of_it_when_the_answer_is_stored(make_engine: MakeEngine) -> None:
    engine = make_engine(overlap_k=4)
    prompt = random_ids(100, seed=5)
    engine.warm(prompt)
    prepared = engine.prepare(prompt)
    assert prepared.approximate_tokens > 0
    output = engine.model.generate(**prepared, max_new_tokens=3, do_sample=False)
    stored = engine.cache_stats()["stored_chunks"]
    with raised() as caught:
        engine.commit(prepared, output)
    assert "overlap_k=0" in str(caught.value)
    assert engine.cache_stats()["stored_chunks"] > stored


def test_of_many_threads_one_is_warned(
    engine: KVBoost, approximate_reuse: list[ApproximateReuseWarning]
) -> None:
    together = threading.Barrier(4)

    def ask(number: int) -> None:
        together.wait()
        assert engine.generate([*random_ids(4 + number, seed=number), *PROMPT], 2).approximate_tokens

    in_threads(4, ask)
    assert len(approximate_reuse) == 1


@pytest.mark.parametrize("mode", ["prefix_cache", "baseline"])
def test_exact_answers_do_not_warn(engine: KVBoost, mode: str) -> None:
    engine.warm(PROMPT)
    for _ in range(2):
        assert engine.generate(PROMPT, 2, mode).approximate_tokens == 0


def test_what_is_all_computed_again_is_no_approximation(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    engine = shelf_engine(make_engine, SHELF, model=long_model(), recompute_ratio=1.0)
    result = engine.generate(PROMPT, 2)
    assert result.recomputed_tokens > 0
    assert result.approximate_tokens == 0


def test_proofs_say_nothing(engine: KVBoost) -> None:
    with fresh_engine(engine) as fresh:
        for document in SHELF:
            fresh.warm(document)
        assert fresh.generate(PROMPT, 2).approximate_tokens
    report = engine.verify_correctness([PROMPT], 2, mode=MOVED)
    assert report.prompts[0].origins["approximate"] > 0
    with raised():
        engine.generate(OTHER, 2)
