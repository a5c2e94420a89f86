"""Facts kept: is an answer that full prefill finds still found over reused documents?

A question asks for a number, a name or a date that one of several documents says. It counts if full prefill
answers it rightly; then the documents are read in some way, found again in another order, and repaired in
several ways. Knows trials and documents, and no benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvboost.proof.documents import TOGETHER, Case
from kvboost.proof.fresh_engine import ReusesText
from kvboost.proof.quality import ReuseTrial, until_end
from kvboost.reuse.repair import RepairStrategy

ANSWER_TOKENS = 32
Report = Callable[[int, int], None]


@dataclass
class FactScores:
    """How many facts were kept, by the way of reading and by strategy, and the error of what was measured."""

    asked: int = 0
    answered: int = 0  # rightly, by full prefill
    kept: dict[str, dict[str, int]] = field(default_factory=dict)
    errors: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # KL

    def share(self, way: str, name: str) -> float | None:
        """The share of the facts that full prefill finds; None where it finds none."""
        return self.kept[way][name] / self.answered if self.answered else None

    def least_share(self, name: str) -> float | None:
        """The share that is kept in the worse way of reading."""
        shares = [share for way in self.kept if (share := self.share(way, name)) is not None]
        return min(shares, default=None)

    def add(self, way: str, name: str, kl: float, *, kept: bool) -> None:
        """Count one answer; one to a question that full prefill cannot answer is not kept."""
        by_name = self.kept.setdefault(way, {})
        by_name[name] = by_name.get(name, 0) + kept
        self.errors.setdefault(way, {}).setdefault(name, []).append(kl)


def read(engine: ReusesText, case: Case) -> None:
    """Fill an empty cache with what was read before a case."""
    engine.clear()
    if case.way == TOGETHER:
        engine.warm_documents(case.read_before, progress=False)
        return
    for token_ids in case.read_before:
        engine.warm(token_ids)


def measure_facts(
    engine: ReusesText,
    strategies: Mapping[str, RepairStrategy],
    cases: Iterable[tuple[Case, ...]],
    *,
    questions: int,
    only_answered: bool = True,
    report: Report = lambda _done, _total: None,
) -> FactScores:
    """Repair documents of `cases` in all ways, until `questions` were measured.

    A case comes once for every way of reading. With `only_answered`, questions that full prefill does not
    answer are asked of nobody else. The engine's cache is empty afterwards.
    """
    scores, measured = FactScores(), 0
    for ways in cases:
        report(measured, questions)
        if measured == questions:
            break
        trial = ReuseTrial(engine, ways[0].prompt.token_ids, ANSWER_TOKENS)
        is_known = _is_answered(engine, ways[0], until_end(trial.answer_ids, trial.end_ids))
        scores.asked += 1
        scores.answered += is_known
        if not is_known and only_answered:
            continue
        measured += 1
        for case in ways:
            read(engine, case)
            for name, strategy in strategies.items():
                found = trial.measure_strategy(strategy, answer_tokens=ANSWER_TOKENS * is_known)
                kept = is_known and _is_answered(engine, case, found.answer_ids)
                scores.add(case.way, name, found.kl, kept=kept)
    engine.clear()
    return scores


def _is_answered(engine: ReusesText, case: Case, token_ids: Sequence[int]) -> bool:
    """Whether an answer holds the fact that was asked for."""
    return case.prompt.asked.is_in(engine.tokenizer.decode(list(token_ids)))
