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
