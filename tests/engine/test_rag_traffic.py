"""Shuffled questions over a shelf of documents that does not fit: reuse must not decay."""

from __future__ import annotations

import random

import pytest

from kvboost import KVBoost
from tests.engine.reuse_checks import check_exact_tree, check_spans, check_store
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("approximate_reuse")

SHELF = 60
BUDGET_DOCUMENTS = 40
PER_QUERY = 5


def reused_shares(engine: KVBoost, queries: int, seed: int) -> list[float]:
    """The reused share of each of `queries` prompts with 5 of 60 documents, in random order."""
    draw = random.Random(seed)
    shelf = [random_ids(draw.randint(64, 96), seed=seed * 1000 + number) for number in range(SHELF)]
    budget = engine.cache_stats()["max_bytes"]
    assert budget is not None
    shares = []
    for number in range(queries):
        chosen = draw.sample(shelf, PER_QUERY)
        question = random_ids(8, seed=seed * 7000 + number)
        prompt = [token for document in chosen for token in document] + question
        result = engine.generate(prompt, max_new_tokens=1)
        check_spans(result)
        shares.append(result.kv_reuse_ratio)
        assert engine.cache_stats()["bytes"] <= budget
        if number % 25 == 0:
            check_store(engine)
    check_store(engine)
    return shares


def mean(shares: list[float]) -> float:
    return sum(shares) / len(shares)


@pytest.mark.parametrize("chunk_size", [16, 128])
def test_reuse_does_not_decay_over_500_queries(chunk_size: int, make_engine: MakeEngine) -> None:
    """Over four shelves: which documents a hundred queries draw moves the share of one by up to 8%."""
    per_token = make_engine().layout.bytes_per_token
    budget = BUDGET_DOCUMENTS * 80 * per_token  # documents have 80 tokens on average
    model = tiny_model("llama")
    early, last = [], []
    for seed in range(1, 5):
        engine = make_engine(model=model, chunk_size=chunk_size, max_cache_bytes=budget)
        shares = reused_shares(engine, 500, seed)
        early.append(mean(shares[100:200]))
        last.append(mean(shares[-100:]))
        stats = engine.cache_stats()
        assert stats["evicted_chunks"] > 0
        assert stats["bytes"] > budget // 2
        check_exact_tree(engine)
    assert mean(last) >= 0.95 * mean(early), (early, last)
    assert mean(early) >= 0.4  # of 60 documents at most 40 fit, beside questions and chains
