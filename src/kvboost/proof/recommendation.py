"""Which mode and ratio to use, in one sentence that the rows of a report carry. Knows nothing but them."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost.choices import GenerationMode
from kvboost.proof.evaluation_rows import EvaluationRow

MIN_KEPT = 0.95  # of BASELINE's right answers, for approximate reuse to be recommended
MIN_GAIN = 1.1  # over exact reuse: below it, there is nothing to win
MIN_RIGHT = 20  # right answers of BASELINE, below which one lost answer weighs too much


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
    floor = MIN_GAIN * max(1.0, exact.speedup if exact is not None else 1.0)
    faster = [row for row in approximate if row.speedup >= floor]
    good = [row for row in faster if (row.kept_share or 0.0) >= MIN_KEPT]
    if good:
        return f"Use {_numbers(max(good, key=lambda row: row.speedup))}."
    if faster:
        most = max(faster, key=lambda row: (row.kept, row.speedup))
        why = f"approximate reuse keeps {_share(most)} at recompute_ratio={most.ratio:g}"
    elif approximate:
        why = (
            f"approximate reuse gains nothing here ({max(row.speedup for row in approximate):.1f} x at best)"
        )
    else:
        why = "approximate reuse was not measured"
    if exact is None:
        return f'Use mode="baseline": {why}, and exact reuse (mode="prefix_cache") was not measured.'
    if (exact.kept_share or 0.0) >= MIN_KEPT:
        return f"Use {_numbers(exact)}; {why}."
    return f'Use mode="baseline": {why}, and mode="prefix_cache" {_share(exact)}.'


def _numbers(row: EvaluationRow) -> str:
    """A row's options, and what speaks for them."""
    ratio = "" if row.ratio is None else f" with recompute_ratio={row.ratio:g}"
    return f'mode="{row.mode}"{ratio}: {_share(row)} at {row.speedup:.1f} x sooner first tokens'


def _share(row: EvaluationRow) -> str:
    return f"{row.kept_share or 0.0:.0%} of BASELINE's right answers ({row.kept} of {row.baseline_right})"
