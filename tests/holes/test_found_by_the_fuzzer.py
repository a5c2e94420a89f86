"""What tests/fuzz found, each in its shortest form."""

from __future__ import annotations

from collections.abc import Callable

from kvboost import KVBoost
from tests.holes.stock import stock_answer
from tests.tiny_models import random_ids

MakeEngine = Callable[..., KVBoost]


def test_a_batch_takes_no_other_prompts_kv_from_the_kept_arena(make_engine: MakeEngine) -> None:
    """A prompt that stands alone is first in the order; those that share something are first in the arena."""
    engine = make_engine(chunk_size=8)
    lone = [6, *random_ids(39, seed=1)]
    shared = [200, *random_ids(39, seed=2)]
    engine.generate(lone, max_new_tokens=2, mode="prefix_cache")
    engine.generate([*shared, 9], max_new_tokens=2, mode="prefix_cache")
    engine.generate([*lone, 7], max_new_tokens=2, mode="prefix_cache")
    prompts = [[*shared, 11, 12], [*shared, 13], [*lone, 8]]
    found = engine.generate_batch(prompts, 4)
    assert [each.token_ids for each in found] == [stock_answer(engine.model, prompt, 4) for prompt in prompts]
    for prompt in prompts:
        answer = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
        assert answer.token_ids == stock_answer(engine.model, prompt, 4)
