"""`kvboost evaluate`: a table, a recommendation, files, and errors in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvboost.cli.main import main

TEXT = "The gate of the yard is green and has the number {0}. " * 2


@pytest.fixture
def questions(tmp_path: Path) -> str:
    lines: list[Any] = [{"document": TEXT.format(n), "id": f"d{n}"} for n in (1, 2)]
    lines += [{"documents": ["d1", "d2"], "question": f"Colour {n}?", "contains": "green"} for n in range(2)]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["evaluate", *arguments])


def small(folder: str) -> list[str]:
    return ["--model", folder, "--ratios", "0.15", "--max-new-tokens", "2", "--chunk-size", "16"]


def test_a_table_and_a_recommendation(tiny_folder: str, questions: str) -> None:
    outcome = run(questions, *small(tiny_folder))
    assert outcome.exit_code == 0, outcome.output
    for part in (
        "2 questions over 2 documents",
        "baseline",
        "prefix_cache",
        "chunk_kv_reuse 15%",
        "None of the 2",
    ):
        assert part in " ".join(outcome.stdout.split())


def test_files_and_going_on(tiny_folder: str, questions: str, tmp_path: Path) -> None:
    out = tmp_path / "results"
    outcome = run(questions, *small(tiny_folder), "--limit", "1", "--out", str(out), "--json")
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert (found["benchmark"], found["questions"], found["file"]) == ("questions", 1, "questions.jsonl")
    assert found["machine"]["torch"]
    assert found == json.loads((out / "questions-cpu.json").read_text())
    assert {path.name for path in out.iterdir()} == {
        "answers.jsonl",
        "questions-cpu.json",
        "questions-cpu.svg",
        "questions-cpu.png",
    }
    first = (out / "answers.jsonl").read_text()
    outcome = run(questions, *small(tiny_folder), "--out", str(out), "--no-plot")
    assert outcome.exit_code == 0, outcome.output
    second = (out / "answers.jsonl").read_text()
    assert second.startswith(first)
    assert len(second.splitlines()) == 1 + 2 * 3
    outcome = run(questions, *small(tiny_folder), "--limit", "1", "--out", str(out), "--no-plot", "--again")
    assert outcome.exit_code == 0, outcome.output
    assert len((out / "answers.jsonl").read_text().splitlines()) == 1 + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recompute-ratio", "0.5"], "--recompute-ratio is what this command compares: use --ratios"),
        (["--max-kl", "0.5"], "--max-kl is what this command compares"),
        (["--modes", "fast"], "expected some of baseline, prefix_cache, chunk_kv_reuse"),
        (["--ratios", "2"], "every number must be above 0 and at most 1"),
    ],
)
def test_flags_that_do_not_fit(questions: str, arguments: list[str], message: str) -> None:
    outcome = run(questions, *arguments)
    assert outcome.exit_code == 2
    assert message in " ".join(outcome.stderr.split())


def test_bad_lines_are_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"documents": ["a b"], "question": "q"}\nnonsense\n')
    outcome = run(str(path), "--model", "no/such-model")
    assert outcome.exit_code == 1
    said = " ".join(outcome.stderr.split())
    assert "line 1 of" in said
    assert "line 2 of" in said
    assert "Traceback" not in outcome.output


def test_a_plot_without_matplotlib(questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    outcome = run(questions, "--out", str(tmp_path / "results"))
    assert outcome.exit_code == 1
    assert "leave the plot out with --no-plot" in " ".join(outcome.stderr.split())
