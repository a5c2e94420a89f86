"""How tokens are chosen for a request, in transformers' terms: sampling, penalties, log-probabilities.

Knows the fields of a request and logits; the server's other parts know no transformers.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from kvboost.requests.request import Arguments

LEAST_TEMPERATURE = 1e-5  # below it, decoding is greedy
_LEAST_TOP_P = 1e-6
_MAX_SEED = 2**63
_LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity
# Neutral values for what a model's generation_config may narrow sampling by: only the request decides. None
# would mean the model's own value.
_NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}


class SamplingFields(Protocol):
    """The fields of a request that say how tokens are chosen."""

    temperature: float | None
    top_p: float | None
    seed: int | None
    frequency_penalty: float | None
    presence_penalty: float | None


@dataclass(frozen=True)
class TokenScore:
    """A token with its log-probability, and the likeliest tokens in its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def sampling_arguments(
    fields: SamplingFields, index: int, prompt_tokens: int, recorder: LogprobRecorder | None
) -> Arguments:
    """How choice number `index` is sampled; with a seed it draws from seed + index."""
    options: dict[str, Any] = {"num_beams": 1}
    temperature = 1.0 if fields.temperature is None else fields.temperature
    do_sample = temperature >= LEAST_TEMPERATURE
    if do_sample:
        options |= _NEUTRAL
        options["top_p"] = 1.0 if fields.top_p is None else max(fields.top_p, _LEAST_TOP_P)
    processors: list[LogitsProcessor] = [] if recorder is None else [recorder]
    frequency, presence = fields.frequency_penalty or 0.0, fields.presence_penalty or 0.0
    if frequency or presence:
        processors.append(RepeatPenalties(prompt_tokens, frequency, presence))
    if processors:
        options["logits_processor"] = LogitsProcessorList(processors)
    if not do_sample:
        return Arguments(options=options)
    seed = _seed(fields.seed, index)
    return Arguments(temperature=temperature, do_sample=True, seed=seed, options=options)


def _seed(seed: int | None, index: int) -> int:
    return secrets.randbelow(_MAX_SEED) if seed is None else (seed + index) % _MAX_SEED


class LogprobRecorder(LogitsProcessor):
    """Notes the model's own distribution at each step, before penalties, temperature and top_p.

    The model's thread notes a step before it hands out the token; the event loop takes it afterwards.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._steps: deque[tuple[torch.Tensor, list[tuple[int, float]]]] = deque()

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note `scores` `[1, vocab]`, and leave them as they are."""
        logprobs = scores[0].float().log_softmax(-1).cpu()
        best = logprobs.topk(min(self._top, len(logprobs)))
        top = list(zip(best.indices.tolist(), map(_finite, best.values.tolist()), strict=True))
        self._steps.append((logprobs, top))
        return scores

    def take(self, token: int) -> TokenScore:
        """The next step, in which `token` was chosen."""
        logprobs, top = self._steps.popleft()
        return TokenScore(token, _finite(float(logprobs[token])), tuple(top))


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


class RepeatPenalties(LogitsProcessor):
    """Lowers the scores of tokens that were generated before: by `frequency` each time, `presence` once."""

    def __init__(self, prompt_tokens: int, frequency: float, presence: float) -> None:
        self._seen = prompt_tokens  # the prompt's own tokens do not count
        self._frequency = frequency
        self._presence = presence
        self._known: set[int] = set()
        self._penalties: torch.Tensor | None = None  # [vocab]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` `[1, vocab]` less the penalties for `input_ids` `[1, tokens]`."""
        if self._penalties is None:
            self._penalties = torch.zeros(scores.shape[-1], device=scores.device)
        for token in input_ids[0, self._seen :].tolist():
            self._penalties[token] += self._frequency + (0.0 if token in self._known else self._presence)
            self._known.add(token)
        self._seen = input_ids.shape[1]
        return scores - self._penalties
