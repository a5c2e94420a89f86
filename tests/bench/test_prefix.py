"""`kvboost bench prefix`: timing from outside, text that repeats nothing, the record and the table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from kvboost.bench.contestants import Answer, Stamps, timed
from kvboost.bench.prefix import spread_rounds
from kvboost.bench.record import machine_record, spread, write_record
from kvboost.bench.text import TextSource
from kvboost.cli.bench_prefix import prefix_table, storing_line
from kvboost.cli.main import main
from kvboost.errors import InvalidRequestError


def word_tokenizer(text: str, **_options: Any) -> dict[str, list[int]]:
    ids: dict[str, int] = {}
    return {"input_ids": [ids.setdefault(word, len(ids)) for word in text.split()]}


@pytest.mark.timed
def test_timing_counts_from_the_call_and_from_token_to_token() -> None:
    def call(stamps: Stamps) -> Answer:
        for _ in range(3):
            assert not stamps(torch.zeros(1, 4, dtype=torch.long), None).any()
        first = stamps.times[0]
        stamps.times[:] = [first, first + 0.5, first + 1.0]
        return Answer([7, 8, 9], 2)

    turn = timed(call)
    assert turn.answer == Answer([7, 8, 9], 2)
    assert 0 <= turn.ttft_ms < 1000
    assert turn.decode_tokens_per_s == pytest.approx(2.0)


def test_spread() -> None:
    quartiles = {"low": 1, "quartile_1": 2, "median": 3, "quartile_3": 4, "high": 5}
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {**quartiles, "count": 5}
    assert spread([2.0]) == {**dict.fromkeys(quartiles, 2), "count": 1}


@pytest.mark.parametrize(
    ("count", "rounds", "expected"),
    [(3, 10, {0, 4, 9}), (1, 5, {0}), (9, 2, {0, 1}), (2, 4, {0, 3}), (1, 1, {0})],
)
def test_plain_rounds_are_spread_out(count: int, rounds: int, expected: set[int]) -> None:
    assert spread_rounds(count, rounds) == expected


def test_pieces_of_text_share_no_beginning() -> None:
    source = TextSource(word_tokenizer, 100)
    prefixes = [source.prefix(50), source.prefix(100)]
    pieces = [source.fresh(20) for _ in range(40)]
    following = [prefixes[1][50], prefixes[0][0]]
    firsts = [piece[0] for piece in pieces]
    assert len({*firsts, *following}) == len(firsts) + 2
    assert {len(piece) for piece in pieces} == {20}


def test_text_that_does_not_suffice_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="fewer rounds"):
        TextSource(word_tokenizer, 10_000_000)
    with pytest.raises(InvalidRequestError, match="fewer rounds"):
        TextSource(word_tokenizer, 10).fresh(10_000_000)


def test_the_machine_is_described_and_written(tmp_path: Path) -> None:
    machine = machine_record(torch.device("cpu"))
    assert all(
        machine[name] for name in ("cpu", "cores", "ram_bytes", "python", "torch", "transformers", "kvboost")
    )
    path = write_record({"benchmark": "some", "machine": machine}, tmp_path / "new" / "folder")
    assert path.name == "some-cpu.json"
    assert json.loads(path.read_text())["machine"] == machine


@pytest.mark.parametrize("lengths", ["a,b", "", "0", "100,-5", "1.5"])
def test_bad_lengths_are_usage_errors(lengths: str) -> None:
    outcome = CliRunner().invoke(main, ["bench", "prefix", "--lengths", lengths])
    assert outcome.exit_code == 2
    assert "--lengths" in outcome.stderr


@pytest.mark.real_model
def test_a_small_run(tmp_path: Path) -> None:
    arguments = [
        "--lengths",
        "96,64",
        "--rounds",
        "2",
        "--plain-rounds",
        "1",
        "--new-tokens",
        "3",
        "--pairs",
        "1",
    ]
    outcome = CliRunner().invoke(main, ["bench", "prefix", *arguments, "--out", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(outcome.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "prefix-cpu.json").read_text())
    assert [item["shared_tokens"] for item in record["lengths"]] == [96, 64]
    for item in record["lengths"]:
        assert list(item["contestants"]) == ["plain", "hand_made", "kvboost", "kvboost_copied"]
        for name, outcome_of_one in item["contestants"].items():
            assert outcome_of_one["same_tokens_as_plain"] == outcome_of_one["compared_with_plain"] == 1
            assert outcome_of_one["reused_tokens"] == (0 if name == "plain" else item["shared_tokens"])
            assert outcome_of_one["ttft_ms"]["count"] == (1 if name == "plain" else 2)
            assert outcome_of_one["decode_tokens_per_s"]["median"] > 0
        assert all(ratio > 0 for ratio in item["ratios"].values())
    assert record["storing"]["pairs"] == record["storing"]["baseline_ttft_ms"]["count"] == 1
    table = io.StringIO()
    Console(file=table, width=80).print(prefix_table(record))
    assert "…" not in table.getvalue()
    assert storing_line(record).split()[0] in outcome.stdout
