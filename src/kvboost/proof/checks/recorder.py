"""A logits processor that keeps what a generation computes. Knows transformers, no engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor


class Recorder(LogitsProcessor):
    """Keeps the logits `[vocab]` of every step; with `path`, makes generation go along it."""

    def __init__(self, path: Sequence[int] | None = None) -> None:
        self.logits: list[torch.Tensor] = []
        self._path = path

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self.logits.append(scores[0].float().cpu().clone())
        if self._path is None or len(self.logits) > len(self._path):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._path[len(self.logits) - 1]] = 0.0
        return forced
