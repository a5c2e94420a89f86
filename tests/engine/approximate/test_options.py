"""Options of approximate reuse: sinks, overlap, windows, ratios; what does not pay is computed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvboost import KVBoost
from kvboost.choices import Origin
from kvboost.errors import CacheFileError, InvalidRequestError
from kvboost.kv.rope import LENGTH_REASON, WINDOW_REASON
from kvboost.proof import calibration
from kvboost.proof.calibration import Calibration
from kvboost.reuse.plan import LOSSY_REASON
from kvboost.reuse.policy import BIT_EXACT_REASON, NOT_CALIBRATED_REASON
from tests.engine.reuse_checks import (
    APPROXIMATE,
    Chat,
    approximate_tokens,
    check_exact_tree,
    check_spans,
    check_store,
    documents,
    joined,
    overlap_reference,
    pay_always,
    shelf_engine,
)
from tests.fixture_types import MakeEngine
from tests.tiny_models import LENGTH_DEPENDENT, long_model, random_ids

pytestmark = pytest.mark.usefixtures("approximate_reuse")


def test_sink_tokens_are_never_approximate(make_engine: MakeEngine) -> None:
    shelf = documents(2, seed=18, low=100, high=160)
    for sink in (0, 40):
        engine = shelf_engine(make_engine, shelf, sink_tokens=sink)
        chat = Chat(engine, shelf[::-1], seed=1)
        for _ in range(3):
            result = chat.turn()
            first = min(span.start for span in result.spans if span.origin in APPROXIMATE)
            assert first == max(sink, 6)
        check_exact_tree(engine)


@pytest.mark.parametrize("sink", [0, 6])
def test_overlap_encoding_sees_the_sink_and_the_last_tokens(sink: int, make_engine: MakeEngine) -> None:
    model = long_model()
    text = random_ids(75, seed=1)
    wanted = overlap_reference(model, text, 16, 10, sink)
    for by_answer in (False, True):
        engine = make_engine(model=model, overlap_k=10, sink_tokens=sink)
        if by_answer:
            engine.generate(text, max_new_tokens=1)
        else:
            engine.warm(text[:60])
            engine.warm(text)
        matches = engine.cache_manager.match_prefix(text, engine.namespace()).matches
        assert matches[-1].end == 75
        for match in matches:
            for pair, wanted_pair in zip(match.chunk.past_key_values, wanted, strict=True):
                for part, full in zip(pair, wanted_pair, strict=True):
                    piece = full[:, :, match.start : match.start + part.shape[2]]
                    assert float((part - piece).norm() / piece.norm()) <= 1e-4


def test_what_is_committed_in_overlap_mode_has_its_encoding(make_engine: MakeEngine) -> None:
    """One's own generate saw everything; what it computed is not what this namespace promises."""
    engine = make_engine(model=long_model(), overlap_k=10)
    text = random_ids(75, seed=1)
    wanted = overlap_reference(engine.model, text, 16, 10, 0)
    prepared = engine.prepare(text, max_new_tokens=1)
    engine.commit(prepared, engine.model.generate(**prepared, max_new_tokens=1, do_sample=False))
    for match in engine.cache_manager.match_prefix(text, engine.namespace()).matches:
        for (key, _), (full, _) in zip(match.chunk.past_key_values, wanted, strict=True):
            piece = full[:, :, match.start : match.end]
            assert float((key[:, :, : piece.shape[2]] - piece).norm() / piece.norm()) <= 1e-4


def test_overlap_chunks_are_labelled_and_repaired_at_their_seams(make_engine: MakeEngine) -> None:
    model = long_model()
    text = random_ids(64 * 6, seed=1)
    options = {"chunk_size": 64, "overlap_k": 16, "recompute_overlap": 4}
    engine = make_engine(model=model, **options)
    engine.warm(text)
    prompt = [*text, *random_ids(9, seed=2)]
    result = engine.generate(prompt, max_new_tokens=6)
    check_spans(result)
    assert result.spans[0].origin is Origin.EXACT
    assert result.spans[0].end == 64
    assert [(s.start, s.end) for s in result.spans if s.origin is Origin.RECOMPUTED] == [
        (start, start + 4) for start in range(64, len(text), 64)
    ]
    assert {s.reason for s in result.spans if s.origin in APPROXIMATE} == {LOSSY_REASON}
    for mode in ("chunk_kv_reuse", "prefix_cache"):
        again = engine.generate(prompt, max_new_tokens=6, mode=mode)
        check_spans(again)
        assert approximate_tokens(again) > 0  # never passed off as exact
    other = make_engine(model=model, **options)
    other.warm(text)
    assert other.generate(prompt, max_new_tokens=6).token_ids == result.token_ids
    none = make_engine(model=model, **{**options, "recompute_strategy": "none"})
    none.warm(text)
    assert none.generate(prompt, max_new_tokens=6).recomputed_tokens == 0
    check_store(engine)


def test_overlap_encodings_are_not_shared(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = long_model()
    engines = [make_engine(model=model, overlap_k=overlap) for overlap in (0, 8, 16)]
    assert len({engine.namespace().family for engine in engines}) == 3
    engines[1].warm(random_ids(60, seed=1))
    engines[1].save(tmp_path / "cache")
    for other in (engines[0], engines[2]):
        with pytest.raises(CacheFileError):
            other.load(tmp_path / "cache")


@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_overlap_needs_a_model_without_a_sliding_window(architecture: str, make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="sliding window of 40"):
        make_engine(architecture, overlap_k=64, chunk_size=64)


def test_overlap_chunks_that_are_called_exact_are_exact(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", overlap_k=64, chunk_size=64)
    text = random_ids(128, seed=5)
    engine.warm(text)
    prompt = [*text, *random_ids(3, seed=6)]
    expected = engine.generate(prompt, max_new_tokens=8, mode="baseline")
    result = engine.generate(prompt, max_new_tokens=8, mode="prefix_cache")
    assert {span.origin for span in result.spans} <= {Origin.EXACT, Origin.LIVE}
    assert result.token_ids == expected.token_ids


def test_overlap_reuse_that_does_not_pay_holds_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), overlap_k=8)
    start, document = random_ids(40, seed=1), random_ids(64, seed=2)
    engine.warm(start)
    engine.warm(document)
    prompt = [*start, *random_ids(200, seed=3), *document[:40], *random_ids(5, seed=4)]
    assert engine.explain(prompt).choice.startswith("prefill")
    engine.generate(prompt, max_new_tokens=1)
    check_store(engine)


def test_bit_exact_reuses_nothing_approximate(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), bit_exact=True)
    document = random_ids(96, seed=1)
    engine.warm(document)
    prompt = [*random_ids(16, seed=2), *document, 7]
    explanation = engine.explain(prompt)
    assert (explanation.choice, explanation.cached_tokens) == (BIT_EXACT_REASON, 0)
    assert engine.generate(prompt, max_new_tokens=2).cached_tokens == 0


@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "qwen2_sliding", "phi3", "gemma2"])
def test_a_window_shorter_than_the_prompt_gets_exact_reuse_only(
    architecture: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(architecture)
    document = random_ids(96, seed=1)
    engine.warm(document)
    prompt = [*random_ids(9, seed=2), *document, 7]
    explanation = engine.explain(prompt)
    assert (explanation.choice, explanation.cached_tokens) == (WINDOW_REASON, 0)
    result = engine.generate(prompt, max_new_tokens=4)
    assert result.cached_tokens == 0
    assert result.token_ids == engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids
    exact = engine.generate([*document, 8], max_new_tokens=4)
    assert exact.cached_tokens == 96


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_rope_that_changes_with_length_gets_exact_reuse_only(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind)
    document = random_ids(64, seed=1)
    engine.warm(document)
    prompt = [*random_ids(9, seed=2), *document, 7]
    explanation = engine.explain(prompt, max_new_tokens=4)
    assert (explanation.choice, explanation.cached_tokens) == (LENGTH_REASON, 0)
    result = engine.generate(prompt, max_new_tokens=4)
    assert result.cached_tokens == 0
    assert result.token_ids == engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids


def test_scattered_matches_are_computed_instead(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    one, two = random_ids(64, seed=1), random_ids(64, seed=2)
    engine.warm(one)
    engine.warm(two)
    prompt = joined([random_ids(300, seed=3), one, random_ids(400, seed=4), two, random_ids(200, seed=5)])
    explanation = engine.explain(prompt)
    assert explanation.choice.startswith("prefill: approximate reuse would cost ")
    assert explanation.cached_tokens == 0
    result = engine.generate(prompt, max_new_tokens=4)
    assert result.cached_tokens == 0
    assert result.token_ids == engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids
    assert engine.explain([*prompt, 7]).cached_tokens >= len(prompt)  # it was all exact, and stored so
    three, four = random_ids(256, seed=6), random_ids(256, seed=7)
    engine.warm(three)
    engine.warm(four)
    worth_it = joined([random_ids(3, seed=8), four, three, random_ids(9, seed=9)])
    assert engine.explain(worth_it).choice.startswith("reuse: approximate reuse would cost 0.")
    check_store(engine)


def test_explain_changes_nothing_and_tells_what_happens(make_engine: MakeEngine) -> None:
    shelf = documents(3, seed=19, low=90, high=160)
    engine = shelf_engine(make_engine, shelf, recompute_ratio=0.0)
    chat = Chat(engine, shelf[::-1], seed=1)
    for _ in range(3):
        asked = [*chat.ids, *random_ids(20 + len(chat.results), seed=1 + 100 * len(chat.results) + 1)]
        store = engine.cache_manager._store
        before = engine.cache_stats(), {k: e.chunk.access_count for k, e in store.entries.items()}
        explanation = engine.explain(asked)
        assert explanation == engine.explain(asked)
        assert before == (
            engine.cache_stats(),
            {k: e.chunk.access_count for k, e in store.entries.items()},
        )
        result = chat.turn()
        assert chat.ids[: len(asked)] == asked
        assert [(s.start, s.end, s.origin, s.reason, s.donor) for s in result.spans] == [
            (s.start, s.end, s.origin, s.reason, s.donor) for s in explanation
        ]
        check_store(engine)


@pytest.mark.parametrize("strategy", ["selective", "cacheblend", "none"])
@pytest.mark.parametrize(("ratio", "selector"), [(0.0, "guided"), (0.1, "guided"), (0.3, "deviation")])
def test_the_ratio_is_kept_whatever_the_strategy(
    strategy: str, ratio: float, selector: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    shelf = documents(3, seed=20, low=90, high=160)
    engine = shelf_engine(
        make_engine, shelf, recompute_ratio=ratio, selector=selector, recompute_strategy=strategy
    )
    prompt = [*random_ids(5, seed=1), *joined(shelf[::-1]), *random_ids(9, seed=2)]
    result = engine.generate(prompt, max_new_tokens=2)
    assert result.recomputed_tokens == math.ceil(ratio * approximate_tokens(result))


def made_up(engine: KVBoost, selector: str = "guided", **errors: float) -> Calibration:
    by_ratio = {float(name.replace("_", ".").strip("r")): error for name, error in errors.items()}
    return Calibration("made up", engine.namespace("").family, selector, by_ratio, 12, "2026-01-01T00:00:00")


def test_the_automatic_ratio(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    model = long_model()
    shelf = documents(3, seed=21, low=90, high=160)
    prompt = [*random_ids(5, seed=1), *joined(shelf[::-1]), *random_ids(9, seed=2)]
    uncalibrated = shelf_engine(make_engine, shelf, model=model, recompute_ratio="auto")
    assert uncalibrated.explain(prompt).choice == NOT_CALIBRATED_REASON
    assert uncalibrated.generate(prompt, max_new_tokens=2).cached_tokens == 0
    path = calibration.save(made_up(uncalibrated, r0_1=0.08, r0_2=0.04, r0_3=0.01))
    for bound, ratio in ((None, 0.2), (0.05, 0.2), (0.02, 0.3), (0.5, 0.1)):
        engine = shelf_engine(make_engine, shelf, model=model, recompute_ratio="auto", max_kl=bound)
        result = engine.generate(prompt, max_new_tokens=2)
        assert result.recomputed_tokens == math.ceil(ratio * approximate_tokens(result)) > 0
    strict = shelf_engine(make_engine, shelf, model=model, recompute_ratio="auto", max_kl=0.001)
    assert strict.explain(prompt).choice == "exact reuse only: no ratio held max_kl=0.001"
    assert strict.generate(prompt, max_new_tokens=2).cached_tokens == 0
    other_selector = make_engine(model=model, recompute_ratio="auto", selector="deviation")
    assert other_selector.explain(prompt).choice == NOT_CALIBRATED_REASON
    for damage in ("", "{", "[]", '{"format": "kvboost-calibration", "version": 2}', "\x00\xff"):
        path.write_text(damage, encoding="latin-1")
        with pytest.raises(CacheFileError, match="kvboost calibrate"):
            make_engine(model=model, recompute_ratio="auto")
