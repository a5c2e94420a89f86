"""Batches on the built-in model: a sample in `make test`, the full counts in `make proof`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvboost import GenerationResult, KVBoost
from kvboost.choices import Origin
from tests.equivalence.proofs import write_result
from tests.forwards import count_fed
from tests.texts import corpus_ids

pytestmark = [pytest.mark.real_model, pytest.mark.exactness]


@dataclass
class RowCase:
    prompt_tokens: int
    cached_tokens: int
    same_tokens: bool


def _ragged(engine: KVBoost, count: int, shared: int, seed: int = 0) -> list[list[int]]:
    """Prompts with one start and tails of 5 to 200 tokens."""
    draw = random.Random(seed)
    start = corpus_ids(engine.tokenizer, shared, seed)
    return [
        start + corpus_ids(engine.tokenizer, draw.randint(5, 200), 1_000 * seed + 100 + i)
        for i in range(count)
    ]


def _compared(
    engine: KVBoost, prompts: list[list[int]], results: list[GenerationResult], new_tokens: int
) -> list[RowCase]:
    cases = []
    for prompt, result in zip(prompts, results, strict=True):
        expected = engine.generate(prompt, new_tokens, mode="baseline")
        cases.append(RowCase(len(prompt), result.cached_tokens, result.token_ids == expected.token_ids))
    assert all(case.same_tokens for case in cases), [
        i for i, case in enumerate(cases) if not case.same_tokens
    ]
    return cases


def _live(results: list[GenerationResult]) -> int:
    return sum(span.length for result in results for span in result.spans if span.origin is Origin.LIVE)


def test_rows_equal_baseline(real: KVBoost) -> None:
    prompts = _ragged(real, 6, 400)
    results = real.generate_batch(prompts, max_new_tokens=16)
    _compared(real, prompts, results, 16)
    assert _live(results) <= 400 + sum(len(prompt) - 400 for prompt in prompts)
    warm = real.generate_batch(prompts, max_new_tokens=16)
    assert [result.token_ids for result in warm] == [result.token_ids for result in results]
    assert all(result.cached_tokens == result.prompt_tokens - 1 for result in warm)


@pytest.mark.slow
def test_rows_equal_baseline_full(real: KVBoost) -> None:
    """64 prompts with 2,000 shared tokens, cold and then with the prefix in the cache."""
    prompts = _ragged(real, 64, 2_000)
    results = real.generate_batch(prompts, max_new_tokens=32)
    cases = _compared(real, prompts, results, 32)
    live = _live(results)
    assert live <= 2_000 + sum(len(prompt) - 2_000 for prompt in prompts)
    real.clear()
    real.warm(prompts[0][:2_000])
    warm = real.generate_batch(prompts, max_new_tokens=32)
    assert [result.token_ids for result in warm] == [result.token_ids for result in results]
    summary = {"prompts": 64, "shared_tokens": 2_000, "new_tokens": 32}
    summary |= {"same_tokens": sum(case.same_tokens for case in cases), "computed_tokens": live}
    write_result("proof-batch", summary, cases)


def _families(engine: KVBoost, count: int, loners: int, duplicates: int, shared: int) -> list[list[int]]:
    draw = random.Random(count)
    starts = [corpus_ids(engine.tokenizer, shared, 300 + i) for i in range(6)]
    prompts = [
        starts[i % 6] + corpus_ids(engine.tokenizer, draw.randint(5, 40), 400 + i) for i in range(count)
    ]
    prompts += [corpus_ids(engine.tokenizer, draw.randint(20, 60), 900 + i) for i in range(loners)]
    prompts += [draw.choice(prompts) for _ in range(duplicates)]
    draw.shuffle(prompts)
    return prompts


@pytest.mark.slow
def test_thirty_mixed_prompts(real: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 families, loners, duplicates: order kept, equal to BASELINE, each family's prefix computed once."""
    prompts = _families(real, 24, 3, 3, shared=120)
    assert len(prompts) == 30
    fed = count_fed(monkeypatch, real.model)
    try:
        results = real.generate_many(prompts, max_new_tokens=8)
    finally:
        monkeypatch.undo()
    _compared(real, prompts, results, 8)
    starts = {tuple(prompt[:120]) for prompt in prompts if len(prompt) > 120}
    own = sum(len(p) - 120 if tuple(p[:120]) in starts else len(p) for p in prompts)
    assert len(starts) == 6
    assert _live(results) <= 6 * 120 + own
    assert sum(fed) == _live(results) + sum(len(result.token_ids) - 1 for result in results)


def test_scores_equal_a_plain_forward(real: KVBoost) -> None:
    start = corpus_ids(real.tokenizer, 300, 1)
    prompts, continuations = [], []
    for question in range(3):
        prompt = start + corpus_ids(real.tokenizer, 20 + 9 * question, 50 + question)
        for choice in range(4):
            prompts.append(prompt)
            continuations.append(corpus_ids(real.tokenizer, 1 + choice, 90 + 4 * question + choice))
    results = real.score(prompts, continuations)
    for prompt, continuation, result in zip(prompts, continuations, results, strict=True):
        values = _plain(real.model, prompt, continuation)
        assert result.log_likelihood == pytest.approx(sum(values), abs=1e-4)
    again = real.score(prompts, continuations)
    assert [r.log_likelihood for r in again] == pytest.approx([r.log_likelihood for r in results], abs=1e-4)
    assert all(result.cached_tokens == result.prompt_tokens - 1 for result in again)


def _plain(model: Any, prompt: list[int], continuation: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + continuation])).logits[0].float()
    scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    values: list[float] = scores.gather(-1, torch.tensor(continuation)[:, None])[:, 0].tolist()
    return values
