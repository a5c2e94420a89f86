"""English text that every Python has, cut into prompts."""

from __future__ import annotations

import random
from functools import cache
from pydoc_data.topics import topics
from typing import Any


@cache
def corpus() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def corpus_ids(tokenizer: Any, count: int, seed: int) -> list[int]:
    """`count` tokens from a random place of the corpus."""
    text = corpus()
    start = random.Random(seed).randrange(len(text) - count * 8)
    end = start + count * 8 + 400  # a short piece may be mostly spaces
    ids: list[int] = tokenizer(text[start:end], add_special_tokens=False, verbose=False)["input_ids"]
    assert len(ids) >= count
    return ids[:count]
