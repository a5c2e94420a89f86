"""Approximate reuse under streams, beams, sampling and threads."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvboost.choices import AssemblyMode
from kvboost.kv.arena import Arena
from kvboost.reuse import repair
from kvboost.reuse.assembler import Lookup
from kvboost.run import decode
from kvboost.run.options import read_options
from tests.engine.reuse_checks import (
    approximate_tokens,
    chain_tokens,
    check_exact_tree,
    check_spans,
    check_store,
    documents,
    joined,
    shelf_engine,
)
from tests.fixture_types import MakeEngine
from tests.threads import in_threads
from tests.tiny_models import long_model, random_ids

pytestmark = pytest.mark.usefixtures("approximate_reuse")


def test_streams_give_what_generate_gives(make_engine: MakeEngine) -> None:
    model = long_model()
    shelf = documents(3, seed=22, low=90, high=160)
    prompt = [*random_ids(5, seed=1), *joined(shelf[::-1]), *random_ids(9, seed=2)]
    one, two = (shelf_engine(make_engine, shelf, model=model) for _ in range(2))
    expected = one.generate(prompt, max_new_tokens=12)
    stream = two.stream(prompt, max_new_tokens=12)
    assert "".join(stream) == expected.output_text
    assert stream.result.token_ids == expected.token_ids
    assert stream.result.spans == expected.spans
    assert expected.recomputed_tokens > 0
    check_store(two)
    broken_off = two.stream([*prompt, *random_ids(40, seed=3)], max_new_tokens=50)
    next(iter(broken_off))
    broken_off.close()
    check_store(two)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "seed": 5, "top_p": 0.9},
        {"num_beams": 2, "do_sample": True, "seed": 1},
    ],
    ids=lambda options: "+".join(options),
)
def test_beams_and_sampling_run_on_the_repaired_arena(
    options: dict[str, Any], make_engine: MakeEngine
) -> None:
    model = long_model()
    shelf = documents(3, seed=23, low=90, high=160)
    ids = np.array([*random_ids(5, seed=1), *joined(shelf[::-1]), *random_ids(9, seed=2)])
    engine = shelf_engine(make_engine, shelf, model=model)
    total = len(ids)
    lookup = Lookup(ids, engine.namespace(), total - 1, AssemblyMode.CHUNK_REUSE)
    with engine.assembler.planned(lookup) as plan:
        arena = Arena(engine.layout, total + 12)
        engine.assembler.place(plan, arena)
    strategy = engine.core.parts.approximation.repair().strategy(plan)
    repair.complete(model, ids, arena, plan.repair_runs, strategy, end=total - 1)
    given = dict(options)
    seed, do_sample = given.pop("seed", None), given.pop("do_sample", False)
    checked = read_options(model, 12, 1.0, do_sample, seed, given)
    if checked.num_sequences > 1:
        arena.batch_repeat_interleave(checked.num_sequences)
    expected = decode.generate(model, engine.tokenizer, ids, arena, checked, decode.Watch())
    result = engine.generate(ids.tolist(), max_new_tokens=12, **options)
    assert result.recomputed_tokens > 0
    assert result.token_ids == expected.token_ids
    check_store(engine)
    check_exact_tree(engine)
    follow_up = engine.generate([*ids.tolist(), *random_ids(5, seed=9)], max_new_tokens=2)
    assert chain_tokens(follow_up) >= total - plan.prefix_end - 5
    check_spans(follow_up)


@pytest.mark.parametrize("budget_tokens", [None, 500])
def test_threads_on_one_engine(budget_tokens: int | None, make_engine: MakeEngine) -> None:
    model = long_model()
    per_token = make_engine(model=model).layout.bytes_per_token
    budget = None if budget_tokens is None else budget_tokens * per_token
    shelf = documents(6, seed=24, low=60, high=110)
    engine = shelf_engine(make_engine, shelf, model=model, max_cache_bytes=budget)
    approximate: list[int] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        for step in range(10):
            parts = draw.sample(shelf, 3)
            prompt = [*joined(parts), *random_ids(6, seed=10 * number + step)]
            result = engine.generate(prompt, max_new_tokens=3)
            check_spans(result)
            approximate.append(approximate_tokens(result))
            follow_up = engine.generate([*prompt, *result.token_ids, 9], max_new_tokens=2)
            check_spans(follow_up)
            if step % 3 == 0:
                engine.warm(draw.choice(shelf))
                engine.explain(prompt)
            stats = engine.cache_stats()
            assert budget is None or stats["bytes"] <= budget

    in_threads(4, work)
    assert sum(map(bool, approximate)) >= 10
    check_store(engine)
    check_exact_tree(engine)
