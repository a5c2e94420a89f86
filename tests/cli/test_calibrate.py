"""`kvboost calibrate`: measures once, keeps it, and says which ratio holds the bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvboost.cli.main import main
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("calibrated")
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def test_the_bound_is_for_the_verdict_and_no_engine_option(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    options = ["--prompts", "4", "--max-kl", "9", "--json"]
    outcome = CliRunner().invoke(main, ["calibrate", folder, *options])
    assert outcome.exit_code == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert found["max_kl"] == 9
    assert found["recompute_ratio"] == 0.05
    assert Path(found["file"]).is_file()
    assert Path(found["file"]).is_relative_to(tmp_path)


def test_too_small_a_model_is_one_line(tmp_path: Path) -> None:
    tiny_model("llama", max_position_embeddings=256).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    outcome = CliRunner().invoke(main, ["calibrate", str(tmp_path)])
    assert outcome.exit_code == 1
    assert "at least 800 positions, this one has 256" in " ".join(outcome.stderr.split())
    assert "Traceback" not in outcome.stderr
