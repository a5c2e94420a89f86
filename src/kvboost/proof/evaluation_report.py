"""What the answers to a user's own questions amount to: a row per mode and ratio, and what to use.

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
from kvboost.proof.questions import Question, all_documents

MIN_KEPT = 0.95  # of BASELINE's right answers, for approximate reuse to be recommended
MIN_GAIN = 1.1  # over exact reuse: below it, there is nothing to win
MIN_RIGHT = 20  # right answers of BASELINE, below which one lost answer weighs too much
HEADINGS = ("", "right", "kept", "first token, ms", "speed-up", "reused", "recomputed")


@dataclass(frozen=True)
class Contestant:
    """One way to answer: a mode, and in the approximate one a ratio."""

    mode: str
    ratio: float | None = None

    @property
    def name(self) -> str:
        return self.mode if self.ratio is None else f"{self.mode} {self.ratio:.0%}"

    @property
    def options(self) -> dict[str, Any]:
        """As a call of `generate` takes them."""
        return {"mode": self.mode} | ({} if self.ratio is None else {"recompute_ratio": self.ratio})


@dataclass(frozen=True)
class EvaluationRow:
    """One contestant. `kept` are the questions that BASELINE and this one answer rightly, `lost` the ids of
    those that only BASELINE does. `ttft_ms` is the median, `speedup` the median over the questions of
    BASELINE's time by this one's; the shares are of all prompt tokens.
    """

    mode: str
    ratio: float | None
    questions: int
    right: int
    baseline_right: int
    kept: int
    lost: tuple[str, ...]
    ttft_ms: float
    speedup: float
    reused_share: float
    recomputed_share: float

    @property
    def name(self) -> str:
        return Contestant(self.mode, self.ratio).name

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.right / self.questions

    @property
    def kept_share(self) -> float | None:
        """The share of BASELINE's right answers that are right here too; None where it has none."""
        return self.kept / self.baseline_right if self.baseline_right else None

    def cells(self) -> tuple[str, ...]:
        """As text, for tables with `HEADINGS`."""
        kept = "" if self.kept_share is None else f"{self.kept}/{self.baseline_right} ({self.kept_share:.0%})"
        return (
            self.name,
            f"{self.right}/{self.questions} ({self.accuracy:.0%})",
            kept,
            f"{self.ttft_ms:,.0f}",
            f"{self.speedup:.2f} x",
            f"{self.reused_share:.0%}",
            f"{self.recomputed_share:.0%}",
        )


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


# --- what to use ---------------------------------------------------------------------------------


def recommendation(rows: Sequence[EvaluationRow]) -> str:
    """What to use, in one sentence, with the numbers that speak for it."""
    baseline = next(row for row in rows if row.mode == GenerationMode.BASELINE.value)
    if baseline.right == 0:
        return (
            f"None of the {baseline.questions} questions was answered rightly without reuse, so nothing can "
            "be said about reuse: look at the answers, the expected ones and max_new_tokens."
        )
    advice = _advice(rows)
    if baseline.right < MIN_RIGHT:
        return (
            f"Too few questions to tell: BASELINE answers {baseline.right} rightly, and it takes at least "
            f"{MIN_RIGHT}; these few say: {advice[0].lower()}{advice[1:]}"
        )
    return advice


def _advice(rows: Sequence[EvaluationRow]) -> str:
    exact = next((row for row in rows if row.mode == GenerationMode.PREFIX_CACHE.value), None)
    approximate = [row for row in rows if row.mode == GenerationMode.CHUNK_KV_REUSE.value]
    exact_speedup = exact.speedup if exact is not None else 1.0
    faster = [row for row in approximate if row.speedup >= MIN_GAIN * exact_speedup]
    good = [row for row in faster if (row.kept_share or 0.0) >= MIN_KEPT]
    if good:
        best = max(good, key=lambda row: row.speedup)
        return (
            f'Use mode="{best.mode}" with recompute_ratio={best.ratio:g}: {best.kept_share:.0%} of '
            f"BASELINE's right answers ({best.kept} of {best.baseline_right}) at {best.speedup:.1f} x "
            "sooner first tokens."
        )
    use = f'Use mode="{GenerationMode.PREFIX_CACHE.value}"'
    if faster:
        most = max(faster, key=lambda row: (row.kept, row.speedup))
        return (
            f"{use}: approximate reuse loses {1 - (most.kept_share or 0.0):.0%} of BASELINE's right answers "
            f"here even at recompute_ratio={most.ratio:g} ({most.kept} of {most.baseline_right} kept, at "
            f"{most.speedup:.1f} x sooner first tokens)."
        )
    if approximate:
        most = max(approximate, key=lambda row: row.speedup)
        return f"{use}: approximate reuse gains nothing here ({most.speedup:.1f} x at best)."
    return f"{use}: it changes no answer, and approximate reuse was not measured."
