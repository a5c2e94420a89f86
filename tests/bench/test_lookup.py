"""`kvboost bench lookup`: what is stored, what is measured, how it is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.suite import lookup
from benchmarks.suite.commands.store import lookup_table
from benchmarks.suite.lookup import LookupSettings
from kvboost.cli.bench_view import targets_table
from kvboost.cli.main import main
from kvboost.errors import InvalidRequestError

SMALL = LookupSettings(sizes=(60, 10), prompt_tokens=120, chunk_size=16, rounds=3)


def test_stores_hold_as_much_as_they_say() -> None:
    record = lookup.run(SMALL)
    assert record["prompt_chunks"] == 8
    assert [(store["shape"], store["chunks"]) for store in record["stores"]] == [
        (shape, size) for size in (60, 10) for shape in lookup.SHAPES
    ]
    for store in record["stores"]:
        assert store["lookup_ms"]["count"] == 3
        assert store["total_ms"] >= store["lookup_ms"]["median"]
        assert store["fill_us_per_chunk"] > 0
    assert [target["at_most"] for target in record["targets"]] == [1.5, 1.5, 150, 60]
    assert "60 chunks / 10" in record["targets"][0]["name"]


def test_one_parent_has_all_the_others() -> None:
    random = np.random.default_rng(0)
    store = lookup._filled(SMALL, lookup.SHAPES[1], 60, random.integers(0, 1000, 120), random)
    store.manager.check_integrity()
    (root,) = store.manager._store.forest.roots()
    assert len(root.children) == 1
    assert len(root.children[0].children) == 60 - 8 + 1


def test_a_store_too_small_for_the_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="8 chunks"):
        LookupSettings(sizes=(60, 7), prompt_tokens=120, chunk_size=16).check()


def test_the_command(tmp_path: Path) -> None:
    arguments = ["--sizes", "10,60", "--prompt-tokens", "120", "--chunk-size", "16", "--rounds", "2"]
    outcome = CliRunner().invoke(main, ["bench", "lookup", *arguments, "--out", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(outcome.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "lookup-cpu.json").read_text())
    table = io.StringIO()
    console = Console(file=table, width=80)
    console.print(lookup_table(record))
    console.print(targets_table(record["targets"]))
    assert "…" not in table.getvalue()


@pytest.mark.parametrize("sizes", ["a", "0", "10,-5"])
def test_bad_sizes_are_usage_errors(sizes: str) -> None:
    outcome = CliRunner().invoke(main, ["bench", "lookup", "--sizes", sizes])
    assert outcome.exit_code == 2
    assert "--sizes" in outcome.stderr


def test_sizes_below_the_prompt_are_one_line() -> None:
    outcome = CliRunner().invoke(main, ["bench", "lookup", "--sizes", "10"])
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("error: a prompt of 100000 tokens has 782 chunks")
