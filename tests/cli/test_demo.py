"""`kvboost demo`: what it measures, and that its words follow its numbers."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvboost.cli import demo as demo_module
from kvboost.cli import demo_text
from kvboost.cli.demo import Comparison, DemoReport, Turn, explanation, seconds, show, span
from kvboost.cli.main import main

REPORT = DemoReport(
    model="some/[model]",
    read_once_tokens=1500,
    read_once_ms=2100.0,
    questions=(
        Comparison("Who?", "She [said] so.", 2000.0, 100.0, 20.0, 1520, 1500, True),
        Comparison("What?", "It.", 2200.0, 110.0, 20.0, 1521, 1503, True),
        Comparison("When?", "Now.", 2400.0, 120.0, 20.0, 1518, 1503, True),
    ),
    chat=tuple(Turn(n, f"Turn {n}?", "Yes.", 1500 + 40 * n, 1480 + 40 * n, 100.0 + n) for n in range(1, 5)),
    cache_bytes=80_000_000,
)


def shown(report: DemoReport) -> str:
    output = io.StringIO()
    show(report, Console(file=output, width=80))
    return output.getvalue()


def test_the_text_asks_what_it_answers() -> None:
    words = demo_text.HANDBOOK.split()
    assert 900 <= len(words) <= 2000
    assert (len(demo_text.QUESTIONS), len(demo_text.CHAT)) == (3, 4)


def test_both_tables_and_all_answers_are_shown() -> None:
    text = shown(REPORT)
    for piece in (
        "some/[model]",
        "She [said] so.",
        "2.00 s",
        "100 ms",
        "20.0 x",
        "1,500 / 1,520",
        "yes",
        "Turn 4?",
    ):
        assert piece in text
    assert "no" not in text.split()


def test_the_explanation_uses_the_numbers() -> None:
    text = " ".join(explanation(REPORT))
    for piece in (
        "2.20 s",
        "2.10 s",
        "110 ms",
        "20.0 times sooner",
        "15 to 20 tokens",
        "1,540 to 1,660",
        "80 MB",
    ):
        assert piece in text
    assert "The answers are the same, token for token" in text


def test_a_different_answer_is_not_explained_away() -> None:
    changed = dataclasses.replace(REPORT.questions[0], same_answer=False)
    report = dataclasses.replace(REPORT, questions=(changed, *REPORT.questions[1:]))
    assert "2 of 3 answers are the same" in " ".join(explanation(report))
    assert "no" in shown(report).split()


def test_small_parts() -> None:
    assert (seconds(999.4), seconds(1000.0)) == ("999 ms", "1.00 s")
    assert (span([3, 3]), span([5, 3])) == ("3", "3 to 5")


@pytest.mark.real_model
def test_json_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"role": "system", "content": demo_text.HANDBOOK[:1500]}
    monkeypatch.setattr(demo_module, "system_message", lambda: dict(short))
    monkeypatch.setattr(demo_module, "MAX_NEW_TOKENS", 6)
    outcome = CliRunner().invoke(main, ["demo", "--json"])
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stderr == ""
    document = json.loads(outcome.stdout)
    assert [item["same_answer"] for item in document["questions"]] == [True] * 3
    for item in document["questions"]:
        assert item["prompt_tokens"] > item["reused_tokens"] >= document["read_once_tokens"]
    chat = document["chat"]
    assert [turn["turn"] for turn in chat] == [1, 2, 3, 4]
    for earlier, later in itertools.pairwise(chat):
        assert later["reused_tokens"] >= earlier["prompt_tokens"]
