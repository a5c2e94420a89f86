"""`bench quality`: how far an answer over reused documents is from one over documents read anew.

Documents are read once, alone, behind other text or together, and come back in another order behind a
question. Error = KL divergence of the next tokens from those after full prefill, for every method
of repair and every share of recomputed tokens. Facts = questions for a number, a name or a date that full
prefill answers: how many of them are still answered. Knows no terminal.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kvboost.bench.record import at_least, at_most, machine_record
from kvboost.choices import BITS, KVBits
from kvboost.errors import InvalidRequestError
from kvboost.proof.calibration import Calibration
from kvboost.proof.documents import ALONE, BEHIND, TOGETHER, Case, groups_of, make_cases, needle_cases
from kvboost.proof.needles import FactScores, measure_facts, read
from kvboost.proof.quality import METHODS, Measured, ReuseTrial, strategy_of, takes_ratio

Report = Callable[[int, int, str], None]  # steps done, steps in all, what is being done
OpenEngine = Callable[..., Any]  # an engine with these options on the model that is measured
WITH_RATIO = tuple(filter(takes_ratio, METHODS))
FACT_DOCUMENTS = (4, 6, 8)
FACT_RATIO = 0.15  # the default one
MIN_FACTS = {TOGETHER: 0.84, ALONE: 0.75}  # kept by guided at that ratio
ENOUGH_FACTS = 100  # questions, before a share is judged
MAX_TOGETHER_OVER_ALONE = 0.75
_MOST_ASKED = 4  # questions, for each that full prefill has to answer
_FACT_SEED = 7_919  # added to the run's: other documents than those of the error
OVERALL = "overall"
TARGET_RATIO = 0.10
MAX_GUIDED_OVER_DEVIATION = 0.6
MAX_OVER_BUDGET = 1.5
_RESAMPLES = 2_000


@dataclass(frozen=True)
class Variant:
    """A method of repair, with the share of tokens that it may recompute where it takes one.

    `bits` are those of the cached KV.
    """

    method: str
    ratio: float | None = None
    bits: KVBits = 16

    @property
    def name(self) -> str:
        name = self.method if self.ratio is None else f"{self.method} {self.ratio:.0%}"
        return name if self.bits == 16 else f"{name}, {self.bits} bits"


@dataclass(frozen=True)
class QualitySettings:
    """What is measured. `documents` are numbers of documents per prompt; each is one group cached
    alone, one cached behind other text and one read together. `facts` are questions that full prefill
    answers. `budgets` are errors to be held on prompts not calibrated with."""

    prompts: int = 64
    documents: tuple[int, ...] = (4, 8)
    prompt_tokens: int = 1_500
    ratios: tuple[float, ...] = (0.05, 0.10, 0.15, 0.20, 0.30)
    methods: tuple[str, ...] = METHODS
    continuation_tokens: int = 32
    facts: int = 24
    fact_methods: tuple[str, ...] = ("nothing", "deviation", "guided")
    fact_ratios: tuple[float, ...] = (0.10, 0.15, 0.30)
    budgets: tuple[float, ...] = (0.02, 0.03, 0.05)
    seed: int = 0
    bits: tuple[KVBits, ...] = (8, "k8v4", 4)  # guided at the target ratio, over KV quantized so
    extra_guided: tuple[float, ...] = ()  # ratios of guided that only the budgets need

    @property
    def variants(self) -> list[Variant]:
        return (
            [Variant("guided", ratio) for ratio in self.extra_guided]
            + [
                variant
                for method in self.methods
                for variant in (
                    [Variant(method, ratio) for ratio in sorted(self.ratios)]
                    if method in WITH_RATIO
                    else [Variant(method)]
                )
            ]
            + [Variant("guided", TARGET_RATIO, bits) for bits in self.bits]
        )

    @property
    def fact_variants(self) -> list[Variant]:
        """What facts are asked over: guided at all ratios, others that take one at the default."""
        found = []
        for method in self.fact_methods:
            ratios = sorted(self.fact_ratios) if method == "guided" else [FACT_RATIO]
            found += [Variant(method, ratio if method in WITH_RATIO else None) for ratio in ratios]
        return found

    def check(self) -> None:
        """Raise where nothing sensible could be measured."""
        if unknown := {*self.methods, *self.fact_methods} - set(METHODS):
            raise InvalidRequestError(f"methods must be of {', '.join(METHODS)}; got {min(unknown)}")
        if not all(0 < ratio <= 1 for ratio in (*self.ratios, *self.fact_ratios)):
            raise InvalidRequestError(f"ratios must be above 0 and at most 1, got {min(self.ratios):g}")


@dataclass
class Outcome:
    """Everything measured on one prompt."""

    group: str
    prompt_tokens: int
    baseline_seconds: float
    found: dict[Variant, Measured] = field(default_factory=dict)


def run(
    engine: Any,
    model: str,
    settings: QualitySettings,
    open_engine: OpenEngine,
    report: Report = lambda _done, _total, _text: None,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """Measure all prompts and return the record; `report` hears what is being done.

    With `calibration`, the model's own, the ratios that it gives for the budgets are measured too.
    `open_engine` opens engines of other widths. The caches need room for everything: open them with
    `max_chunks=None`.
    """
    settings.check()
    if calibration is not None:
        chosen = [calibration.ratio_for(limit) for limit in settings.budgets]
        extra = {ratio for ratio in chosen if ratio is not None} - set(settings.ratios)
        settings = dataclasses.replace(settings, extra_guided=tuple(sorted(extra)))
    groups = groups_of(settings.documents, settings.prompt_tokens, (ALONE, BEHIND, TOGETHER))
    total = settings.prompts + settings.facts
    machine = machine_record(engine.model.get_input_embeddings().weight.device)
    engines: dict[KVBits, Any] = {16: engine}
    engines |= {bits: open_engine(kv_cache_bits=bits) for bits in settings.bits}
    outcomes = []
    for number, case in enumerate(make_cases(engine.tokenizer, groups, settings.prompts, settings.seed)):
        report(number, total, f"{case.group}, {len(case.prompt.token_ids)} tokens")
        outcomes.append(_measure(engines, case, settings, Random(settings.seed + number)))
    for bits in settings.bits:
        engines[bits].close()
    facts = _facts(engine, settings, lambda done, _: report(settings.prompts + done, total, "facts"))
    report(total, total, "done")
    results = summaries(outcomes, settings.variants)
    return {
        "benchmark": "quality",
        "model": model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "groups": {name: _describe(of_group) for name, of_group in _by_group(outcomes).items()},
        "results": results,
        "facts": facts,
        "budgets": budgets(outcomes, settings, calibration),
        "targets": [*targets(results, settings), *fact_targets(facts)],
        "prompts": [_row(outcome) for outcome in outcomes],
    }


# --- one prompt ----------------------------------------------------------------------------------


def _measure(
    engines: dict[KVBits, Any],
    case: Case,
    settings: QualitySettings,
    random: Random,
) -> Outcome:
    """All variants in random order on the same caches, which are empty again afterwards."""
    engine = engines[16]
    for of_width in engines.values():
        read(of_width, case)
    trial = ReuseTrial(engine, case.prompt.token_ids, settings.continuation_tokens)
    outcome = Outcome(case.group, len(case.prompt.token_ids), trial.baseline_seconds)
    for variant in random.sample(settings.variants, len(settings.variants)):
        outcome.found[variant] = trial.measure(variant.method, variant.ratio or 0.0, engines[variant.bits])
    for of_width in engines.values():
        of_width.clear()
    return outcome


# --- facts ---------------------------------------------------------------------------------------


def _facts(
    engine: Any, settings: QualitySettings, report: Callable[[int, int], None]
) -> dict[str, Any] | None:
    """What is kept of the facts that full prefill finds; None where none are asked for."""
    if not settings.facts:
        return None
    seed = settings.seed + _FACT_SEED
    cases = needle_cases(engine.tokenizer, FACT_DOCUMENTS, settings.prompt_tokens, seed)
    scores = measure_facts(
        engine,
        {
            variant.name: strategy_of(variant.method, variant.ratio or 0.0)
            for variant in settings.fact_variants
        },
        itertools.islice(cases, _MOST_ASKED * settings.facts),
        questions=settings.facts,
        report=report,
    )
    return {
        "documents": list(FACT_DOCUMENTS),
        "asked": scores.asked,
        "answered": scores.answered,
        "results": [
            {
                "method": variant.method,
                "ratio": variant.ratio,
                "kept": {way: scores.kept[way][variant.name] for way in scores.kept},
                "kept_share": {way: _share(scores, way, variant.name) for way in scores.kept},
                "kl_mean": {
                    way: _rounded(statistics.fmean(errors[variant.name]))
                    for way, errors in scores.errors.items()
                },
            }
            for variant in settings.fact_variants
        ],
    }


def _share(scores: FactScores, way: str, name: str) -> float | None:
    share = scores.share(way, name)
    return None if share is None else round(share, 4)


def fact_targets(facts: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What guided was to keep at the default ratio, and its error by the way of reading the same documents.

    Only where enough was asked.
    """
    if facts is None or facts["answered"] < ENOUGH_FACTS:
        return []
    guided = [row for row in facts["results"] if (row["method"], row["ratio"]) == ("guided", FACT_RATIO)]
    found = [
        at_least(f"facts kept, guided {FACT_RATIO:.0%}, read {way}", row["kept_share"][way], limit)
        for row in guided
        for way, limit in MIN_FACTS.items()
    ]
    for row in guided:
        ratio = _rounded(_ratio(row["kl_mean"][TOGETHER], row["kl_mean"][ALONE]))
        found.append(
            at_most(
                f"KL, guided {FACT_RATIO:.0%}, the same prompts read together / alone",
                ratio,
                MAX_TOGETHER_OVER_ALONE,
            )
        )
    return found


# --- what it comes to ----------------------------------------------------------------------------


def summaries(outcomes: Sequence[Outcome], variants: Iterable[Variant]) -> list[dict[str, Any]]:
    """A record per variant: its figures over all prompts and in every group."""
    by_group = {OVERALL: list(outcomes), **_by_group(outcomes)}
    return [
        {
            "method": variant.method,
            "ratio": variant.ratio,
            "bits": variant.bits,
            "groups": {name: _summary(of_group, variant) for name, of_group in by_group.items()},
        }
        for variant in variants
    ]


def _by_group(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    names = dict.fromkeys(outcome.group for outcome in outcomes)
    return {name: [outcome for outcome in outcomes if outcome.group == name] for name in names}


def _summary(outcomes: Sequence[Outcome], variant: Variant) -> dict[str, Any]:
    """Mean KL with a 95% interval (bootstrap over prompts) and quartiles, and the rest."""
    found = [outcome.found[variant] for outcome in outcomes]
    errors = np.asarray([measured.kl for measured in found])
    low, high = _mean_interval(errors)
    quartiles = np.quantile(errors, [0.25, 0.5, 0.75])
    seconds = statistics.median(measured.seconds for measured in found)
    reused = sum(measured.reused_tokens for measured in found)
    recomputed = sum(measured.recomputed_tokens for measured in found)
    return {
        "kl_mean": _rounded(errors.mean()),
        "kl_mean_low": _rounded(low),
        "kl_mean_high": _rounded(high),
        "kl_quartiles": [_rounded(value) for value in quartiles],
        "top1": round(statistics.fmean(measured.top1 for measured in found), 4),
        "recomputed_share": round(recomputed / reused, 4) if reused else None,
        "seconds": round(seconds, 4),
        "speedup": round(statistics.median(o.baseline_seconds for o in outcomes) / seconds, 2),
    }


def _mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Where the mean lies in 95% of resamples of `values` `[prompts]`."""
    chosen = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.quantile(values[chosen].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def _rounded(value: float) -> float:
    """To four digits, however small."""
    return float(f"{value:.4g}")


def _describe(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    tokens = [outcome.prompt_tokens for outcome in outcomes]
    reused = [max((m.reused_tokens for m in outcome.found.values()), default=0) for outcome in outcomes]
    return {
        "prompts": len(outcomes),
        "prompt_tokens": [min(tokens), round(statistics.fmean(tokens)), max(tokens)],
        "reused_share": round(sum(reused) / sum(tokens), 4),
        "baseline_seconds": round(statistics.median(o.baseline_seconds for o in outcomes), 3),
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        "group": outcome.group,
        "prompt_tokens": outcome.prompt_tokens,
        "baseline_seconds": round(outcome.baseline_seconds, 3),
        "kl": {variant.name: _rounded(outcome.found[variant].kl) for variant in sorted_variants(outcome)},
    }


def sorted_variants(outcome: Outcome) -> list[Variant]:
    """The variants of an outcome in the order of the methods, then by ratio."""
    return sorted(
        outcome.found,
        key=lambda variant: (BITS.index(variant.bits), METHODS.index(variant.method), variant.ratio or 0.0),
    )


# --- what was to be reached ----------------------------------------------------------------------


def targets(results: Sequence[dict[str, Any]], settings: QualitySettings) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough; only what was measured.

    Where every group counts, the value is that of the worst one, and equal is not enough.
    """
    errors = {
        Variant(result["method"], result["ratio"], result["bits"]): {
            name: summary["kl_mean"] for name, summary in result["groups"].items()
        }
        for result in results
    }
    guided, deviation = (Variant(method, TARGET_RATIO) for method in ("guided", "deviation"))
    twice = Variant("deviation", 2 * TARGET_RATIO)
    found = []
    if {guided, deviation} <= set(errors):
        ratio = _ratio(errors[guided][OVERALL], errors[deviation][OVERALL])
        found.append(_target(guided, deviation, "all prompts", ratio, MAX_GUIDED_OVER_DEVIATION))
    if {guided, twice} <= set(errors):
        found.append(
            _target(
                guided, twice, "all prompts", _ratio(errors[guided][OVERALL], errors[twice][OVERALL]), 1.0
            )
        )
    rivals = [(Variant("guided", ratio), Variant("deviation", ratio)) for ratio in sorted(settings.ratios)]
    rivals += [(guided, Variant("selective")), (guided, Variant("nothing")), (deviation, Variant("nothing"))]
    for better, worse in rivals:
        if {better, worse} <= set(errors):
            ratio, group = max(
                (_ratio(errors[better][name], errors[worse][name]), name)
                for name in errors[better]
                if name != OVERALL
            )
            found.append(_target(better, worse, f"worst group ({group})", ratio, 1.0, below=True))
    return found


def _ratio(value: float, other: float) -> float:
    return value / other if other else float(value > 0) * 1e9


def _target(
    better: Variant, worse: Variant, where: str, value: float, limit: float, *, below: bool = False
) -> dict[str, Any]:
    return {
        "name": f"KL, {better.name} / {worse.name}, {where}",
        "value": _rounded(value),
        "at_most": limit,
        "met": value < limit if below else value <= limit,
    }


def budgets(
    outcomes: Sequence[Outcome], settings: QualitySettings, calibration: Calibration | None
) -> list[dict[str, Any]]:
    """For every budget: the ratio that the model's calibration gives for it, and its error here.

    Calibration has prompts of its own, so all of these are held out; the error is that of the worse way
    of caching. Where no ratio holds, approximate reuse is refused.
    """
    if calibration is None:
        return []
    ways: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        ways.setdefault(outcome.group.partition("-")[0], []).append(outcome)
    found = []
    for limit in settings.budgets:
        ratio = calibration.ratio_for(limit)
        held = (
            None
            if ratio is None
            else max(_mean_error(of_way, Variant("guided", ratio)) for of_way in ways.values())
        )
        found.append(
            {
                "max_kl": limit,
                "ratio": ratio,
                "calibration_kl": None if ratio is None else _rounded(calibration.errors[ratio]),
                "held_out_kl": None if held is None else _rounded(held),
                "met": held is None or held <= MAX_OVER_BUDGET * limit,
            }
        )
    return found


def _mean_error(outcomes: Sequence[Outcome], variant: Variant) -> float:
    return statistics.fmean(outcome.found[variant].kl for outcome in outcomes)
