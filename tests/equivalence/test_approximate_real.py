"""Approximate reuse on the built-in model: a sample in `make test`, the full counts in `make proof`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvboost import KVBoost
from kvboost.choices import Origin
from kvboost.proof.quality import ReuseTrial
from tests.checked_requests import read_request
from tests.engine.test_scheduler import run
from tests.equivalence.proofs import write_result
from tests.texts import corpus, corpus_ids

pytestmark = [pytest.mark.usefixtures("approximate_reuse"), pytest.mark.real_model]


def documents(engine: KVBoost, count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    sizes = [draw.randint(shortest, longest) for _ in range(count)]
    text = corpus_ids(engine.tokenizer, sum(sizes), seed)
    starts = np.cumsum([0, *sizes]).tolist()
    return [text[start:end] for start, end in pairwise(starts)]


def long_text(engine: KVBoost, count: int, seed: int) -> list[int]:
    """`count` tokens from a random place; some places have tables with few tokens in many characters."""
    text = corpus()
    start = random.Random(seed).randrange(len(text) - count * 40)
    ids: list[int] = engine.tokenizer(
        text[start : start + count * 40], add_special_tokens=False, verbose=False
    )["input_ids"]
    return ids[:count]


@dataclass
class FoundCase:
    document_tokens: int
    offset: int
    found_tokens: int


def found_at_offsets(engine: KVBoost, offsets: int, longest: int) -> list[FoundCase]:
    """Documents cached once, looked up at random offsets in other prompts. No forward of a prompt."""
    draw = random.Random(5)
    cases = []
    for number in range(offsets):
        size = draw.randint(80, longest)
        document = long_text(engine, size, seed=900 + number)
        engine.clear()
        engine.warm(document)
        before = long_text(engine, draw.randint(1, 1_500), seed=5_000 + number)
        prompt = [*before, *document, *long_text(engine, 20, seed=7_000 + number)]
        matches = engine.cache_manager.match_content(prompt, engine.namespace(), start=0, end=len(prompt) - 1)
        inside = np.zeros(len(prompt), dtype=bool)
        for match in matches.runs:
            inside[match[0].start : match[-1].end] = True
        found = int(inside[len(before) : len(before) + size].sum())
        cases.append(FoundCase(size, len(before), found))
    return cases


def check_found(cases: list[FoundCase]) -> dict[str, Any]:
    for case in cases:
        assert case.found_tokens >= 0.97 * case.document_tokens, case
    return {
        "documents": len(cases),
        "worst_share": min(case.found_tokens / case.document_tokens for case in cases),
    }


def test_documents_are_found_at_random_offsets(real: KVBoost) -> None:
    check_found(found_at_offsets(real, 8, 300))


@pytest.mark.slow
def test_documents_are_found_at_random_offsets_full(real: KVBoost) -> None:
    cases = found_at_offsets(real, 50, 2_000)
    write_result("proof-found-anywhere", check_found(cases), cases)


def test_eight_documents_in_random_order_are_all_found(real: KVBoost) -> None:
    shelf = documents(real, 8, 80, 200, seed=31)
    for document in shelf:
        real.warm(document)
    order = random.Random(3).sample(shelf, 8)
    prompt = [
        *corpus_ids(real.tokenizer, 9, seed=77),
        *(token for document in order for token in document),
        7,
    ]
    explanation = real.explain(prompt)
    assert explanation.cached_tokens >= 0.97 * sum(map(len, shelf))
    assert explanation.choice.startswith("reuse")


@pytest.mark.exactness
@pytest.mark.parametrize("selector", ["guided", "deviation"])
def test_ratio_one_is_baseline(real: KVBoost, selector: str) -> None:
    shelf = documents(real, 3, 90, 160, seed=41)
    with KVBoost(
        real.model, real.tokenizer, max_chunks=None, recompute_ratio=1.0, selector=selector
    ) as engine:
        for document in shelf:
            engine.warm(document)
        prompt = [
            *corpus_ids(real.tokenizer, 12, seed=1),
            *shelf[2],
            *shelf[0],
            *corpus_ids(real.tokenizer, 8, seed=2),
        ]
        trial = ReuseTrial(engine, np.array(prompt), 16)
        measured = trial.measure(selector, 1.0)
        assert measured.reused_tokens >= len(shelf[2]) + len(shelf[0]) - 2
        assert measured.recomputed_tokens == measured.reused_tokens
        assert measured.kl < 1e-6
        assert measured.top1 == 1.0


@dataclass
class MixedCase:
    approximate_tokens: int
    exact_tokens: int
    same_as_baseline: bool


def mixed_requests(engine: KVBoost, count: int, longest: int, new_tokens: int) -> list[MixedCase]:
    """Approximate generations and exact ones in turn; the exact ones are compared with BASELINE."""
    shelf = documents(engine, 6, 90, longest, seed=51)
    draw = random.Random(8)
    for document in shelf:
        engine.warm(document)
    cases = []
    for number in range(count):
        chosen = draw.sample(shelf, 3)
        prompt = [token for document in chosen for token in document]
        prompt += corpus_ids(engine.tokenizer, 12, seed=600 + number)
        approximate = engine.generate(prompt, max_new_tokens=4)
        exact = engine.generate(prompt, max_new_tokens=new_tokens, mode="prefix_cache")
        expected = engine.generate(prompt, max_new_tokens=new_tokens, mode="baseline")
        origins = {span.origin for span in exact.spans}
        assert origins <= {Origin.EXACT, Origin.LIVE}
        cases.append(
            MixedCase(
                sum(s.length for s in approximate.spans if s.origin is not Origin.LIVE),
                exact.cached_tokens,
                exact.token_ids == expected.token_ids,
            )
        )
    return cases


def mixed_in_a_batch(engine: KVBoost, count: int, longest: int, new_tokens: int) -> list[MixedCase]:
    """The same, in one running batch: an approximate request and an exact one of every prompt, at once."""
    shelf = documents(engine, 6, 90, longest, seed=52)
    draw = random.Random(9)
    for document in shelf:
        engine.warm(document)
    prompts = []
    for number in range(count):
        chosen = draw.sample(shelf, 3)
        prompt = [token for document in chosen for token in document]
        prompts.append(prompt + corpus_ids(engine.tokenizer, 12, seed=700 + number))
    arrivals = []
    for number, prompt in enumerate(prompts):
        arrivals += [
            (2 * number, read_request(engine, prompt, 4, "chunk_kv_reuse")),
            (2 * number, read_request(engine, prompt, new_tokens)),
        ]
    heard = run(engine.core.scheduler(max_sequences=6, max_tokens=24_000), arrivals)
    cases = []
    for prompt, approximate, exact in zip(prompts, heard[::2], heard[1::2], strict=True):
        assert approximate.result is not None
        assert exact.result is not None
        expected = engine.generate(prompt, max_new_tokens=new_tokens, mode="baseline")
        assert {span.origin for span in exact.result.spans} <= {Origin.EXACT, Origin.LIVE}
        reused = sum(s.length for s in approximate.result.spans if s.origin is not Origin.LIVE)
        same = exact.result.token_ids == expected.token_ids
        cases.append(MixedCase(reused, exact.result.cached_tokens, same))
    return cases


def check_mixed(cases: list[MixedCase]) -> dict[str, Any]:
    for case in cases:
        assert case.same_as_baseline, case
    assert sum(case.approximate_tokens for case in cases) > 0
    return {"requests": len(cases), "same_as_baseline": sum(case.same_as_baseline for case in cases)}


@pytest.mark.exactness
def test_exact_requests_stay_exact_among_approximate_ones(real: KVBoost) -> None:
    check_mixed(mixed_requests(real, 3, 130, new_tokens=12))


@pytest.mark.slow
def test_exact_requests_stay_exact_among_approximate_ones_full(real: KVBoost) -> None:
    cases = mixed_requests(real, 20, 600, new_tokens=32)
    write_result("proof-mixed-requests", check_mixed(cases), cases)


@pytest.mark.exactness
def test_exact_requests_stay_exact_in_the_running_batch(real: KVBoost) -> None:
    check_mixed(mixed_in_a_batch(real, 3, 130, new_tokens=8))


@pytest.mark.slow
def test_exact_requests_stay_exact_in_the_running_batch_full(real: KVBoost) -> None:
    cases = mixed_in_a_batch(real, 20, 600, new_tokens=32)
    write_result("proof-mixed-batch", check_mixed(cases), cases)


def test_a_chat_over_reordered_documents_is_repaired_once(real: KVBoost) -> None:
    shelf = documents(real, 4, 100, 160, seed=61)
    for document in shelf:
        real.warm(document)
    prompt = [*shelf[3], *shelf[1], *shelf[2], *corpus_ids(real.tokenizer, 10, seed=5)]
    for turn in range(5):
        result = real.generate(prompt, max_new_tokens=4)
        approximate = sum(span.length for span in result.spans if span.origin is Origin.APPROXIMATE)
        if turn == 0:
            assert result.recomputed_tokens > 0
        else:
            assert result.recomputed_tokens == 0
            assert approximate >= len(shelf[1]) + len(shelf[2])
            assert result.cached_tokens >= len(prompt) - 12  # the new words, and the last answer's end
        prompt = [*prompt, *result.token_ids, *corpus_ids(real.tokenizer, 8, seed=100 + turn)]
