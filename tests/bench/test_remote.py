"""`kvboost bench remote`: what is measured, how it is shown, and that nothing stays in the store."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.suite import remote
from benchmarks.suite.commands.remote import answers_table, reading_table
from tests.cli.command import kvboost
from tests.unit.remote.memory_store import MemoryStore


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    made = MemoryStore()
    monkeypatch.setattr(remote, "open_store", lambda _address: made)
    monkeypatch.setattr(remote, "bare_get", lambda _store, names: made.read(names))
    monkeypatch.setattr("kvboost.parts.engine_parts.open_store", lambda _address: made)
    monkeypatch.setattr("kvboost.remote.cache._LEAST_S", 10.0)  # a tiny model computes sooner than it asks
    return made


def test_the_command(store: MemoryStore, tiny_folder: str, tmp_path: Path) -> None:
    store.values["another's"] = b"..."
    options = ["--model", tiny_folder, "--lengths", "64,128", "--rounds", "2", "--plain-rounds", "1"]
    options += ["--chunk-size", "32", "--server", "a dict", "--out", str(tmp_path)]
    outcome = kvboost("bench", "remote", "--address", "redis://elsewhere", *options)
    assert outcome.exit_code == 0, outcome.output
    record = json.loads(outcome.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "remote-redis-cpu.json").read_text())
    assert record["settings"]["server"] == "a dict"
    assert [row["tokens"] for row in record["lengths"]] == [64, 128]
    for row in record["lengths"]:
        assert row["same_first_token"]
        assert row["lookup_trips"] == 1
        assert row["parts"] == row["tokens"] // 32
        assert [row["ttft_ms"][who]["count"] for who in ("baseline", "ram", "remote")] == [1, 2, 2]
        assert row["read_gb_s"] > 0
    assert list(store.values) == ["another's"]
    shown = io.StringIO()
    console = Console(file=shown, width=100)
    console.print(answers_table(record["lengths"]), reading_table(record["lengths"]))
    assert "BASELINE" in shown.getvalue()


def test_what_is_compared_cannot_be_chosen(tmp_path: Path) -> None:
    given = ["--address", "redis://x", "--cache-salt", "s", "--out", str(tmp_path)]
    outcome = kvboost("bench", "remote", *given)
    assert outcome.exit_code == 2
    assert "--cache-salt is what this benchmark compares" in outcome.stderr
