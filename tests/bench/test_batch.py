"""`kvboost bench batch`: a small real run, and that a verdict can be bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.suite import batch as bench
from kvboost.cli.main import main

SMALL = [
    "--batch",
    "3",
    "--prefix-tokens",
    "120",
    "--longest-tail",
    "20",
    "--new-tokens",
    "3",
    "--rounds",
    "2",
]
SMALL += ["--plain-rounds", "1", "--memory-batch", "4", "--chunk-size", "16"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", "batch", *arguments])


def test_a_small_run(tiny_folder: str, tmp_path: Path) -> None:
    outcome = run("--model", tiny_folder, *SMALL, "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(outcome.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "batch-cpu.json").read_text()) == record
    assert set(record["results"]) == {"hugging_face", "expanded", "one_by_one", "batch", "batch_cold"}
    for name, found in record["results"].items():
        assert found["same_answers"] == found["answers"] == (3 if name in bench.SLOW[False] else 6), name
        assert found["seconds"]["count"] == (1 if name in bench.SLOW[False] else 2)
    memory = record["memory"]
    assert memory["rows"] == 4
    assert 0 < memory["kv_bytes"] < memory["kv_bytes_expanded"]
    assert memory["ratio"] == pytest.approx(memory["kv_bytes"] / memory["kv_bytes_expanded"], abs=1e-3)
    assert "kvboost, together" in outcome.stdout
    assert "KV of 4 rows over 120 shared tokens" in " ".join(outcome.stdout.split())


def test_only_json(tiny_folder: str) -> None:
    outcome = run("--model", tiny_folder, *SMALL, "--json")
    assert json.loads(outcome.stdout)["benchmark"] == "batch"


def test_targets_can_be_missed() -> None:
    assert bench._at_least("x", 5.9, 6.0)["met"] is False
    assert bench._at_least("x", 6.0, 6.0)["met"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shortest-tail", "9", "--longest-tail", "5"], "--shortest-tail must be at most --longest-tail"),
        (["--max-chunks", "5"], "--max-chunks is what this benchmark compares"),
    ],
)
def test_bad_arguments(tiny_folder: str, arguments: list[str], message: str) -> None:
    outcome = run("--model", tiny_folder, *arguments)
    assert outcome.exit_code == 2
    assert message in " ".join(outcome.stderr.split())
