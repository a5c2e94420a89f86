"""Those in `bench peers` that run in the benchmark's own process: Hugging Face, and kvboost in several ways.

Knows how one prompt is answered and timed, not which prompts there are.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from benchmarks.suite.peer_process import Turn
from kvboost.bench.contestants import Answer, Contestant, Stamps, engine_answer, noting_logits, timed
from kvboost.engine import InferenceEngine
from kvboost.proof.fresh_engine import fresh_engine


class Local:
    """A contestant in this process."""

    def __init__(self, contestant: Contestant, model: Any) -> None:
        self.name = contestant.name
        self._contestant = contestant
        self._model = model

    def turn(self, prompt: list[int], new_tokens: int, *, distribution: bool = False) -> Turn:
        self._contestant.settle()
        seen: list[torch.Tensor] = []

        def call(stamps: Stamps) -> Answer:
            watched = noting_logits(self._model, stamps, seen) if distribution else contextlib.nullcontext()
            with watched:
                return self._contestant.answer(prompt, new_tokens, stamps)

        done = timed(call)
        return Turn(
            done.ttft_ms,
            done.decode_tokens_per_s,
            done.answer.token_ids,
            reused_tokens=done.answer.reused_tokens,
            logits=seen[-1] if seen else None,
        )


class Reordering:
    """kvboost with approximate reuse: documents are found wherever they stand."""

    def __init__(self, engine: InferenceEngine, selector: str, ratio: float) -> None:
        self.name = f"{selector} {ratio:.0%}"
        self.about = {"label": f"kvboost, {self.name}", "selector": selector, "ratio": ratio}
        self._engine = fresh_engine(
            engine,
            recompute_strategy="cacheblend",
            selector=selector,
            recompute_ratio=ratio,
            max_kl=None,
            min_facts=None,
        )

    def warm(self, document: list[int]) -> None:
        self._engine.warm(document)

    def settle(self) -> None:
        """Nothing to do."""

    def answer(self, token_ids: list[int], new_tokens: int, stamps: Stamps) -> Answer:
        return engine_answer(self._engine, token_ids, new_tokens, stamps, mode="chunk_kv_reuse")
