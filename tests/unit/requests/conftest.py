"""A tokenizer and a reader of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.requests.prompts import PromptReader
from tests.unit.requests.reading import MakeTokenizer, reader_of


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: MakeTokenizer) -> Any:
    return make_tokenizer()


@pytest.fixture
def reader(tokenizer: Any) -> PromptReader:
    return reader_of(tokenizer)
