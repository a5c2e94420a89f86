"""The stopping criterion that ends an answer at a stop text. Knows tokens and a tokenizer, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

_LOOK_BACK = 2  # a stop text may have more tokens inside an answer than it has alone


class StopText(StoppingCriteria):  # type: ignore[misc, unused-ignore]
    """Ends an answer that has one of `stops` in it; stop texts in the prompt do not count.

    It sees sequences and is not told where their prompts end. It recognizes a sequence by the tokens before
    its newest; if two prompts are possible, it takes the longer one. So it may stop late, never early, and
    text behind a stop text is cut off anyway.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompts: Sequence[Sequence[int]]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        encoded = [tokenizer(stop, add_special_tokens=False)["input_ids"] for stop in self._stops]
        self._window = max(map(len, encoded), default=0) + _LOOK_BACK
        self._prompt_tokens: dict[int, int] = {}  # by the hash of a sequence so far
        for prompt in prompts:
            self._note(torch.tensor(prompt), len(prompt))

    def _note(self, sequence: torch.Tensor, prompt_tokens: int) -> None:
        key = _hash(sequence)
        self._prompt_tokens[key] = max(prompt_tokens, self._prompt_tokens.get(key, 0))

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:
        ended = [self._has_ended(sequence) for sequence in input_ids.cpu()]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)

    def _has_ended(self, sequence: torch.Tensor) -> bool:
        prompt_tokens = self._prompt_tokens.get(_hash(sequence[:-1]))
        if prompt_tokens is None:
            return False
        self._note(sequence, prompt_tokens)
        latest = sequence[max(prompt_tokens, len(sequence) - self._window) :]
        text = self._tokenizer.decode(latest.tolist())
        return any(stop in text for stop in self._stops)


def _hash(sequence: torch.Tensor) -> int:
    return hash(sequence.numpy().tobytes())
