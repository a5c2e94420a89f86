"""What the model itself answers, by its own generate as it stands, and whether a difference is a near tie.

Knows models and numbers, no kvboost.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from hypothesis.errors import HypothesisException

NEAR_TIE = 1e-4  # between the logits of two tokens, in float32
COARSE_TIE = 0.05  # of the largest logit, where the model computes in bfloat16
SCORE_TOLERANCE = 1e-3


@dataclass
class Tally:
    """What a run has done; `checks` are answers and scores that were compared, `hits` those with reuse."""

    examples: int = 0
    steps: int = 0
    changes: int = 0
    checks: int = 0
    hits: int = 0
    near_ties: int = 0
    only_later: int = 0  # answers that are no one's to compare: the model changed meanwhile, or draws lots
    stock_fails: int = 0  # the model's own generate fails with these settings
    refused: int = 0
    started_at: float = field(default_factory=time.monotonic)
    failed_after_s: float | None = None
    failed_steps: list[Any] = field(default_factory=list)

    def summary(self) -> dict[str, int]:
        """The counts."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, int)}

    def note_failure(self, error: BaseException | None, steps: list[Any]) -> None:
        """Remember the first failure, and when it was met."""
        is_failure = isinstance(error, Exception) and not isinstance(error, HypothesisException)
        if is_failure and self.failed_after_s is None:
            self.failed_after_s = time.monotonic() - self.started_at
            self.failed_steps = steps


@dataclass(frozen=True)
class Stock:
    """The model's own answer, or why there is none."""

    token_ids: list[int]
    error: Exception | None = None


def device_of(model: Any) -> torch.device:
    device: torch.device = model.get_input_embeddings().weight.device
    return device


def generate(model: Any, ids: list[int], new_tokens: int, **options: Any) -> Any:
    """The model's own greedy `generate`, with its own generation config and what is ambient."""
    input_ids = torch.tensor([ids], device=device_of(model))
    return model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        **options,
    )


def answer(model: Any, ids: list[int], new_tokens: int, **options: Any) -> Stock:
    """The new tokens, or the exception that stock transformers raises with these settings."""
    try:
        output = generate(model, ids, new_tokens, **options)
    except Exception as error:  # whatever stock does not support: there is nothing to compare with
        return Stock([], error)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    return Stock(sequences[0, len(ids) :].tolist())


def is_near_tie(
    model: Any, ids: list[int], wanted: list[int], given: list[int], new_tokens: int, **options: Any
) -> bool:
    """Whether `given` leaves the model's own answer `wanted` where its two best tokens are near equal."""
    options = {**options, "output_scores": True, "return_dict_in_generate": True}
    output = generate(model, ids, new_tokens, **options)
    if output.sequences[0, len(ids) :].tolist() != wanted:
        raise AssertionError("the model's own answer changed while it was looked at")
    if getattr(output, "sequences_scores", None) is not None:
        return _is_beam_tie(model, ids, given, new_tokens, options)
    at = next((i for i, (a, b) in enumerate(zip(wanted, given, strict=False)) if a != b), None)
    if at is None:  # one is the beginning of the other: no tie does that
        return False
    scores = output.scores[at][0].float()
    return is_close(model, scores, wanted[at], given[at])


def is_close(model: Any, logits: torch.Tensor, wanted: int, given: int) -> bool:
    """Whether two tokens are as good as equal by `logits` `[vocab]`."""
    gap = float(logits[wanted] - logits[given])
    return math.isfinite(gap) and abs(gap) <= tolerance(model, logits)


def tolerance(model: Any, logits: torch.Tensor) -> float:
    """How far apart two logits may be that different ways to compute would exchange."""
    if is_coarse(model):
        return COARSE_TIE * float(logits[logits.isfinite()].abs().max())
    return NEAR_TIE


def is_coarse(model: Any) -> bool:
    """Whether the model computes in bfloat16 somewhere."""
    low = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
    return low or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _is_beam_tie(
    model: Any, ids: list[int], given: list[int], new_tokens: int, options: dict[str, Any]
) -> bool:
    output = generate(model, ids, new_tokens, **{**options, "num_return_sequences": 2})
    best, second = output.sequences_scores.tolist()[:2]
    other = output.sequences[1, len(ids) :].tolist()[: len(given)]
    bound = COARSE_TIE if is_coarse(model) else NEAR_TIE
    return abs(best - second) <= bound and other == given


def next_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits `[vocab]` of the token behind `ids`, by one plain forward."""
    with torch.no_grad():
        return (
            model(input_ids=torch.tensor([ids], device=device_of(model)), use_cache=False)
            .logits[0, -1]
            .float()
        )


def log_likelihoods(model: Any, prompt: list[int], continuation: list[int]) -> list[float]:
    """Of each token of `continuation` behind `prompt`, by one plain forward."""
    with torch.no_grad():
        ids = torch.tensor([(prompt + continuation)[:-1]], device=device_of(model))
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    chosen = torch.tensor(continuation, device=logits.device)[:, None]
    return logits.log_softmax(-1).gather(-1, chosen)[:, 0].tolist()
