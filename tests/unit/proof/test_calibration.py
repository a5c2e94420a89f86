"""Choosing a ratio by its error, and keeping what was measured."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.errors import CacheFileError, InvalidRequestError
from kvboost.proof import calibration
from kvboost.proof.calibration import Calibration
from kvboost.proof.documents import ALONE, TOGETHER
from kvboost.proof.needles import FactScores
from kvboost.proof.quality import strategy_of

FAMILY = "ab" * 32
NAN = float("nan")


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "cache"))


def made(errors: dict[float, float], **changes: Any) -> Calibration:
    plain = Calibration("model", FAMILY, "guided", errors, 12, "2026-01-01T00:00:00+00:00")
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize(
    ("errors", "max_kl", "ratio"),
    [
        ({0.1: 0.04, 0.2: 0.02, 0.5: 0.01}, 0.05, 0.1),
        ({0.1: 0.04, 0.2: 0.02, 0.5: 0.01}, 0.04, 0.1),
        ({0.1: 0.04, 0.2: 0.02, 0.5: 0.01}, 0.03, 0.2),
        ({0.1: 0.04, 0.2: 0.02, 0.5: 0.01}, 0.01, 0.5),
        ({0.1: 0.04, 0.2: 0.02, 0.5: 0.01}, 0.009, None),
        ({0.5: 0.01, 0.1: 0.04, 0.2: 0.02}, 0.03, 0.2),  # in any order
        ({0.1: 0.01, 0.2: 0.06, 0.5: 0.01}, 0.05, 0.5),  # luck at 0.1 does not count
        ({0.1: 0.01, 0.2: 0.01, 0.5: 0.06}, 0.05, None),
        ({}, 0.05, None),
        ({0.1: NAN, 0.2: NAN}, 0.05, None),  # an error that could not be measured holds no bound
        ({0.1: NAN, 0.2: 0.01}, 0.05, 0.2),
        ({0.1: 0.01, 0.2: NAN}, 0.05, None),
    ],
)
def test_the_smallest_ratio_that_held(errors: dict[float, float], max_kl: float, ratio: float | None) -> None:
    assert made(errors).ratio_for(max_kl) == ratio


def test_saved_and_loaded(tmp_path: Path) -> None:
    assert calibration.load(FAMILY, "guided") is None
    one = made({0.05: 0.123456789, 0.1: 1e-9, 0.5: 0.0})
    path = calibration.save(one)
    assert path.is_relative_to(tmp_path / "cache")
    assert calibration.load(FAMILY, "guided") == one
    assert calibration.load(FAMILY, "deviation") is None
    assert calibration.load("cd" * 32, "guided") is None
    newer = made({0.1: 0.5})
    calibration.save(newer)
    assert calibration.load(FAMILY, "guided") == newer
    other = made({0.1: 0.7}, selector="deviation")
    calibration.save(other)
    assert calibration.load(FAMILY, "guided") == newer
    assert len(list(path.parent.iterdir())) == 2


def test_what_belongs_to_another_model_is_not_used() -> None:
    path = calibration.save(made({0.1: 0.01}))
    alike = FAMILY[:32] + "f" * 32  # the file's name does not tell them apart
    assert calibration.path_of(alike, "guided") == path
    assert calibration.load(alike, "guided") is None


def test_another_version_is_measured_again() -> None:
    path = calibration.save(made({0.1: 0.01}))
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "version": document["version"] + 1}))
    assert calibration.load(FAMILY, "guided") is None


@pytest.mark.parametrize(
    "missing", ["errors", "facts", "model", "prompts", "questions", "family", "selector"]
)
def test_missing_parts_are_named(missing: str) -> None:
    path = calibration.save(made({0.1: 0.01}))
    document = json.loads(path.read_text())
    del document[missing]
    path.write_text(json.dumps(document))
    with pytest.raises(CacheFileError, match=missing):
        calibration.load(FAMILY, "guided")


@pytest.mark.parametrize("errors", ["x", [0.1], {"a": 1}, {"0.1": "b"}, {"0.1": None}, None])
def test_bad_errors_are_refused(errors: Any) -> None:
    path = calibration.save(made({0.1: 0.01}))
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "errors": errors}))
    with pytest.raises(CacheFileError, match=r"remove it and run kvboost calibrate again"):
        calibration.load(FAMILY, "guided")


@pytest.mark.parametrize("ratio", ["1.5", "-0.1", "nan"])
def test_ratios_that_cannot_be_are_refused(ratio: str) -> None:
    """They would only show when a request is served."""
    path = calibration.save(made({0.1: 0.01}))
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "errors": {ratio: 0.01}}))
    with pytest.raises(CacheFileError, match=r"kvboost calibrate"):
        calibration.load(FAMILY, "guided")


def test_a_save_that_is_cut_off_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made({0.1: 0.01})
    path = calibration.save(one)

    def full_disk(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        with pytest.raises(OSError, match="No space"):
            calibration.save(made({0.1: 0.9}))
    assert calibration.load(FAMILY, "guided") == one
    assert list(path.parent.iterdir()) == [path]


class FakeEngine:
    """Notes what is asked of it."""

    tokenizer = None

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def namespace(self, salt: str | None = None) -> Any:
        assert salt == ""
        return SimpleNamespace(family=FAMILY)


def test_measuring_takes_the_worse_way_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = FactScores(asked=4, answered=2)
    for way, kl, kept in (
        (ALONE, 0.2, False),
        (ALONE, 0.4, True),
        (TOGETHER, 0.1, True),
        (TOGETHER, 0.3, True),
    ):
        for ratio in ("0.1", "0.5"):
            scores.add(way, ratio, kl * (1 - float(ratio)), kept=kept or ratio == "0.5")
    asked: dict[str, Any] = {}

    def measured(engine: Any, strategies: Any, _cases: Any, **options: Any) -> FactScores:
        asked.update(engine=engine, strategies=strategies, **options)
        return scores

    monkeypatch.setattr(calibration, "measure_facts", measured)
    monkeypatch.setattr(calibration, "needle_cases", lambda *_args: iter(()))
    engine = FakeEngine()
    found = calibration.measure(
        engine,  # type: ignore[arg-type]
        model="m",
        selector="deviation",
        prompts=4,
        ratios=iter((0.1, 0.5)),
    )
    assert found.errors == {0.1: pytest.approx(0.27), 0.5: pytest.approx(0.15)}
    assert found.facts == {0.1: 0.5, 0.5: 1.0}
    assert (found.family, found.selector, found.prompts, found.questions) == (FAMILY, "deviation", 4, 2)
    assert (asked["engine"], asked["questions"], asked["only_answered"]) == (engine, 4, False)
    assert asked["strategies"] == {f"{ratio:g}": strategy_of("deviation", ratio) for ratio in (0.1, 0.5)}


def test_a_model_that_answers_nothing_has_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = FactScores(asked=4)
    scores.add(ALONE, "0.1", 0.3, kept=False)
    monkeypatch.setattr(calibration, "measure_facts", lambda *_args, **_options: scores)
    monkeypatch.setattr(calibration, "needle_cases", lambda *_args: iter(()))
    found = calibration.measure(FakeEngine(), model="m", selector="guided", ratios=[0.1])  # type: ignore[arg-type]
    assert (found.errors, found.facts, found.questions) == ({0.1: 0.3}, {}, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"prompts": 3}, "at least 4 prompts"), ({"max_positions": 700}, "this one has 700")],
)
def test_what_cannot_be_measured_is_said(options: dict[str, Any], words: str) -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidRequestError, match=words):
        calibration.measure(engine, model="m", selector="guided", **options)  # type: ignore[arg-type]
    assert engine.calls == []


@pytest.mark.parametrize(
    ("max_kl", "min_facts", "ratio"),
    [(None, 0.8, 0.2), (0.05, 0.8, 0.2), (0.015, 0.8, 0.5), (None, 0.5, 0.1), (0.05, 0.99, None)],
)
def test_a_ratio_holds_both_bounds(max_kl: float | None, min_facts: float, ratio: float | None) -> None:
    found = made({0.1: 0.04, 0.2: 0.02, 0.5: 0.01}, facts={0.1: 0.6, 0.2: 0.8, 0.5: 0.9}, questions=10)
    assert found.ratio_for(max_kl, min_facts) == ratio


def test_without_questions_no_share_of_facts_is_held() -> None:
    assert made({0.1: 0.04}).ratio_for(None, 0.1) is None


def test_a_few_questions_hold_no_share_of_facts() -> None:
    few = made({0.1: 0.01}, facts={0.1: 1.0}, questions=calibration.LEAST_QUESTIONS - 1)
    assert few.ratio_for(None, 0.5) is None
    assert few.ratio_for(0.05) == 0.1


def test_bounds_in_words() -> None:
    assert calibration.bounds_text(0.05, None) == "max_kl=0.05"
    assert calibration.bounds_text(0.05, 0.8) == "max_kl=0.05 and min_facts=0.8"
