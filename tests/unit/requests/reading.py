"""Reading prompts in tests: a reader, ids by their tokens, messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvboost.requests.prompts import PromptReader

MakeTokenizer = Callable[..., Any]
USER = {"role": "user", "content": "say ab"}


def reader_of(tokenizer: Any) -> PromptReader:
    return PromptReader(tokenizer, len(tokenizer))


def ids_of(tokenizer: Any, *tokens: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def read(reader: PromptReader, prompt: Any, **options: Any) -> list[int]:
    result = reader.read(prompt, **options)
    assert result.token_ids.dtype == np.int64
    assert len(result) == len(result.token_ids) > 0
    return list(result.token_ids)


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
