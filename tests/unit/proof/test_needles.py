"""Facts kept: what is asked of whom, and what is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.proof import needles
from kvboost.proof.documents import ALONE, TOGETHER
from kvboost.proof.needles import FactScores, measure_facts


class FakeEngine:
    """Notes what is asked of it; a token stands for itself."""

    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def warm(self, text: Any) -> None:
        self.calls.append(text)

    def warm_documents(self, texts: Any, *, progress: bool) -> None:
        assert not progress
        self.calls.append(tuple(texts))

    def clear(self) -> None:
        self.calls.append("clear")


class FakeTrial:
    """Full prefill answers with the prompt's own first token; a strategy with what it says."""

    def __init__(self, _engine: Any, ids: list[int], _tokens: int) -> None:
        self.answer_ids, self.end_ids = [ids[0], 9, ids[1]], {9}

    def measure_strategy(self, strategy: list[int], *, answer_tokens: int) -> Any:
        return SimpleNamespace(kl=0.5, answer_ids=strategy if answer_tokens else ())


def case(way: str, wanted: int, ids: list[int]) -> Any:
    asked = SimpleNamespace(is_in=lambda text: str(wanted) in text.split())
    prompt = SimpleNamespace(token_ids=ids, asked=asked)
    return SimpleNamespace(way=way, prompt=prompt, read_before=([1], [2]))


def both(wanted: int, ids: list[int]) -> tuple[Any, ...]:
    return case(ALONE, wanted, ids), case(TOGETHER, wanted, ids)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needles, "ReuseTrial", FakeTrial)


def test_only_what_full_prefill_answers_is_asked() -> None:
    engine: Any = FakeEngine()
    asked = [both(5, [5, 0]), both(6, [0, 6]), both(7, [7, 0]), both(8, [8, 0])]  # 6 stands behind the end
    strategies: Any = {"right": [5, 7], "wrong": [0]}
    reports: list[tuple[int, int]] = []
    scores = measure_facts(
        engine, strategies, asked, questions=2, report=lambda *report: reports.append(report)
    )
    assert (scores.asked, scores.answered) == (3, 2)
    assert scores.kept == {way: {"right": 2, "wrong": 0} for way in (ALONE, TOGETHER)}
    assert scores.errors[ALONE]["right"] == [0.5, 0.5]
    assert (scores.share(ALONE, "right"), scores.least_share("wrong")) == (1.0, 0.0)
    assert engine.calls == ["clear", [1], [2], "clear", ([1], [2])] * 2 + ["clear"]
    assert reports[-1] == (2, 2)


def test_all_are_measured_where_that_is_asked_for() -> None:
    engine: Any = FakeEngine()
    strategies: Any = {"right": [5, 6]}
    scores = measure_facts(
        engine, strategies, [both(5, [5, 0]), both(6, [0, 6])], questions=2, only_answered=False
    )
    assert (scores.asked, scores.answered) == (2, 1)
    assert scores.kept[ALONE] == {"right": 1}  # a lucky answer does not count
    assert len(scores.errors[ALONE]["right"]) == 2


def test_without_an_answer_there_is_no_share() -> None:
    scores = FactScores()
    scores.add(ALONE, "a", 0.1, kept=False)
    assert scores.share(ALONE, "a") is None
    assert scores.least_share("a") is None
