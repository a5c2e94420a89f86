"""Requests that were checked and not run, for schedulers and workers."""

from __future__ import annotations

from typing import Any

from kvboost import KVBoost
from kvboost.requests.prompts import Prompt
from kvboost.requests.request import Arguments, Request


def read_request(
    engine: KVBoost,
    prompt: Prompt,
    max_new_tokens: int = 64,
    mode: str = "prefix_cache",
    *,
    cache_salt: str | None = None,
    seed: int | None = None,
    **options: Any,
) -> Request:
    """What `engine.generate` would run, but exact reuse is the default."""
    arguments = Arguments(max_new_tokens, mode, 1.0, False, cache_salt, seed, options)
    return engine.core.read(prompt, arguments)
