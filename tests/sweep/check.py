"""One model type: is kvboost exact on a tiny model of it, does it refuse it with a reason, or neither?

`python -m tests.sweep.check TYPE ...` prints one line of JSON per type. Exact means: greedy answers equal to
the model's own `generate`, cold, with a shared prefix, and in batches; scores equal to a plain forward.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from kvboost import KVBoost
from kvboost.errors import UnsupportedModelError
from tests.sweep.tiny_configs import build, class_name
from tests.tiny_models import random_ids, tiny_tokenizer

EXACT, NOT_STRICT, REFUSED = "exact", "exact with strict=False", "refused"
UNBUILDABLE, WRONG, ERROR = "cannot be built", "wrong", "raw error"
NEW_TOKENS = 8
SHARED = 30
# With the shared start, prompts of 33 to 190 tokens: on both sides of the window of 40.
TAILS = (3, 6, 9, 13, 40, 95, 160)
NEAR_TIE = 1e-4
SCORE_TOLERANCE = 1e-3


@dataclass
class Outcome:
    """What became of one model type; `rows`: whether batches ran as rows of one forward."""

    model_type: str
    model_class: str
    outcome: str
    reason: str = ""
    rows: bool = False
    ties: int = 0
    seconds: float = 0.0


class _Wrong(Exception):  # noqa: N818  # a finding
    """kvboost gave something else than the model itself."""


def check(model_type: str) -> Outcome:
    """Build a tiny model of this type and compare kvboost with the model itself."""
    started = time.perf_counter()
    outcome = Outcome(model_type, class_name(model_type), EXACT)
    try:
        model = build(model_type)
        _plain_forward(model, random_ids(12, 1))
    except Exception as error:
        outcome.outcome, outcome.reason = UNBUILDABLE, _in_words(error)
    else:
        _check_model(model, outcome)
    outcome.seconds = round(time.perf_counter() - started, 1)
    return outcome


def _check_model(model: Any, outcome: Outcome) -> None:
    refusals = []
    try:
        for strict in (True, False):
            try:
                engine = KVBoost(model, tiny_tokenizer(), chunk_size=16, max_chunks=None, strict=strict)
                break
            except UnsupportedModelError as error:
                refusals.append(str(error))
        else:
            outcome.outcome, outcome.reason = REFUSED, refusals[-1]
            return
        if refusals:
            outcome.outcome, outcome.reason = NOT_STRICT, refusals[0]
        with engine:
            outcome.rows = not engine.why_not_packed
            _compare(model, engine, outcome)
            engine.cache_manager.check_integrity()
    except _Wrong as finding:
        outcome.outcome, outcome.reason = WRONG, str(finding)
    except Exception as error:
        outcome.outcome, outcome.reason = ERROR, _in_words(error)


def _compare(model: Any, engine: KVBoost, outcome: Outcome) -> None:
    start = random_ids(SHARED, 1)
    prompts = [start + random_ids(tail, 10 + tail) for tail in TAILS]
    expected = [_greedy(model, prompt) for prompt in prompts]
    for number, (prompt, (answer, sure)) in enumerate(zip(prompts, expected, strict=True)):
        outcome.ties += sure < len(answer)
        # the first is cold, the others find the shared start; then each finds all but its last token
        for again in (False, True):
            result = engine.generate(prompt, max_new_tokens=NEW_TOKENS, mode="prefix_cache")
            if result.token_ids[:sure] != answer[:sure]:
                raise _Wrong(
                    f"generate, prompt of {len(prompt)} tokens, {result.cached_tokens} of them reused"
                )
            if (number or again) and not result.cached_tokens:
                raise _Wrong(f"a prompt of {len(prompt)} tokens reused nothing")
    _compare_batches(model, engine, prompts, expected)


def _compare_batches(
    model: Any, engine: KVBoost, prompts: list[list[int]], expected: list[tuple[list[int], int]]
) -> None:
    engine.clear()
    for state in ("cold", "warm"):
        results = engine.generate_batch(prompts, max_new_tokens=NEW_TOKENS)
        for prompt, result, (answer, sure) in zip(prompts, results, expected, strict=True):
            if result.token_ids[:sure] != answer[:sure]:
                raise _Wrong(f"generate_batch, {state}, prompt of {len(prompt)} tokens")
    engine.clear()
    continuations = [random_ids(4, 100 + tail) for tail in TAILS]
    wanted = [
        _log_likelihoods(model, prompt, continuation)
        for prompt, continuation in zip(prompts, continuations, strict=True)
    ]
    for state in ("cold", "warm"):
        scores = engine.score(prompts, continuations)
        for prompt, score, values in zip(prompts, scores, wanted, strict=True):
            difference = (torch.tensor(score.token_log_likelihoods) - values).abs().max()
            if not float(difference) <= SCORE_TOLERANCE:
                raise _Wrong(
                    f"score, {state}, prompt of {len(prompt)} tokens: off by {float(difference):.2g}"
                )


def _plain_forward(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits `[tokens, vocab]` of the model itself, without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
    return logits


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], int]:
    """The model's own answer, and how many of its tokens come before the first near tie."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=2,
    )
    answer = output.sequences[0, len(prompt) :].tolist()
    for number, logits in enumerate(output.logits):
        highest = logits[0].float().topk(2).values
        if float(highest[0] - highest[1]) <= NEAR_TIE:
            return answer, number
    return answer, len(answer)


def _log_likelihoods(model: Any, prompt: list[int], continuation: list[int]) -> torch.Tensor:
    """Of each token of `continuation` `[n]`, by one plain forward."""
    logits = _plain_forward(model, (prompt + continuation)[:-1])[len(prompt) - 1 :]
    return logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None])[:, 0]


def _in_words(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main(types: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for model_type in types:
        sys.stdout.write(json.dumps(dataclasses.asdict(check(model_type))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
