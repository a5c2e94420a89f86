"""`engine.evaluate`: the same cache for every contestant, and runs that go on where they stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.errors import InvalidRequestError
from kvboost.proof import evaluation
from kvboost.proof.questions import Question, read_questions
from tests.fixture_types import MakeEngine

SAMPLE = Path(__file__).parents[2] / "examples" / "questions.jsonl"
TEXTS = [f"Text {n} is about the number {n * 111}, which nobody else has. " * 2 for n in range(3)]
QUESTIONS: list[dict[str, Any]] = [
    *({"document": text, "id": f"t{n}"} for n, text in enumerate(TEXTS)),
    {"documents": ["t1", "t0", "t2"], "question": "Which?", "regex": "(?s)."},
    {"documents": ["t2", "t1"], "question": "Or?", "choices": ["yes", "no"], "answer": 0},
]


def options(**changes: Any) -> dict[str, Any]:
    return {"ratios": (0.15, 0.5), "max_new_tokens": 2, **changes}


class Spy:
    """Notes what the engines of an evaluation are asked, and what their caches held then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, float | None]] = []
        self.held: list[tuple[int, int]] = []
        self.warmed: list[str] = []
        generate, warm = KVBoost.generate, KVBoost.warm

        def spied(engine: KVBoost, prompt: Any, *args: Any, **given: Any) -> Any:
            self.asked.append((given["mode"], given.get("recompute_ratio")))
            stats = engine.cache_stats()
            self.held.append((stats["chunks"], stats["bytes"]))
            return generate(engine, prompt, *args, **given)

        def spied_warm(engine: KVBoost, text: Any, *args: Any, **given: Any) -> Any:
            self.warmed.append(text)
            return warm(engine, text, *args, **given)

        monkeypatch.setattr(KVBoost, "generate", spied)
        monkeypatch.setattr(KVBoost, "warm", spied_warm)


def test_every_contestant_finds_the_same_cache(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.warm("the user's own text")
    before = engine.cache_stats()
    spy = Spy(monkeypatch)
    report = engine.evaluate(QUESTIONS[:4], **options())
    assert engine.cache_stats() == before, "the user's cache is left alone"
    assert sorted(spy.warmed) == sorted(TEXTS), "each was read once, alone"
    assert len(set(spy.held)) == 1
    assert spy.held[0][0] > 0
    contestants = [
        ("baseline", None),
        ("prefix_cache", None),
        ("chunk_kv_reuse", 0.15),
        ("chunk_kv_reuse", 0.5),
    ]
    assert spy.asked[-4:] == contestants
    assert [(row.mode, row.ratio) for row in report.rows] == contestants
    plain, exact, loose, looser = report.rows
    assert (plain.reused_share, plain.speedup, plain.right) == (0.0, 1.0, 1)
    assert exact.lost == ()
    assert loose.reused_share > 0.8
    assert 0 < loose.recomputed_share < looser.recomputed_share


def test_contestants_take_turns_in_beginning(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    asked = [{**QUESTIONS[3], "question": f"Which {n}?"} for n in range(3)]
    make_engine().evaluate([*QUESTIONS[:3], *asked], **options(modes=["chunk_kv_reuse"], ratios=[0.2]))
    modes = [mode for mode, _ in spy.asked]
    assert modes[-6:] == [
        "baseline",
        "chunk_kv_reuse",
        "chunk_kv_reuse",
        "baseline",
        "baseline",
        "chunk_kv_reuse",
    ]
    assert len(spy.warmed) == 3, "questions over the same documents share their reading"


def test_choices_are_taken_by_likelihood_at_the_ratio(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    score = KVBoost.score

    def spied(engine: KVBoost, prompts: Any, continuations: Any, **given: Any) -> Any:
        seen.append({**given, "continuations": continuations})
        return score(engine, prompts, continuations, **given)

    monkeypatch.setattr(KVBoost, "score", spied)
    report = make_engine().evaluate([*QUESTIONS[:3], QUESTIONS[4]], **options())
    assert [each.get("recompute_ratio") for each in seen] == [None, None, 0.15, 0.5]
    assert len(seen[0]["continuations"]) == 2
    assert {each.answer for each in report.answers} <= {"yes", "no"}
    assert [each.right for each in report.answers] == [each.answer == "yes" for each in report.answers]


def test_a_run_goes_on_where_it_stopped(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, results = make_engine(), tmp_path / "answers.jsonl"
    answered = evaluation._Asker._answered
    left = [3]

    def stopping(asker: Any, question: Any, contestant: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return answered(asker, question, contestant)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation._Asker, "_answered", stopping)
        with pytest.raises(KeyboardInterrupt):
            engine.evaluate(QUESTIONS, **options(), results=results)
    assert len(results.read_text().splitlines()) == 4
    results.write_text(results.read_text()[:-9])  # killed while it wrote
    first = engine.evaluate(QUESTIONS, **options(), results=results)
    assert len(first.answers) == 8
    spy = Spy(monkeypatch)
    again = engine.evaluate(QUESTIONS, **options(), results=results)
    assert spy.asked == spy.warmed == [], "nothing was left to ask"
    assert (again.rows, again.answers) == (first.rows, first.answers)
    other_expected = [*QUESTIONS[:3], {**QUESTIONS[3], "regex": "no such text"}, QUESTIONS[4]]
    assert (
        engine.evaluate(other_expected, **options(), results=results).rows[0].right == first.rows[0].right - 1
    )
    assert spy.asked == [], "answers are judged anew, and not asked for again"
    engine.evaluate([*QUESTIONS[:4], {**QUESTIONS[4], "question": "And?"}], **options(), results=results)
    assert len(spy.asked) == 4 + 2, "a question that has changed is asked again, behind the warm-up"


def test_other_weights_and_settings_are_asked_again(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, few = tmp_path / "answers.jsonl", options(modes=[], ratios=[])
    first = make_engine()
    first.evaluate(QUESTIONS[:4], **few, results=results)
    spy = Spy(monkeypatch)
    first.evaluate(QUESTIONS[:4], **{**few, "max_new_tokens": 3}, results=results)
    assert len(spy.asked) == 1 + 2
    first.model.lm_head.weight.data.mul_(1.5)
    first.weights_changed()
    first.evaluate(QUESTIONS[:4], **few, results=results)
    assert len(spy.asked) == 2 * 3


def test_documents_are_never_read_in_the_order_of_the_prompt() -> None:
    texts = tuple(TEXTS)
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        asked = Question("1", tuple(texts[n] for n in order), "q?")
        assert evaluation.reading_order(asked) != asked.documents
        assert sorted(evaluation.reading_order(asked)) == sorted(texts)
    assert evaluation.reading_order(Question("1", (TEXTS[0],), "q?")) == (TEXTS[0],)


def test_reading_together_is_the_engines(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []

    def warm_documents(engine: KVBoost, texts: list[str], **_options: Any) -> None:
        read.append(texts)
        engine.warm(" ".join(texts))

    monkeypatch.setattr(KVBoost, "warm_documents", warm_documents, raising=False)
    report = make_engine().evaluate(QUESTIONS[:4], **options(read="together"))
    assert [sorted(texts) for texts in read] == [sorted(TEXTS)]
    assert report.row("chunk_kv_reuse", 0.15).reused_share > 0.5
    monkeypatch.setattr(KVBoost, "warm_documents", None, raising=False)
    with pytest.raises(InvalidRequestError, match='use read="alone"'):
        make_engine().evaluate(QUESTIONS[:4], **options(read="together"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modes": ["fast"]}, "modes"),
        ({"ratios": [1.5]}, "ratios must be numbers from 0 to 1, got 1.5"),
        ({"ratios": []}, "ratios must not be empty"),
        ({"read": "backwards"}, 'read must be "alone" or "together"'),
        ({"max_new_tokens": 100_000}, "question 4: .* positions, the model has"),
    ],
)
def test_bad_settings(make_engine: MakeEngine, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        make_engine().evaluate(QUESTIONS, **options(**changes))


def test_what_the_engine_does_not_allow_is_left_out_and_said(make_engine: MakeEngine) -> None:
    report = make_engine(bit_exact=True).evaluate(QUESTIONS[:4], **options())
    assert [row.mode for row in report.rows] == ["baseline", "prefix_cache"]
    assert report.notes == ("chunk_kv_reuse was left out: exact reuse only: bit_exact",)


def test_the_sample_set_is_sound() -> None:
    questions = read_questions(SAMPLE)
    assert len(questions) >= 12
    texts = {text for question in questions for text in question.documents}
    assert 6 <= len(texts) <= 8
    assert all(80 <= len(text.split()) <= 150 for text in texts)
    assert {bool(question.choices) for question in questions} == {True, False}
    for question in questions:  # what is expected stands in the documents
        right = question.choices[question.answer] if question.choices else ""
        assert question.is_right(" ".join(question.documents), question.answer)
        assert right in " ".join(question.documents)


@pytest.mark.real_model
def test_a_part_of_the_sample_set_on_the_real_model(real_engine: KVBoost) -> None:
    questions = [question for question in read_questions(SAMPLE) if question.id in ("ferry-1", "telescope-2")]
    report = real_engine.evaluate(questions, ratios=[0.15], max_new_tokens=16)
    assert report.row("prefix_cache").lost == ()
    loose = report.row("chunk_kv_reuse", 0.15)
    assert loose.reused_share > 0.8
    assert 0.05 < loose.recomputed_share < 0.25
    assert report.row("baseline").right > 0
    assert report.recommendation.startswith("Too few questions to tell")
