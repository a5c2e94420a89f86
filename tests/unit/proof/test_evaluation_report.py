"""What answers amount to: rows, and a recommendation that the numbers carry."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvboost.proof.answer_log import LoggedAnswer
from kvboost.proof.evaluation_report import report_of
from kvboost.proof.evaluation_rows import Contestant, EvaluationRow
from kvboost.proof.questions import Question
from kvboost.proof.recommendation import recommendation

BASELINE, EXACT, LOOSE = (
    Contestant("baseline"),
    Contestant("prefix_cache"),
    Contestant("chunk_kv_reuse", 0.15),
)


def row(mode: str, ratio: float | None, kept: int, speedup: float, **changes: Any) -> EvaluationRow:
    plain = EvaluationRow(mode, ratio, 50, kept, 40, kept, (), 100.0, speedup, 0.9, 0.1)
    return replace(plain, **changes)


PLAIN = row("baseline", None, 40, 1.0)
PREFIX = row("prefix_cache", None, 40, 1.0)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [PLAIN, PREFIX, row("chunk_kv_reuse", 0.1, 30, 6.0), row("chunk_kv_reuse", 0.15, 39, 4.14)],
            'Use mode="chunk_kv_reuse" with recompute_ratio=0.15: 98% of BASELINE\'s right answers '
            "(39 of 40) at 4.1 x sooner first tokens.",
        ),
        (  # of two that are good enough, the faster one
            [PLAIN, PREFIX, row("chunk_kv_reuse", 0.1, 38, 6.0), row("chunk_kv_reuse", 0.15, 40, 4.0)],
            'Use mode="chunk_kv_reuse" with recompute_ratio=0.1: 95% of BASELINE\'s right answers '
            "(38 of 40) at 6.0 x sooner first tokens.",
        ),
        (
            [PLAIN, PREFIX, row("chunk_kv_reuse", 0.1, 20, 6.0), row("chunk_kv_reuse", 0.3, 32, 2.5)],
            'Use mode="prefix_cache": 100% of BASELINE\'s right answers (40 of 40) at 1.0 x sooner first '
            "tokens; approximate reuse keeps 80% of BASELINE's right answers (32 of 40) at "
            "recompute_ratio=0.3.",
        ),
        (  # nothing to win over exact reuse
            [PLAIN, replace(PREFIX, speedup=5.0), row("chunk_kv_reuse", 0.1, 40, 5.2)],
            'Use mode="prefix_cache": 100% of BASELINE\'s right answers (40 of 40) at 5.0 x sooner first '
            "tokens; approximate reuse gains nothing here (5.2 x at best).",
        ),
        (
            [PLAIN, PREFIX],
            'Use mode="prefix_cache": 100% of BASELINE\'s right answers (40 of 40) at 1.0 x sooner first '
            "tokens; approximate reuse was not measured.",
        ),
        (  # fewer bits, say: exact reuse is not exact then
            [PLAIN, row("prefix_cache", None, 20, 1.3), row("chunk_kv_reuse", 0.1, 30, 3.0)],
            'Use mode="baseline": approximate reuse keeps 75% of BASELINE\'s right answers (30 of 40) at '
            'recompute_ratio=0.1, and mode="prefix_cache" 50% of BASELINE\'s right answers (20 of 40).',
        ),
        (  # slower than no reuse is no gain, whatever exact reuse takes
            [PLAIN, replace(PREFIX, speedup=0.6), row("chunk_kv_reuse", 0.1, 40, 0.7)],
            'Use mode="prefix_cache": 100% of BASELINE\'s right answers (40 of 40) at 0.6 x sooner first '
            "tokens; approximate reuse gains nothing here (0.7 x at best).",
        ),
        (
            [PLAIN, row("chunk_kv_reuse", 0.1, 30, 3.0)],
            'Use mode="baseline": approximate reuse keeps 75% of BASELINE\'s right answers (30 of 40) at '
            'recompute_ratio=0.1, and exact reuse (mode="prefix_cache") was not measured.',
        ),
    ],
)
def test_recommendation(rows: list[EvaluationRow], sentence: str) -> None:
    assert recommendation(rows) == sentence


def test_too_few_questions_are_called_so() -> None:
    few = {"right": 12, "baseline_right": 12, "questions": 15}
    found = recommendation(
        [replace(PLAIN, **few), row("chunk_kv_reuse", 0.1, 12, 6.0, baseline_right=12, questions=15)]
    )
    assert found.startswith(
        "Too few questions to tell: BASELINE answers 12 rightly, and it takes at least 20;"
    )
    assert 'these few say: use mode="chunk_kv_reuse" with recompute_ratio=0.1' in found


def test_nothing_is_recommended_where_no_answer_is_right() -> None:
    rows = [replace(each, right=0, kept=0, baseline_right=0) for each in (PLAIN, PREFIX)]
    assert recommendation(rows).startswith("None of the 50 questions was answered rightly without reuse")


def answer(name: str, by: Contestant, said: str, ttft_ms: float, cached: int = 0) -> LoggedAnswer:
    return LoggedAnswer("key", name, by.mode, by.ratio, said, None, ttft_ms, 100, cached, cached // 10)


def test_a_report_counts_what_was_kept_and_lost() -> None:
    questions = [Question(name, ("text",), "q?", contains=("yes",)) for name in ("a", "b", "c")]
    said = {
        BASELINE: [("yes", 100.0), ("Yes!", 200.0), ("no", 400.0)],
        EXACT: [("yes", 100.0), ("Yes!", 100.0), ("no", 100.0)],
        LOOSE: [("yes", 10.0), ("no", 50.0), ("yes", 400.0)],
    }
    answers = {
        (question.id, by): answer(question.id, by, *each, 80 if by is LOOSE else 0)
        for by, all_of_it in said.items()
        for question, each in zip(questions, all_of_it, strict=True)
    }
    about = {"model": "m", "dtype": "float32", "read": "alone", "max_new_tokens": 8}
    report = report_of(questions, [*said], answers, **about, notes=("left out",), seconds=1.0)
    loose = report.row("chunk_kv_reuse", 0.15)
    assert (loose.right, loose.kept, loose.baseline_right, loose.lost) == (2, 1, 2, ("b",))
    assert (loose.accuracy, loose.kept_share) == (2 / 3, 0.5)
    assert (loose.ttft_ms, loose.speedup) == (50.0, 4.0), "the median of the questions' own ratios"
    assert (loose.reused_share, loose.recomputed_share) == (0.8, 0.08)
    assert (report.row("prefix_cache").lost, report.documents) == ((), 1)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["rows"][2]["kept_share"] == 0.5
    assert [each["right"] for each in plain["answers"]] == [
        True,
        True,
        True,
        True,
        True,
        False,
        False,
        False,
        True,
    ]
    for shown in (str(report), report._repr_html_()):
        for part in (
            "3 questions over 1 document,",
            "chunk_kv_reuse 15%",
            "1/2 (50%)",
            "left out",
            "Too few",
        ):
            assert part in shown
