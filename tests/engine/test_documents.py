"""`warm_documents`: documents are read behind other text, stored exactly, and found anywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import KVBoost
from kvboost.choices import Origin
from kvboost.errors import InvalidRequestError
from kvboost.executor import windows
from kvboost.executor.documents import LEAD_IN, LEAD_IN_TOKENS, SEPARATOR
from kvboost.executor.warming import Warmer
from kvboost.executor.windows import CONTEXT_TOKENS
from tests.engine.reuse_checks import (
    check_exact_tree,
    check_spans,
    check_store,
    documents,
    joined,
    pay_always,
)
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("approximate_reuse")

SYSTEM = random_ids(50, seed=4711)


def found_of(engine: KVBoost, document: Sequence[int], before: int = 37) -> int:
    """How many tokens of a document are found in a prompt that begins with other text."""
    prompt = [*random_ids(before, seed=31), *document, *random_ids(9, seed=32)]
    result = engine.explain(prompt)
    inside = range(before, before + len(document))
    return sum(
        len(range(max(span.start, inside.start), min(span.end, inside.stop)))
        for span in result.spans
        if span.origin is not Origin.LIVE
    )


def planned(engine: KVBoost, texts: Sequence[Any], behind: Any = None) -> list[list[int]]:
    """The windows that would be read, as the numbers of their documents."""
    plan = engine.core.documents.plan(texts, behind, None)
    return [[place.document for place in window.places] for window in plan.windows]


# --- found again ------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [None, SYSTEM])
def test_every_document_is_found_in_another_order(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, behind: list[int] | None
) -> None:
    pay_always(monkeypatch)
    engine = make_engine(model=long_model())
    shelf = documents(8, seed=5)
    results = engine.warm_documents(shelf, behind)
    assert [result.token_count for result in results] == [len(document) for document in shelf]
    for result in results:
        assert result.chunks_stored >= result.token_count // 16
        assert result.alignment_warning is None
    order = random.Random(3).sample(shelf, len(shelf))
    pieces: list[list[int]] = [random_ids(13, seed=6)]
    wanted = []
    for document in order:
        start = sum(map(len, pieces))
        wanted.append(range(start, start + len(document)))
        pieces += [document, random_ids(3, seed=len(pieces))]
    result = engine.generate(joined(pieces), max_new_tokens=2)
    check_spans(result)
    for place in wanted:
        got = sum(
            len(range(max(s.start, place.start), min(s.end, place.stop)))
            for s in result.spans
            if s.origin is not Origin.LIVE
        )
        assert got >= 0.97 * len(place)
    check_store(engine)


def test_what_is_stored_is_exact(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    shelf = documents(5, seed=6)
    engine.warm_documents(shelf, SYSTEM)
    assert check_exact_tree(engine) == engine.cache_stats()["chunks"] > 5
    prompt = [*SYSTEM, *shelf[0], *random_ids(7, seed=1)]
    result = engine.generate(prompt, max_new_tokens=8, mode="prefix_cache")
    assert result.cached_tokens >= len(SYSTEM) + len(shelf[0])
    assert {span.origin for span in result.spans} == {Origin.EXACT, Origin.LIVE}
    assert result.token_ids == engine.generate(prompt, max_new_tokens=8, mode="baseline").token_ids


def test_text_and_messages(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    texts = [
        "The mill grinds on Mondays, when the wind is good. " * 3,
        "The ferry leaves at eight and at four. " * 4,
    ]
    rules = [{"role": "system", "content": "Answer with the help of the documents."}]
    results = engine.warm_documents(texts, rules)
    assert [result.token_count for result in results] == [len(text) for text in texts]
    prompt = [*engine.tokenize(rules, warming=True), *engine.tokenize(texts[0]), *engine.tokenize(SEPARATOR)]
    assert engine.explain([*prompt, 9, 9], mode="prefix_cache").cached_tokens == len(prompt)
    assert found_of(engine, engine.tokenize(texts[1])) >= 0.97 * len(texts[1])


def test_special_tokens_stand_at_the_start_only() -> None:
    """A tokenizer that puts a token before every text puts it before the lead-in, and not into the middle."""
    tokenizer = tiny_tokenizer()
    from tokenizers.processors import TemplateProcessing

    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    engine = KVBoost(long_model(), tokenizer, chunk_size=16, max_chunks=None)
    (window,) = engine.core.documents.plan(["ab" * 40, "cd" * 40], None, None).windows
    assert window.token_ids[0] == 1
    assert np.count_nonzero(window.token_ids == 1) == 1
    assert np.count_nonzero(window.token_ids == 2) == 0
    assert window.token_ids[1:81].tolist() == tokenizer("cd" * 40, add_special_tokens=False)["input_ids"]
    assert window.places[0].start == 1 + 80 + len(SEPARATOR)
    engine.close()


# --- behind what ------------------------------------------------------------------------------


def test_no_document_is_read_first_of_all(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    lead = engine.tokenize(LEAD_IN)[:LEAD_IN_TOKENS]
    (document,) = documents(1, seed=7)
    engine.warm_documents([document])
    assert engine.explain([*lead, *document, 9], mode="prefix_cache").cached_tokens == len(lead) + len(
        document
    )
    assert engine.explain([*document, 9], mode="prefix_cache").cached_tokens == 0


def test_a_window_begins_with_the_end_of_the_document_before(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    shelf = [random_ids(700, seed=number) for number in range(7)]
    plan = engine.core.documents.plan(shelf, None, None)
    assert [[place.document for place in window.places] for window in plan.windows] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]
    separator = engine.tokenize(SEPARATOR)
    for window, before in zip(plan.windows, (6, 2, 5), strict=True):
        lead = [*shelf[before][-LEAD_IN_TOKENS:], *separator]
        assert window.token_ids[: len(lead)].tolist() == lead
        assert window.places[0].start == len(lead)
    engine.warm_documents(shelf)
    check_exact_tree(engine)
    assert planned(engine, shelf[::-1]) == []


def test_windows_roll_and_are_bounded(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), max_chunks=None)
    shelf = [random_ids(400, seed=number) for number in range(12)]
    plan = engine.core.documents.plan(shelf, SYSTEM, None)
    assert [[place.document for place in window.places] for window in plan.windows] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11],
    ]
    separator = engine.tokenize(SEPARATOR)
    for window in plan.windows:
        ids = window.token_ids.tolist()
        texts = [shelf[place.document] for place in window.places]
        assert ids == [*SYSTEM, *joined([[*text, *separator] for text in texts])][: len(ids)]
        assert ids[-400:] == texts[-1]
        assert all(len(SYSTEM) <= place.start <= CONTEXT_TOKENS for place in window.places)
        assert all(ids[place.start : place.end] == shelf[place.document] for place in window.places)


def test_a_long_behind_gives_each_document_a_window(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    assert planned(engine, documents(3, seed=8), random_ids(CONTEXT_TOKENS + 1, seed=1)) == [[0], [1], [2]]


def test_windows_end_where_the_positions_do(make_engine: MakeEngine) -> None:
    engine = make_engine()  # 1,024 positions
    shelf = [random_ids(size, seed=size) for size in (500, 300, 90, 1000, 400)]
    plan = engine.core.documents.plan(shelf, None, None)
    assert [[place.document for place in window.places] for window in plan.windows] == [[0], [1, 2], [3], [4]]
    assert max(len(window.token_ids) for window in plan.windows) == 1024
    assert plan.windows[2].places[0].start == 24, "the lead-in gives way"
    results = engine.warm_documents(shelf)
    assert all(result.alignment_warning is None for result in results)
    check_exact_tree(engine)


def test_behind_is_computed_once(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CONTEXT_TOKENS", 0)  # a window for each
    engine = make_engine(model=long_model())
    read: list[int] = []
    prefill = Warmer.read.__globals__["decode"].prefill

    def counted(model: Any, ids: Any, arena: Any, end: int, **options: Any) -> Any:
        read.append(end - arena.length)
        return prefill(model, ids, arena, end, **options)

    monkeypatch.setattr(Warmer.read.__globals__["decode"], "prefill", counted)
    shelf = documents(3, seed=9)
    engine.warm_documents(shelf, SYSTEM)
    assert read == [len(SYSTEM) + len(shelf[0]), len(shelf[1]), len(shelf[2])]


# --- not twice --------------------------------------------------------------------------------


def test_duplicates_are_read_once(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    one, two = documents(2, seed=10)
    assert planned(engine, [one, two, one, one]) == [[0, 1]]
    results = engine.warm_documents([one, two, one, one])
    assert results[0] == results[2] == results[3] != results[1]


def test_what_is_held_is_not_read_again(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    shelf = documents(4, seed=11)
    before = engine.warm_documents(shelf[:3])
    assert planned(engine, [shelf[2], shelf[3], shelf[0]]) == [[1]]
    after = engine.warm_documents([shelf[2], shelf[3], shelf[0]])
    assert [int(after[0]), int(after[2])] == [int(before[2]), int(before[0])]
    assert planned(engine, shelf) == []
    assert engine.core.documents.plan(shelf, None, None).held_tokens == sum(map(len, shelf))


def test_what_was_read_alone_is_read_again(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    (document,) = documents(1, seed=12)
    engine.warm(document)
    assert planned(engine, [document]) == [[0]]
    engine.warm_documents([document])
    prompt = [*random_ids(20, seed=1), *document, *random_ids(9, seed=2)]
    moved = [span.reason for span in engine.explain(prompt).spans if span.origin is not Origin.LIVE]
    lead = len(engine.tokenize(LEAD_IN)[:LEAD_IN_TOKENS])
    assert set(moved) == {f"moved by {20 - lead:+d} positions"}, "the better donor is taken"


def test_what_was_read_behind_other_text_than_asked_for_is_read_again(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    shelf = documents(2, seed=13)
    engine.warm_documents(shelf)
    assert planned(engine, shelf, SYSTEM) == [[0, 1]]
    engine.warm_documents(shelf, SYSTEM)
    assert planned(engine, shelf[::-1], SYSTEM) == []
    assert planned(engine, shelf[::-1]) == []


# --- bounds -----------------------------------------------------------------------------------


def test_results_say_what_did_not_fit(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), max_chunks=30)
    shelf = [random_ids(160, seed=number) for number in range(6)]
    results = engine.warm_documents(shelf, SYSTEM)
    assert engine.cache_stats()["chunks"] <= 30
    short = [result for result in results if result.alignment_warning is not None]
    assert short
    assert all("raise max_chunks" in str(result.alignment_warning) for result in short)
    for result, document in zip(results, shelf, strict=True):
        if result.alignment_warning is None:
            assert found_of(engine, document) >= 0.97 * len(document)
        else:
            assert result.chunks_stored < 10
    before = engine.cache_stats()["evicted_chunks"]
    later = engine.warm_documents([random_ids(150, seed=90), random_ids(150, seed=91)])
    gone = engine.cache_stats()["evicted_chunks"] - before
    assert sum(result.evicted_chunks for result in later) == gone > 0
    check_store(engine)


def test_salts_share_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    shelf = documents(2, seed=14)
    engine.warm_documents(shelf, cache_salt="one")
    assert planned(engine, shelf) == [[0, 1]]
    prompt = [*random_ids(20, seed=1), *shelf[1], *random_ids(9, seed=2)]
    assert engine.explain(prompt, cache_salt="one").cached_tokens >= 0.97 * len(shelf[1])
    assert engine.explain(prompt, cache_salt="two").cached_tokens == 0
    assert engine.explain(prompt).cached_tokens == 0


def test_no_documents(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.warm_documents([]) == []
    assert engine.cache_stats()["chunks"] == 0


def test_a_short_document_is_kept_and_says_that_it_is_short(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    result = engine.warm_documents([random_ids(20, seed=1)])[0]
    assert result.chunks_stored > 0
    assert "fewer than 32 tokens" in str(result.alignment_warning)


@pytest.mark.parametrize(
    ("texts", "behind", "message"),
    [
        ("a text", None, "texts must be a list of texts, got str"),
        ([3, 4, 5], None, "this is a single one"),
        (["good", ""], None, "document 1: the document is empty"),
        (["good", []], None, "document 1: the document is empty"),
        (["good", [[1], [2]]], None, "document 1: a document must be a string, or a flat list"),
        (
            ["good", [{"role": "user", "content": "a"}]],
            None,
            "document 1: a document must be a string, or a flat list",
        ),
        (["good", [9_999]], None, "document 1: token id 9999 is outside"),
        (["good", "\ud800"], None, "document 1: the document has half of a surrogate pair"),
        (["good", [7] * 1025], None, "document 1 has 1025 tokens, and at most 1024 fit; split the document"),
        (["good", [7] * 1000], [5] * 30, "document 1 has 1000 tokens and `behind` has 30"),
        (["good"], "", "the prompt is empty"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    make_engine: MakeEngine, texts: Any, behind: Any, message: str
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=message.replace("(", r"\(")):
        engine.warm_documents(texts, behind)
    assert engine.cache_stats()["chunks"] == 0


# --- other engines ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "options", "why"),
    [("llama", {"bit_exact": True}, "bit_exact"), ("longrope", {}, "rope")],
)
def test_engines_that_move_no_text_refuse(
    make_engine: MakeEngine, architecture: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"reuses no moved text .*{why}.*call warm"):
        make_engine(architecture, **options).warm_documents(["a text"])


def test_overlap_and_quantized_engines(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pay_always(monkeypatch)
    for options in ({"overlap_k": 8, "sink_tokens": 4}, {"kv_cache_bits": 8}):
        engine = make_engine(model=long_model(), **options)
        shelf = documents(3, seed=15)
        assert all(result.alignment_warning is None for result in engine.warm_documents(shelf, SYSTEM))
        assert all(found_of(engine, document) >= 0.9 * len(document) for document in shelf)


def test_a_model_whose_state_is_unknown_keeps_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with torch.autocast("cpu"):
        results = engine.warm_documents(["a text", "another"], "behind this")
        warmed = engine.warm("a text")
    assert [result.alignment_warning for result in results] == [warmed.alignment_warning] * 2
    assert "not kept" in str(warmed.alignment_warning)
    assert not any(results)
    assert engine.cache_stats()["chunks"] == 0


def test_a_model_that_is_not_calibrated_may_be_warmed(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), recompute_ratio="auto")
    assert all(engine.warm_documents(documents(2, seed=19)))


def test_threads_warm_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    shelf = documents(8, seed=16)
    with ThreadPoolExecutor(4) as pool:
        parts = [shelf[:4], shelf[4:], shelf[2:6], shelf[::2]]
        for results in pool.map(lambda part: engine.warm_documents(part, SYSTEM), parts):
            assert all(result.alignment_warning is None for result in results)
    check_store(engine)
    check_exact_tree(engine)
    assert planned(engine, shelf, SYSTEM) == []


def test_a_bar_is_shown_where_it_is_asked_for(
    make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(model=long_model())
    engine.warm_documents(documents(2, seed=17))
    assert capsys.readouterr().err == ""
    engine.warm_documents(documents(2, seed=18), progress=True)
    assert "reading" in capsys.readouterr().err


@pytest.mark.real_model
def test_the_built_in_model(real: KVBoost) -> None:
    system = "Answer the question with the help of the documents.\n\n"
    pages = [
        "The ferry. It leaves from the stone pier at eight and at four, in summer also at noon. " * 4,
        "The market. Stalls are given out by lot on the last evening of the month. A bell ends trade. " * 4,
        "The school. Lessons begin after the milk has come. In storms everyone stays until noon. " * 4,
    ]
    assert all(result.alignment_warning is None for result in real.warm_documents(pages, system))
    # As ids: in one text, the line breaks before a page are other tokens than by themselves.
    known = real.tokenize(system) + real.tokenize(pages[0])
    prompt = known + real.tokenize("Question: When does the ferry leave?\nAnswer:")
    exact = real.generate(prompt, max_new_tokens=8, mode="prefix_cache")
    assert exact.cached_tokens >= len(known)
    assert exact.token_ids == real.generate(prompt, max_new_tokens=8, mode="baseline").token_ids
    moved = f"{system}{pages[2]}\n\n{pages[1]}\n\nQuestion: What ends trade?\nAnswer:"
    found = real.explain(moved)
    texts = len(real.tokenize(pages[1])) + len(real.tokenize(pages[2]))
    assert found.cached_tokens >= 0.95 * texts or "would" in found.choice
