"""`kvboost bench chat` and `bench compare`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvboost.cli.main import main


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", *arguments])


@pytest.fixture
def result(tiny_folder: str, tmp_path: Path) -> Path:
    small = [
        "--chats",
        "2",
        "--turns",
        "3",
        "--new-tokens",
        "3",
        "--document-words",
        "20",
        "--baseline-chats",
        "1",
    ]
    outcome = run("chat", "--model", tiny_folder, *small, "--chunk-size", "16", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.stderr
    assert "3 of 3 answers equal BASELINE's." in outcome.stdout
    return tmp_path / "chat-cpu.json"


def test_every_turn_is_measured(result: Path) -> None:
    record = json.loads(result.read_text())
    assert [row["turn"] for row in record["results"]] == [1, 2, 3]
    first, second, third = record["results"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > first["prompt_tokens"] - 3
    assert third["cached_tokens"] > second["cached_tokens"]
    assert all(row["speedup"] > 0 for row in record["results"])


def test_compare_shows_what_changed(result: Path, tmp_path: Path) -> None:
    changed = json.loads(result.read_text())
    changed["results"][1]["ttft_ms"]["median"] *= 2
    changed["settings"]["chats"] = 9
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed))
    outcome = run("compare", str(result), str(other))
    assert outcome.exit_code == 0, outcome.stderr
    words = " ".join(outcome.stdout.split())
    assert "results 2 ttft_ms median" in words
    assert "+100%" in words
    assert "not alike: chats 2 and 9" in words
    found = json.loads(run("compare", str(result), str(other), "--json").stdout)
    assert [row["name"] for row in found["changes"]] == ["results 2 ttft_ms median"]
    same = run("compare", str(result), str(result))
    assert "0 of" in same.stdout
    assert "not alike" not in same.stdout


def test_numbers_that_one_of_them_lacks(result: Path, tmp_path: Path) -> None:
    changed = copy.deepcopy(json.loads(result.read_text()))
    del changed["same_answers"]
    changed["more"] = 3
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed))
    found = json.loads(run("compare", str(result), str(other), "--json").stdout)
    assert {row["name"]: row["change_percent"] for row in found["changes"]} == {
        "same_answers": None,
        "more": None,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "is no JSON"),
        ("[1, 2]", "is no result of a benchmark"),
        ('{"benchmark": "prefix"}', "results of two benchmarks: prefix and chat"),
    ],
)
def test_bad_files_are_one_line(result: Path, tmp_path: Path, text: str, message: str) -> None:
    other = tmp_path / "other.json"
    other.write_text(text)
    outcome = run("compare", str(other), str(result))
    assert outcome.exit_code == 1
    assert message in " ".join(outcome.stderr.split())
    assert "Traceback" not in outcome.output
