"""A tiny model in a folder, for commands that load one by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
