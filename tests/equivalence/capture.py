"""Seeing the logits that a request decides by."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from kvboost import GenerationResult, KVBoost


class FirstLogits(LogitsProcessor):
    """Keeps the logits `[rows, vocab]` of the first step and changes nothing."""

    def __init__(self) -> None:
        self.logits: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        if self.logits is None:
            self.logits = scores.clone()
        return scores


def generate_with_logits(
    engine: KVBoost, prompt: Any, **options: Any
) -> tuple[GenerationResult, torch.Tensor]:
    first = FirstLogits()
    result = engine.generate(prompt, logits_processor=LogitsProcessorList([first]), **options)
    assert first.logits is not None
    return result, first.logits[0]
