"""What the answers to a user's own questions amount to: judged, counted, shown.

Knows questions and answers, not how they were asked.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost import html_view
from kvboost.choices import GenerationMode
from kvboost.proof.answer_log import LoggedAnswer
from kvboost.proof.evaluation_rows import HEADINGS, Contestant, EvaluationRow
from kvboost.proof.questions import Question, all_documents
from kvboost.proof.recommendation import recommendation


@dataclass(frozen=True)
class JudgedAnswer:
    """One answer, and whether it is right."""

    id: str
    mode: str
    ratio: float | None
    answer: str
    right: bool
    ttft_ms: float


@dataclass(frozen=True)
class EvaluationReport:
    """A row per mode and ratio, a recommendation in a sentence, and all answers."""

    model: str
    dtype: str
    questions: int
    documents: int
    read: str
    max_new_tokens: int
    rows: tuple[EvaluationRow, ...]
    recommendation: str
    notes: tuple[str, ...]
    answers: tuple[JudgedAnswer, ...]
    seconds: float

    def row(self, mode: str, ratio: float | None = None) -> EvaluationRow:
        """The row of one mode, and of one ratio where the mode has several."""
        return next(row for row in self.rows if (row.mode, row.ratio) == (mode, ratio))

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        shares = [{"accuracy": row.accuracy, "kept_share": row.kept_share} for row in self.rows]
        plain = dataclasses.asdict(self)
        rows = [{**row, **more} for row, more in zip(plain["rows"], shares, strict=True)]
        return {**plain, "rows": rows}

    @property
    def title(self) -> str:
        """What was asked of which model."""
        return (
            f"{_counted(self.questions, 'question')} over {_counted(self.documents, 'document')}, "
            f"read {self.read}; "
            f"{self.model}, {self.dtype}"
        )

    def __str__(self) -> str:
        table = [HEADINGS, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) if not n else cell.rjust(w) for n, (cell, w) in enumerate(pairs)).rstrip()
            for pairs in (list(zip(cells, widths, strict=True)) for cells in table)
        ]
        return "\n".join([self.title, *lines, *self.notes, self.recommendation])

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        rows = html_view.table(HEADINGS, (row.cells() for row in self.rows))
        below = "".join(html_view.paragraph(text) for text in (*self.notes, self.recommendation))
        return html_view.paragraph(self.title) + rows + below


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def report_of(
    questions: Sequence[Question],
    contestants: Sequence[Contestant],
    answers: Mapping[tuple[str, Contestant], LoggedAnswer],
    **about: Any,
) -> EvaluationReport:
    """Judge all answers; BASELINE's are there whoever else was asked."""
    rows = tuple(_row(questions, contestant, answers) for contestant in contestants)
    judged = tuple(
        JudgedAnswer(question.id, by.mode, by.ratio, found.answer, _is_right(question, found), found.ttft_ms)
        for question in questions
        for by in contestants
        for found in [answers[question.id, by]]
    )
    return EvaluationReport(
        questions=len(questions),
        documents=all_documents(questions),
        rows=rows,
        recommendation=recommendation(rows),
        answers=judged,
        **about,
    )


def _row(
    questions: Sequence[Question],
    contestant: Contestant,
    answers: Mapping[tuple[str, Contestant], LoggedAnswer],
) -> EvaluationRow:
    baseline = Contestant(GenerationMode.BASELINE.value)
    own = [answers[question.id, contestant] for question in questions]
    theirs = [answers[question.id, baseline] for question in questions]
    known = [q for q, found in zip(questions, theirs, strict=True) if _is_right(q, found)]
    lost = tuple(q.id for q in known if not _is_right(q, answers[q.id, contestant]))
    tokens = sum(found.prompt_tokens for found in own)
    return EvaluationRow(
        mode=contestant.mode,
        ratio=contestant.ratio,
        questions=len(questions),
        right=sum(_is_right(q, found) for q, found in zip(questions, own, strict=True)),
        baseline_right=len(known),
        kept=len(known) - len(lost),
        lost=lost,
        ttft_ms=round(statistics.median(found.ttft_ms for found in own), 2),
        speedup=round(
            statistics.median(b.ttft_ms / max(a.ttft_ms, 1e-3) for a, b in zip(own, theirs, strict=True)), 3
        ),
        reused_share=round(sum(found.cached_tokens for found in own) / tokens, 4),
        recomputed_share=round(sum(found.recomputed_tokens for found in own) / tokens, 4),
    )


def _is_right(question: Question, found: LoggedAnswer) -> bool:
    return question.is_right(found.answer, found.chosen)
