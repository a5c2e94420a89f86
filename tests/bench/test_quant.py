"""`kvboost bench quant`: what is measured, that a verdict can be bad, and a small real run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from benchmarks.suite import plots, quant
from benchmarks.suite.commands import quant as bench_quant
from benchmarks.suite.quant import NAIVE, VARIANTS, QuantSettings, quantize_in_place
from kvboost.cli import bench_view
from kvboost.cli.main import main
from kvboost.errors import InvalidRequestError
from kvboost.kv.arena import Arena
from kvboost.kv.codec import KVCodec
from kvboost.kv.layout import probe_layout
from kvboost.kv.rope import learn_rotation
from tests.tiny_models import tiny_model

SMALL = ["--prompts", "3", "--cached-tokens", "800", "1800", "--continuation", "4", "--chunk-size", "32"]
SMALL += ["--ttft-tokens", "128", "--rounds", "2"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", "quant", *arguments])


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.bits is not None], ids=lambda v: v.name)
def test_the_engines_widths_are_measured_as_the_engine_stores_them(variant: Any) -> None:
    layout = probe_layout(tiny_model("llama"))
    arena = Arena(layout, 100)
    for slab in arena.slabs:
        slab.normal_(generator=torch.Generator().manual_seed(3))
    stored = Arena(layout, 100)
    codec = KVCodec(layout, variant.bits)
    for start, end in ((0, 32), (32, 64), (64, 90)):
        codec.encode(arena.between(start, end)).place(stored, start, 0, end - start)
    before = [slab.clone() for slab in arena.slabs]
    quantize_in_place(arena, layout, 90, 32, variant, "no rotation needed")
    for mine, engines, original in zip(arena.slabs, stored.slabs, before, strict=True):
        torch.testing.assert_close(mine[:, :, :90], engines[:, :, :90], rtol=0, atol=1e-6)
        assert torch.equal(mine[:, :, 90:], original[:, :, 90:])
        assert not torch.equal(mine, original)


def test_keys_are_turned_back_and_forth() -> None:
    """Before rotation: the same keys at other positions get the same codes, and come back to their places."""
    model = tiny_model("llama")
    layout = probe_layout(model)
    rotation = learn_rotation(model, layout)
    variant = next(v for v in VARIANTS if v.name == "8, keys before rotation")
    arena = Arena(layout, 64)
    for slab in arena.slabs:
        slab.normal_(generator=torch.Generator().manual_seed(4))
    before = [slab.clone() for slab in arena.slabs]
    quantize_in_place(arena, layout, 64, 32, variant, rotation)
    for mine, original in zip(arena.slabs, before, strict=True):
        error = (mine - original).norm() / original.norm()
        assert 0 < error < 0.02


@pytest.mark.timed  # a starved machine moves 0.00 GB/s
def test_a_small_run(tiny_folder: str, tmp_path: Path) -> None:
    outcome = run("--model", tiny_folder, *SMALL, "--out", str(tmp_path))
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(outcome.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "quant-cpu.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {
        f"quant-cpu.{kind}" for kind in ("json", "svg", "png")
    }
    assert list(record["errors"]) == [variant.name for variant in VARIANTS]
    assert len(record["prompts"]) == 3
    assert all(800 <= prompt["cached_tokens"] <= 1800 for prompt in record["prompts"])
    assert record["errors"]["8"]["kl_mean"] < record["errors"][NAIVE]["kl_mean"]
    assert list(record["widths"]) == ["16", "8", "4", "k8v4"]
    assert record["widths"]["16"]["ttft_ratio"] == 1
    assert all(width["ttft_ms"]["count"] == 2 for width in record["widths"].values())
    assert all(width["load_gb_s"] > 0 < width["store_gb_s"] for width in record["widths"].values())
    text = io.StringIO()
    console = Console(file=text, width=80)
    for table in (bench_quant.widths_table(record), bench_quant.errors_table(record)):
        console.print(table)
    console.print(bench_view.targets_table(record["targets"]))
    assert "…" not in text.getvalue()
    first = (tmp_path / "quant-cpu.svg").read_text()
    plots.plot_bytes(record, tmp_path)
    assert (tmp_path / "quant-cpu.svg").read_text() == first


def test_only_json(tiny_folder: str) -> None:
    outcome = run("--model", tiny_folder, *SMALL, "--json")
    assert json.loads(outcome.stdout)["benchmark"] == "quant"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--kv-cache-bits", "8"], "--kv-cache-bits"), (["--max-chunks", "3"], "--max-chunks")],
)
def test_what_is_compared_is_no_option(tiny_folder: str, arguments: list[str], named: str) -> None:
    outcome = run("--model", tiny_folder, *SMALL, *arguments)
    assert outcome.exit_code == 2
    assert named in outcome.stderr


@pytest.mark.parametrize(("least", "most"), [(10, 400), (300, 400)])
def test_bad_ranges_are_refused(least: int, most: int) -> None:
    with pytest.raises(InvalidRequestError, match="cached tokens must go"):
        QuantSettings(least=least, most=most).check()


def verdicts(**changes: Any) -> dict[str, bool]:
    errors = {name: {"kl_mean": 1e-5, "agreement": 1.0} for name in ("8", "k8v4", "4")}
    errors |= {NAIVE: {"kl_mean": 1e-4}, "4, no Hadamard": {"kl_mean": 5e-5}}
    widths = {bits: {"bytes_of_float16": 0.3, "ttft_ratio": 1.1} for bits in ("16", "8", "4", "k8v4")}
    for name, (of, field, value) in changes.items():
        {"errors": errors, "widths": widths}[of][name.removeprefix("b")][field] = value
    return {target["name"]: target["met"] for target in quant.targets(errors, widths)}


def test_verdicts_can_be_good_and_bad() -> None:
    assert all(verdicts().values())
    assert not verdicts(b8=("errors", "kl_mean", 0.001))["mean KL, 8"]
    assert not verdicts(b8=("errors", "agreement", 0.98))["same top token, 8"]
    assert not verdicts(k8v4=("errors", "kl_mean", 0.004))["mean KL, k8v4"]
    assert not verdicts(b4=("errors", "kl_mean", 5e-5))["mean KL, 4 / a step per token"]
    assert not verdicts(b4=("errors", "kl_mean", 6e-5))["mean KL, 4 / best other way of 4 bits"]
    assert not verdicts(b4=("widths", "ttft_ratio", 1.4))["time to the first token, 4 / 16"]
    assert not verdicts(b8=("widths", "bytes_of_float16", 0.56))["bytes of float16, 8"]
