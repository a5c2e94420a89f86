"""A tiny model in a folder, for commands that load one by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import tiny_model


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_folder(saved_model: Path) -> Iterator[str]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models lose more by waiting for a second core than they gain
    yield str(saved_model)
    torch.set_num_threads(num_threads)
