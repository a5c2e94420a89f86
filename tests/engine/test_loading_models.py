"""Loading by folder and by GGUF file, and what a changed adapter does to the namespace."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from kvboost import KVBoost
from kvboost.loading.embedded import find_gguf
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids, tiny_model


def test_a_local_folder(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with KVBoost.from_pretrained(str(tmp_path), chunk_size=16, device="cpu", dtype=torch.float32) as engine:
        prompt = random_ids(40, seed=1)
        engine.warm(prompt)
        result = engine.generate(prompt, max_new_tokens=5)
        assert result.cached_tokens == 39
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)[0, 40:].tolist()
        assert result.token_ids == expected


def test_an_encoder_decoder_folder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder-decoder"):
        KVBoost.from_pretrained(str(tmp_path))


@pytest.mark.slow
@pytest.mark.real_model
def test_a_gguf_file() -> None:
    gguf = find_gguf()
    with KVBoost.from_pretrained(str(gguf.parent), gguf_file=gguf.name, device="cpu") as engine:
        text = "The cat sat on the mat. " * 20
        engine.warm(text)
        result = engine.generate(text + "The cat", max_new_tokens=8)
        assert result.cached_tokens >= 120
        assert (
            result.token_ids == engine.generate(text + "The cat", max_new_tokens=8, mode="baseline").token_ids
        )


def _with_adapters() -> Any:
    model = tiny_model("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft on its own: nothing that a user of kvboost did
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, config, adapter_name="one")
        torch.manual_seed(2)
        adapted.add_adapter("two", config)
    return adapted.eval()


def test_an_adapter_loaded_switched_merged_or_switched_off_is_another_namespace(
    make_engine: MakeEngine,
) -> None:
    adapted = _with_adapters()
    engine = make_engine(model=adapted.get_base_model())
    prompt = random_ids(40, seed=3)

    def check_new(what: str) -> None:
        result = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
        assert result.cached_tokens == 0, what
        assert result.spans[0].reason == ("never stored" if what == "first" else "other namespace"), what
        assert engine.generate(prompt, max_new_tokens=4, mode="prefix_cache").cached_tokens == 39
        assert result.token_ids == engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids

    check_new("first")
    adapted.set_adapter("two")
    check_new("switched")
    adapted.set_adapter("one")
    assert engine.generate(prompt, max_new_tokens=4, mode="prefix_cache").cached_tokens == 39, "switched back"
    adapted.merge_adapter()
    check_new("merged")
    adapted.unmerge_adapter()
    with adapted.disable_adapter():
        check_new("switched off")
