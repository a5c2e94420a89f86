"""Models and tokenizers by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig

from kvboost.errors import InvalidRequestError
from kvboost.loading.pretrained import load


@pytest.fixture(scope="module")
def folder(make_llama: Any, make_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_llama().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_a_folder_is_loaded_for_inference(folder: Path) -> None:
    model, tokenizer = load(str(folder), {})
    assert not model.training
    assert tokenizer("ab")["input_ids"] == [tokenizer.convert_tokens_to_ids("ab")]


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_dtype_is_honoured_under_both_names(folder: Path, name: str) -> None:
    model, _ = load(str(folder), {name: torch.bfloat16})
    assert model.dtype == torch.bfloat16


def test_remote_code_does_not_run_unasked(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "something-remote"
    config["auto_map"] = {
        "AutoConfig": "remote.RemoteConfig",
        "AutoModelForCausalLM": "remote.RemoteModel",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "remote.py").write_text("raise SystemExit('remote code ran')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(str(tmp_path), {})


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = BartConfig(architectures=["BartForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"BartForConditionalGeneration.*encoder-decoder"):
        load(str(tmp_path), {})
