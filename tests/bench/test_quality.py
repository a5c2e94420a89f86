"""`kvboost bench quality`: what is measured, what it comes to, and that a verdict can be bad."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.suite import plots, quality
from benchmarks.suite.quality import METHODS, OVERALL, Outcome, QualitySettings, Variant
from kvboost.bench import plots as base_plots
from kvboost.errors import InvalidRequestError, KVBoostError
from kvboost.proof.calibration import Calibration
from kvboost.proof.documents import ALONE, TOGETHER
from kvboost.proof.needles import FactScores

SMALL = QualitySettings(
    prompts=8,
    documents=(2, 3),
    prompt_tokens=900,
    ratios=(0.2, 0.1),
    facts=4,
    fact_ratios=(0.15,),
    budgets=(0.03, 1e-9),
)
ERRORS = {"nothing": 0.2, "selective": 0.09, "selective_before": 0.15, "random": 0.19, "all": 0.0}


@dataclass(frozen=True)
class Measured:
    kl: float
    top1: float = 0.9
    reused_tokens: int = 800
    recomputed_tokens: int = 80
    seconds: float = 0.5


def measured(method: str, ratio: float) -> Measured:
    """Errors as they should be: guided half of deviation, both falling with the ratio."""
    error = {"guided": 0.04, "deviation": 0.08}.get(method, 0.0) * (1.1 - ratio) or ERRORS[method]
    return Measured(error, recomputed_tokens=int(800 * ratio), seconds=0.1 + ratio)


class FakeTrial:
    """Stands for `kvboost.proof.quality.ReuseTrial`."""

    def __init__(self, engine: FakeEngine, prompt_ids: np.ndarray, continuation_tokens: int) -> None:
        assert continuation_tokens == 32
        self.calls: list[tuple[str, float, int | str]] = []
        self.prompt_ids: list[int] = prompt_ids.tolist()
        self.warmed = list(engine.warmed)
        assert all(self._is_cached(ids, prompt_ids.tolist()) for ids in self.warmed)
        self.baseline_seconds = 2.0
        self.answer_ids = engine.tokenizer(engine.answer)["input_ids"]
        engine.trials.append(self)

    @staticmethod
    def _is_cached(read_before: list[int], prompt: list[int]) -> bool:
        tail = ",".join(map(str, read_before[-60:]))
        return tail in ",".join(map(str, prompt))

    def measure(self, method: str, ratio: float, engine: FakeEngine) -> Measured:
        assert engine.warmed == self.warmed
        self.calls.append((method, ratio, engine.options.get("kv_cache_bits", 16)))
        return measured(method, ratio)


class FakeModel:
    dtype = torch.float32

    def get_input_embeddings(self) -> Any:
        return torch.nn.Embedding(2, 2)


class FakeEngine:
    """Remembers what was done to it."""

    def __init__(self, tokenizer: Any, answer: str = "no idea", **options: Any) -> None:
        self.model = FakeModel()
        self.tokenizer = tokenizer
        self.answer = answer
        self.options = options
        self.warmed: list[list[int]] = []
        self.trials: list[FakeTrial] = []
        self.closed = False

    def warm(self, token_ids: list[int]) -> None:
        self.warmed.append(token_ids)

    def warm_documents(self, texts: Sequence[list[int]], *, progress: bool) -> None:
        assert not progress
        self.warmed += texts

    def clear(self) -> None:
        self.warmed.clear()

    def close(self) -> None:
        self.closed = True


def fake_scores(
    _engine: Any, strategies: dict[str, Any], _cases: Any, *, questions: int, report: Any
) -> FactScores:
    """Half of the questions are answered by full prefill; guided keeps all of these, the others none."""
    scores = FactScores(asked=questions, answered=questions // 2)
    for way in (ALONE, TOGETHER):
        for name, number in itertools.product(strategies, range(questions)):
            scores.add(way, name, 0.25, kept="guided" in name and number % 2 == 0)
    report(questions, questions)
    return scores


@pytest.fixture
def record(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(quality, "ReuseTrial", FakeTrial)
    monkeypatch.setattr(quality, "measure_facts", fake_scores)
    steps: list[tuple[int, int, str]] = []
    found = quality.run(
        FakeEngine(tokenizer),
        "fake",
        SMALL,
        lambda **o: FakeEngine(tokenizer, **o),
        lambda *s: steps.append(s),
    )
    assert [step[:2] for step in steps] == [*((number, 12) for number in range(8)), (12, 12), (12, 12)]
    return found


def outcomes_with(errors: dict[Variant, float], groups: tuple[str, ...] = ("a", "b")) -> list[Outcome]:
    return [
        Outcome(group, 1_000, 2.0, {variant: Measured(kl) for variant, kl in errors.items()})
        for group in groups
        for _ in range(4)
    ]


def verdicts(errors: dict[Variant, float], worse_in_b: dict[Variant, float] | None = None) -> dict[str, bool]:
    outcomes = outcomes_with(errors)
    for outcome in outcomes[4:]:
        outcome.found.update({variant: Measured(kl) for variant, kl in (worse_in_b or {}).items()})
    settings = QualitySettings(ratios=(0.1, 0.2))
    return {
        target["name"]: target["met"]
        for target in quality.targets(quality.summaries(outcomes, errors), settings)
    }


# --- the run ---------------------------------------------------------------------------------


def test_everything_is_measured_on_every_prompt(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "ReuseTrial", FakeTrial)
    monkeypatch.setattr(quality, "measure_facts", fake_scores)
    engine = FakeEngine(tokenizer)
    opened: list[FakeEngine] = []

    def open_engine(**options: Any) -> FakeEngine:
        opened.append(FakeEngine(tokenizer, **options))
        return opened[-1]

    quality.run(engine, "fake", SMALL, open_engine)
    assert len(engine.trials) == 8
    expected = {(variant.method, variant.ratio or 0.0, variant.bits) for variant in SMALL.variants}
    assert all(set(trial.calls) == expected and len(trial.calls) == 13 for trial in engine.trials)
    assert engine.trials[0].calls != engine.trials[1].calls  # in another order
    assert [len(trial.warmed) for trial in engine.trials] == [2, 3] * 4
    assert [one.options for one in opened] == [{"kv_cache_bits": bits} for bits in (8, "k8v4", 4)]
    assert all(one.closed and not one.warmed for one in opened)


def test_the_record(record: dict[str, Any]) -> None:
    assert record["benchmark"] == "quality"
    assert list(record["groups"]) == [
        f"{way}-{count}" for way in ("alone", "behind", "together") for count in (2, 3)
    ]
    names = [(result["method"], result["ratio"], result["bits"]) for result in record["results"]]
    assert names == [(variant.method, variant.ratio, variant.bits) for variant in SMALL.variants]
    for result in record["results"]:
        assert list(result["groups"]) == [OVERALL, *record["groups"]]
    guided = record["results"][names.index(("guided", 0.1, 16))]["groups"][OVERALL]
    assert guided["kl_mean"] == pytest.approx(0.04)
    assert guided["kl_mean_low"] <= guided["kl_mean"] <= guided["kl_mean_high"]
    assert guided["recomputed_share"] == pytest.approx(0.1)
    assert guided["speedup"] == pytest.approx(10)
    assert len(record["prompts"]) == 8
    assert list(record["prompts"][0]["kl"])[3:5] == ["deviation 10%", "deviation 20%"]
    assert all(target["met"] for target in record["targets"])


def test_facts_are_counted(record: dict[str, Any]) -> None:
    facts = record["facts"]
    assert (facts["asked"], facts["answered"], facts["documents"]) == (4, 2, [4, 6, 8])
    shares = {(row["method"], row["ratio"]): row["kept_share"] for row in facts["results"]}
    assert shares == {
        ("nothing", None): {"alone": 0.0, "together": 0.0},
        ("deviation", 0.15): {"alone": 0.0, "together": 0.0},
        ("guided", 0.15): {"alone": 1.0, "together": 1.0},
    }
    assert all(row["kl_mean"] == {"alone": 0.25, "together": 0.25} for row in facts["results"])


@pytest.mark.parametrize(("share", "answered", "met"), [(0.9, 100, True), (0.8, 100, False), (0.9, 99, None)])
def test_a_share_of_facts_is_judged_where_enough_was_asked(
    share: float, answered: int, met: bool | None
) -> None:
    kl = {"alone": 0.04, "together": 0.02}
    shares = {"alone": 0.75, "together": share}
    rows = [{"method": "guided", "ratio": 0.15, "kept_share": shares, "kl_mean": kl}]
    found = quality.fact_targets({"answered": answered, "results": rows})
    assert {target["name"]: target["met"] for target in found} == (
        {}
        if met is None
        else {
            "facts kept, guided 15%, read together": met,
            "facts kept, guided 15%, read alone": True,
            "KL, guided 15%, the same prompts read together / alone": True,
        }
    )
    assert quality.fact_targets(None) == []


@pytest.mark.parametrize(("together", "met"), [(0.03, True), (0.031, False)])
def test_reading_together_is_compared_with_reading_alone(together: float, met: bool) -> None:
    shares = {"alone": 1.0, "together": 1.0}
    row = {"method": "guided", "ratio": 0.15, "kept_share": shares}
    row["kl_mean"] = {"alone": 0.04, "together": together}
    found = quality.fact_targets({"answered": 100, "results": [row]})[-1]
    assert found["name"] == "KL, guided 15%, the same prompts read together / alone"
    assert (found["value"], found["met"]) == (pytest.approx(together / 0.04), met)


def test_without_other_widths_no_further_engine_is_opened(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "ReuseTrial", FakeTrial)

    def open_engine(**options: Any) -> Any:
        raise AssertionError(options)

    settings = replace(SMALL, prompts=1, facts=0, methods=("nothing",), bits=())
    record = quality.run(FakeEngine(tokenizer), "fake", settings, open_engine)
    assert record["facts"] is None
    assert record["budgets"] == record["targets"] == []


@pytest.mark.parametrize("change", [{"methods": ("guess",)}, {"ratios": (0.0,)}, {"ratios": (1.5,)}])
def test_bad_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        replace(SMALL, **change).check()


def test_only_some_methods_take_a_ratio() -> None:
    assert [v.name for v in SMALL.variants if v.method in ("nothing", "guided")] == [
        "nothing",
        "guided 10%",
        "guided 20%",
        "guided 10%, 8 bits",
        "guided 10%, k8v4 bits",
        "guided 10%, 4 bits",
    ]
    assert {variant.method for variant in QualitySettings().variants} == set(METHODS)


# --- what it comes to ------------------------------------------------------------------------

NOTHING, SELECTIVE = Variant("nothing"), Variant("selective")
G10, G20, D10, D20 = (Variant(method, ratio) for method in ("guided", "deviation") for ratio in (0.1, 0.2))
GOOD = {NOTHING: 0.2, SELECTIVE: 0.1, D10: 0.08, D20: 0.06, G10: 0.04, G20: 0.03}


def test_good_figures_meet_all_targets() -> None:
    found = verdicts(GOOD)
    assert len(found) == 7
    assert all(found.values())


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({D10: 0.066}, "guided 10% / deviation 10%, all"),
        ({D20: 0.039}, "guided 10% / deviation 20%, all"),
        ({G20: 0.06}, "guided 20% / deviation 20%, worst"),  # equal is not below
        ({SELECTIVE: 0.04}, "guided 10% / selective, worst"),
        ({NOTHING: 0.07}, "deviation 10% / nothing, worst"),
    ],
)
def test_bad_figures_miss_their_target(change: dict[Variant, float], missed: str) -> None:
    found = verdicts({**GOOD, **change})
    assert [name for name, met in found.items() if missed in name and not met]
    assert sum(not met for met in found.values()) == 1


def test_one_bad_group_is_enough() -> None:
    found = verdicts(GOOD, worse_in_b={SELECTIVE: 0.03})
    assert [name for name, met in found.items() if not met] == ["KL, guided 10% / selective, worst group (b)"]


def test_an_error_of_zero_is_no_division() -> None:
    assert verdicts({G10: 0.0, D10: 0.0})["KL, guided 10% / deviation 10%, all prompts"]
    assert not verdicts({G10: 0.1, D10: 0.0})["KL, guided 10% / deviation 10%, all prompts"]


def test_intervals_widen_with_the_spread() -> None:
    same = quality.summaries(outcomes_with({NOTHING: 0.1}), [NOTHING])[0]["groups"][OVERALL]
    assert same["kl_mean_low"] == same["kl_mean"] == same["kl_mean_high"] == 0.1
    apart = outcomes_with({NOTHING: 0.0})
    for number, outcome in enumerate(apart):
        outcome.found[NOTHING] = Measured(float(number))
    wide = quality.summaries(apart, [NOTHING])[0]["groups"][OVERALL]
    assert wide["kl_mean_low"] < 3 < 4 < wide["kl_mean_high"]
    assert wide["kl_quartiles"] == [1.75, 3.5, 5.25]


def test_nothing_reused_has_no_share() -> None:
    outcome = Outcome("a", 10, 1.0, {NOTHING: Measured(0.0, reused_tokens=0, recomputed_tokens=0)})
    assert quality.summaries([outcome], [NOTHING])[0]["groups"]["a"]["recomputed_share"] is None


def calibrated(errors: dict[float, float]) -> Calibration:
    return Calibration("fake", "family", "guided", errors, prompts=4, measured_at="now")


def test_budgets_take_the_calibrated_ratio_and_check_it_on_other_prompts() -> None:
    outcomes = outcomes_with({G10: 0.04, G20: 0.02})
    settings = QualitySettings(ratios=(0.2, 0.1), budgets=(0.05, 0.03, 0.01))
    calibration = calibrated({0.1: 0.045, 0.2: 0.025})
    first, second, third = quality.budgets(outcomes, settings, calibration)
    assert (first["ratio"], second["ratio"], third["ratio"]) == (0.1, 0.2, None)
    assert first["met"]
    assert second["met"]
    assert third["met"]  # refused
    assert third["held_out_kl"] is None
    for outcome in outcomes:
        outcome.found[G10] = Measured(0.2)
    found = quality.budgets(outcomes, settings, calibration)
    assert [budget["met"] for budget in found] == [False, True, True]
    assert quality.budgets(outcomes, settings, None) == []


def test_ratios_that_only_a_budget_needs_are_measured_too(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "ReuseTrial", FakeTrial)
    settings = replace(
        SMALL, prompts=1, facts=0, methods=("guided",), ratios=(0.1,), budgets=(0.03,), bits=()
    )
    calibration = calibrated({0.5: 0.02})
    record = quality.run(FakeEngine(tokenizer), "fake", settings, lambda **_: None, calibration=calibration)
    assert record["budgets"][0]["ratio"] == 0.5
    assert {result["ratio"] for result in record["results"]} == {0.1, 0.5}


# --- the picture -----------------------------------------------------------------------------


def test_the_plot(record: dict[str, Any], tmp_path: Path) -> None:
    paths = plots.plot_error(record, tmp_path / "new")
    assert [path.name for path in paths] == ["quality-cpu.svg", "quality-cpu.png"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    first = paths[0].read_text()
    plots.plot_error(record, tmp_path / "new")
    assert paths[0].read_text() == first


def test_a_plot_of_nothing_but_zeros(record: dict[str, Any], tmp_path: Path) -> None:
    for result in record["results"]:
        result["groups"][OVERALL]["kl_mean"] = 0.0
    assert all(path.is_file() for path in plots.plot_error(record, tmp_path))


def test_no_matplotlib_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_plots.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(KVBoostError, match=r'pip install "kvboost\[bench\]"'):
        base_plots.require_matplotlib()
