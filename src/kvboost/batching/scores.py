"""The log-likelihoods of a continuation's tokens, gathered as the logits for them come in."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvboost.models import ScoreResult, Span
from kvboost.requests.request import ScoreRequest


class Scores:
    """The scores of one request so far; `decode` gives the text of its continuation."""

    def __init__(self, request: ScoreRequest, decode: Callable[[list[int]], str]) -> None:
        self._request = request
        self._decode = decode
        self._values: list[float] = []
        self._is_greedy = True

    def add(self, position: int, logits: torch.Tensor) -> None:
        """Take logits `[n, vocab]` of the tokens from `position` on; those of the prompt are skipped."""
        skipped = max(0, self._request.limit - position)
        if skipped >= len(logits):
            return
        scores = logits[skipped:].float().log_softmax(-1)
        done = len(self._values)
        targets = self._request.continuation[done : done + len(scores)]
        chosen = torch.tensor(targets, device=scores.device).unsqueeze(-1)
        self._values += scores.gather(-1, chosen).squeeze(-1).tolist()
        self._is_greedy &= scores.argmax(-1).tolist() == targets

    def result(self, spans: tuple[Span, ...]) -> ScoreResult:
        """The score, with the origin of the prompt's tokens."""
        text = self._decode(self._request.continuation)
        return self._request.scored(self._values, self._is_greedy, spans, text)
