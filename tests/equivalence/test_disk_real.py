"""A disk cache with the built-in model: another process answers from it in BASELINE's words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.choices import Origin
from tests.texts import corpus_ids

pytestmark = [pytest.mark.real_model]
ASK = """
import json, sys
from kvboost import KVBoost
folder, prompt = sys.argv[1], json.loads(sys.argv[2])
with KVBoost.from_pretrained("builtin", disk_cache_dir=folder, disk_cache_bytes=200_000_000) as engine:
    result = engine.generate(prompt, max_new_tokens=12, mode="prefix_cache")
    print(json.dumps([result.cached_tokens, result.token_ids]))
"""


def disk_engine(real: KVBoost, folder: Path, **options: Any) -> KVBoost:
    return KVBoost(real.model, real.tokenizer, disk_cache_dir=folder, disk_cache_bytes=200_000_000, **options)


def test_another_process_answers_from_disk_as_baseline_does(real: KVBoost, tmp_path: Path) -> None:
    text = corpus_ids(real.tokenizer, 700, seed=91)
    with disk_engine(real, tmp_path, max_chunks=6) as engine:
        engine.warm(text[:600])
        engine.warm(corpus_ids(real.tokenizer, 600, seed=90))  # RAM has no room for both
        expected = engine.generate(text, max_new_tokens=12, mode="baseline").token_ids
    outcome = subprocess.run(
        [sys.executable, "-c", ASK, str(tmp_path), json.dumps(text)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert json.loads(outcome.stdout.splitlines()[-1]) == [600, expected]


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("bits", [16, 8])
def test_moved_text_is_found_on_disk(real: KVBoost, tmp_path: Path, bits: int) -> None:
    documents = [corpus_ids(real.tokenizer, 600, seed=92 + number) for number in range(2)]
    question = corpus_ids(real.tokenizer, 20, seed=95)
    with disk_engine(real, tmp_path, kv_cache_bits=bits) as engine:
        for document in documents:
            engine.warm(document)
    with disk_engine(real, tmp_path, kv_cache_bits=bits) as engine:
        assert engine.cache_stats()["chunks"] == 0
        prompt = [*documents[1], *documents[0], *question]
        result = engine.generate(prompt, max_new_tokens=8)
        assert result.cached_tokens >= 1_190
        assert {span.origin for span in result.spans} == set(Origin)
        assert engine.cache_stats()["chunks_on_disk_only"] == 0  # they came back to RAM
