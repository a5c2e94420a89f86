"""Timing of one answer from outside, the same way for everybody, and the spread of several.

The clock starts at the call. A stopping criterion notes when each token is there, so nothing
that is measured has to be trusted to report its own times. Knows no engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class Stamps:
    """A stopping criterion that never stops and notes the time of every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class Answer:
    """What a contestant hands back: the new tokens, and how many prompt tokens it did not compute."""

    token_ids: list[int]
    reused_tokens: int = 0


@dataclass(frozen=True)
class TimedAnswer:
    """An answer with its times. Decoding is counted from the first token to the last."""

    answer: Answer
    ttft_ms: float
    decode_tokens_per_s: float | None


def timed(call: Callable[[Stamps], Answer]) -> TimedAnswer:
    """Run `call`, which passes the stamps on as a stopping criterion; earlier work is waited for first."""
    stamps = Stamps()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    answer = call(stamps)
    times = stamps.times
    decoding_s = times[-1] - times[0]
    return TimedAnswer(
        answer,
        ttft_ms=(times[0] - started) * 1e3,
        decode_tokens_per_s=(len(times) - 1) / decoding_s if decoding_s > 0 else None,
    )


@dataclass(frozen=True)
class Spread:
    """The middle of several measurements, and how far they lie apart."""

    median: float
    low: float
    quartile_1: float
    quartile_3: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value, rounded to hundredths."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3
    return Spread(
        median=round(statistics.median(values), 2),
        low=round(min(values), 2),
        quartile_1=round(quartiles[0], 2),
        quartile_3=round(quartiles[2], 2),
        high=round(max(values), 2),
        count=len(values),
    )
