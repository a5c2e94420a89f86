"""`kvboost bench quality` and `kvboost bench rag`: options, tables that fit, files, and small real runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.suite.commands import quality as bench_quality
from benchmarks.suite.quality import QualitySettings
from kvboost.bench import plots
from kvboost.bench.rag import RagSettings
from kvboost.cli import bench_rag, bench_view
from kvboost.cli.main import main
from kvboost.proof import quality as measuring

QUALITY = ["--prompts", "4", "--documents", "2", "--prompt-tokens", "500", "--ratios", "0.10,0.20"]
QUALITY += ["--continuation", "4", "--chunk-size", "16"]
RAG = ["--documents", "2", "--prompt-tokens", "500", "--rounds", "2", "--pairs", "2", "--cold-tokens", "100"]
RAG += ["--chats", "1", "--turns", "2", "--chunk-size", "16"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", *arguments])


def shown(*parts: Any, width: int = 80) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width)
    for part in parts:
        console.print(part)
    return text.getvalue()


@pytest.mark.parametrize("command", ["quality", "rag"])
def test_help_says_what_is_measured(command: str) -> None:
    outcome = run(command, "--help")
    assert outcome.exit_code == 0
    for option in ("--ratios", "--documents", "--seed", "--out", "--no-plot", "--json", "--chunk-size"):
        assert option in outcome.stdout


def test_defaults_are_those_of_the_settings() -> None:
    """Flags are written out, so that help needs no torch."""
    assert bench_quality.METHODS == measuring.METHODS
    for command, settings in (
        (bench_quality.quality, QualitySettings()),
        (bench_rag.rag, RagSettings()),
    ):
        for option in command.params:
            name = {"continuation": "continuation_tokens"}.get(str(option.name), str(option.name))
            if hasattr(settings, name):
                value = getattr(settings, name)
                default = option.default
                if isinstance(value, tuple):
                    default = tuple(
                        type(one)(part) for one, part in zip(value, str(default).split(","), strict=True)
                    )
                assert default == value, name


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["quality", "--ratios", "0.1,x"], "--ratios"),
        (["quality", "--ratios", "0"], "--ratios"),
        (["rag", "--ratios", "1.5"], "--ratios"),
        (["quality", "--methods", "guided,guess"], "guess"),
        (["rag", "--selectors", "random"], "--selectors"),
        (["quality", "--documents", "0"], "--documents"),
        (["rag", "--rounds", "0"], "--rounds"),
        (["rag", "--selector", "guided"], "--selector is what this benchmark compares"),
        (["quality", "--recompute-ratio", "0.1"], "leave it out"),
    ],
)
def test_bad_values_are_usage_errors(arguments: list[str], named: str) -> None:
    outcome = run(*arguments)
    assert outcome.exit_code == 2
    assert named in outcome.stderr


def test_a_missing_matplotlib_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda _name: None)
    for command in ("quality", "rag"):
        outcome = run(command, "--model", "no/such/model", "--out", str(tmp_path))
        assert outcome.exit_code == 1
        assert outcome.stderr.strip().startswith("error: plots need matplotlib")
        assert 'pip install "kvboost[bench]"' in outcome.stderr
        assert outcome.stderr.count("\n") == 1


def test_a_small_quality_run(tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", f"{tmp_path}-kept")  # the calibration
    outcome = run("quality", "--model", tiny_folder, *QUALITY, "--facts", "2", "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(outcome.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "quality-cpu.json").read_text())
    assert list(record["groups"]) == ["alone-2", "behind-2", "together-2"]
    assert all(group["reused_share"] > 0.5 for group in record["groups"].values())
    errors = {(r["method"], r["ratio"]): r["groups"]["overall"] for r in record["results"] if r["bits"] == 16}
    quantized = {r["bits"]: r["groups"]["overall"] for r in record["results"] if r["bits"] != 16}
    assert list(quantized) == [8, "k8v4", 4]
    assert all(
        row["recomputed_share"] == errors["guided", 0.1]["recomputed_share"] for row in quantized.values()
    )
    assert len(set(errors) - {("guided", budget["ratio"]) for budget in record["budgets"]}) >= 9
    assert len(record["budgets"]) == 3
    assert errors["all", None]["kl_mean"] < 1e-6 < errors["nothing", None]["kl_mean"]
    assert errors["nothing", None]["recomputed_share"] == 0
    assert errors["guided", 0.1]["recomputed_share"] == pytest.approx(0.1, abs=0.02)
    assert (record["facts"]["asked"], record["facts"]["answered"]) == (8, 0)  # a random model knows nothing
    assert {path.name for path in tmp_path.iterdir()} == {
        f"quality-cpu.{kind}" for kind in ("json", "svg", "png")
    }
    tables = [bench_quality.quality_table(record), bench_quality.groups_table(record)]
    tables.append(bench_quality.budgets_table(record))
    assert "…" not in shown(*tables, bench_view.targets_table(record["targets"]))
    assert bench_quality.facts_table(record) in outcome.stdout
    answered = {**record["facts"], "answered": 2}
    for row in answered["results"]:
        row.update(kept={"alone": 1, "together": 2}, kept_share={"alone": 0.5, "together": 1.0})
    assert "2 (100%)" in shown(bench_quality.facts_table({"facts": answered}))


def test_a_small_rag_run(tiny_folder: str, tmp_path: Path) -> None:
    outcome = run("rag", "--model", tiny_folder, *RAG, "--out", str(tmp_path), "--no-plot")
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(outcome.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "rag-cpu.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["rag-cpu.json"]
    assert len(record["contestants"]) == 6
    assert all(found["ttft_ms"]["count"] == 2 for found in record["contestants"].values())
    assert record["contestants"]["baseline"]["cached_share"] == 0
    assert record["wrong_guess"]["pairs"] == 2
    assert [turn["turn"] for turn in record["chat"]] == [1, 2]
    tables = [bench_rag.rag_table(record), bench_rag.chat_table(record)]
    assert "…" not in shown(*tables, bench_view.targets_table(record["targets"]))
    assert bench_rag.wrong_guess_line(record)[:40] in outcome.stdout


def test_only_json(tiny_folder: str) -> None:
    few = ["--pairs", "0", "--chats", "0", "--ratios", "0.10", "--selectors", "guided"]
    outcome = run("rag", "--model", tiny_folder, *RAG, *few, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(outcome.stdout)
    assert record["wrong_guess"] is record["chat"] is None
    assert list(record["contestants"]) == ["baseline", "prefix cache", "guided 10%"]
    assert "not measured" in bench_rag.wrong_guess_line(record)
    assert bench_rag.chat_table(record).row_count == 0
