"""generate_batch, generate_many and stream_many: every sequence is answered as it would be alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvboost import GenerationMode, GenerationResult, KVBoost
from kvboost.batching.scheduler import Scheduler
from kvboost.batching.sequence import SHARED_REASON
from kvboost.choices import Origin
from kvboost.errors import InvalidRequestError, PartialResultsError
from tests.engine.reuse_checks import pay_always
from tests.fixture_types import MakeEngine
from tests.forwards import count_fed, replace_forward
from tests.tiny_models import ARCHITECTURES, LENGTH_DEPENDENT, ROPE_RANGE, random_ids

BASELINE = GenerationMode.BASELINE


def baseline(engine: KVBoost, prompts: list[Any], **options: Any) -> list[list[int]]:
    return [engine.generate(prompt, mode=BASELINE, **options).token_ids for prompt in prompts]


def ragged(count: int, shared: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Prompts with one start and tails of 1 to `longest` tokens."""
    draw = random.Random(seed)
    start = random_ids(shared, seed) if shared else []
    return [start + random_ids(draw.randint(1, longest), 1000 * seed + i + 1) for i in range(count)]


def check_accounts(results: list[GenerationResult], prompts: list[list[int]]) -> None:
    for result, prompt in zip(results, prompts, strict=True):
        assert result.spans[0].start == 0
        assert result.spans[-1].end == result.prompt_tokens == len(prompt)
        for left, right in zip(result.spans, result.spans[1:], strict=False):
            assert left.end == right.start
        live = sum(span.length for span in result.spans if span.origin is Origin.LIVE)
        assert result.cached_tokens == len(prompt) - live
        assert 0 < result.ttft_ms <= result.total_ms
        assert result.spans[-1].origin is Origin.LIVE


# --- equal to BASELINE -----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_every_row_equals_baseline(make_engine: MakeEngine, name: str, size: int) -> None:
    engine = make_engine(name)
    prompts = ragged(size, 70, seed=size)
    expected = baseline(engine, prompts, max_new_tokens=8)
    cold = engine.generate_batch(prompts, max_new_tokens=8)
    assert [result.token_ids for result in cold] == expected
    check_accounts(cold, prompts)
    warm = engine.generate_batch(prompts, max_new_tokens=8)
    assert [result.token_ids for result in warm] == expected
    check_accounts(warm, prompts)
    assert all(result.cached_tokens == result.prompt_tokens - 1 for result in warm)


@pytest.mark.parametrize("size", range(1, 17))
def test_batch_sizes_one_to_sixteen(make_engine: MakeEngine, size: int) -> None:
    engine = make_engine()
    prompts = ragged(size, 50, seed=50 + size)
    expected = baseline(engine, prompts, max_new_tokens=6)
    assert [result.token_ids for result in engine.generate_batch(prompts, max_new_tokens=6)] == expected


@pytest.mark.parametrize(
    "options", [{"attn": "eager"}, {"bits": 8}, {"dtype": torch.bfloat16}, {"window": 4}]
)
def test_other_engines(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    """Eager attention, stored in 8 bits, bfloat16, cuts at sentence ends."""
    settings: dict[str, Any] = {}
    if "bits" in options:
        settings["kv_cache_bits"] = options["bits"]
    if "dtype" in options:
        settings["dtype"] = options["dtype"]
    if "window" in options:
        settings["chunk_boundary_window"] = options["window"]
    engine = make_engine(**settings)
    if "attn" in options:
        engine.model.set_attn_implementation("eager")
    prompts = ragged(5, 70, seed=3)
    together = engine.generate_batch(prompts, max_new_tokens=6)
    fresh = make_engine(model=engine.model, **{k: v for k, v in settings.items() if k != "dtype"})
    if "bits" in options:  # equal to BASELINE while nothing is read back, and to single reuse after it
        assert [result.token_ids for result in together] == baseline(engine, prompts, max_new_tokens=6)
        return
    single = [fresh.generate(prompt, max_new_tokens=6, mode="prefix_cache").token_ids for prompt in prompts]
    if "dtype" in options:  # rounding to 8 bits may turn a near tie; first tokens are far from one
        assert [result.token_ids[0] for result in together] == [ids[0] for ids in single]
        return
    assert [result.token_ids for result in together] == single


def test_rows_that_share_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [random_ids(20 + 7 * i, 40 + i) for i in range(6)]
    expected = baseline(engine, prompts, max_new_tokens=5)
    assert [result.token_ids for result in engine.generate_batch(prompts, max_new_tokens=5)] == expected


def test_duplicates_and_prompts_that_begin_others(make_engine: MakeEngine) -> None:
    engine = make_engine()
    long = random_ids(90, 7)
    prompts = [long, long[:60], long, long[:1], long[:60] + random_ids(5, 8), long[:33], long[:34]]
    expected = baseline(engine, prompts, max_new_tokens=5)
    results = engine.generate_batch(prompts, max_new_tokens=5)
    assert [result.token_ids for result in results] == expected
    check_accounts(results, prompts)


def test_a_tree_of_shared_prefixes_is_computed_once(make_engine: MakeEngine) -> None:
    """All share 40 tokens, two families 50 more each: 140 shared tokens, and the tails."""
    engine = make_engine()
    root, left, right = random_ids(40, 1), random_ids(50, 2), random_ids(50, 3)
    prompts = [root + (left if i % 2 else right) + random_ids(4 + i, 10 + i) for i in range(8)]
    expected = baseline(engine, prompts, max_new_tokens=4)
    results = engine.generate_batch(prompts, max_new_tokens=4)
    assert [result.token_ids for result in results] == expected
    live = sum(span.length for result in results for span in result.spans if span.origin is Origin.LIVE)
    assert live == 140 + sum(4 + i for i in range(8))
    check_accounts(results, prompts)


def test_a_chain_of_a_thousand_prompts_is_no_recursion(make_engine: MakeEngine) -> None:
    """Every prompt begins with the one before it."""
    engine = make_engine()
    text = random_ids(700, 4)
    prompts = [text[: 20 * i] for i in range(1, 36)]
    expected = baseline(engine, prompts, max_new_tokens=2)
    assert [result.token_ids for result in engine.generate_batch(prompts, max_new_tokens=2)] == expected


def test_text_and_messages(make_engine: MakeEngine) -> None:
    engine = make_engine()
    system = {"role": "system", "content": "be brief, " * 5}
    prompts = [
        [system, {"role": "user", "content": "one"}],
        "be brief, and say two",
        [system, {"role": "user", "content": "three"}],
    ]
    expected = baseline(engine, prompts, max_new_tokens=5)
    results = engine.generate_many(prompts, max_new_tokens=5)
    assert [result.token_ids for result in results] == expected
    assert [result.output_text for result in results] == [
        engine.generate(prompt, mode=BASELINE, max_new_tokens=5).output_text for prompt in prompts
    ]


def test_answers_are_kept_as_after_generate(make_engine: MakeEngine) -> None:
    """The next turn finds prompt and answer."""
    engine = make_engine()
    prompts = ragged(4, 50, seed=9)
    results = engine.generate_batch(prompts, max_new_tokens=10)
    for prompt, result in zip(prompts, results, strict=True):
        turn = prompt + result.token_ids + random_ids(5, 77)
        following = engine.generate(turn, max_new_tokens=4, mode="prefix_cache")
        assert following.cached_tokens == len(prompt) + len(result.token_ids) - 1
        assert following.token_ids == engine.generate(turn, max_new_tokens=4, mode=BASELINE).token_ids


def test_what_generate_stored_serves_a_batch(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = ragged(4, 64, seed=10)
    engine.warm(prompts[0][:64])
    results = engine.generate_batch(prompts, max_new_tokens=4)
    assert all(result.cached_tokens == 64 for result in results)
    assert all(span.reason != SHARED_REASON for result in results for span in result.spans)


# --- options ---------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"do_sample": True, "temperature": 0.8, "seed": 5},
    {"do_sample": True, "top_k": 5, "top_p": 0.9, "seed": 1},
    {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 2**63 - 2},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    {"min_new_tokens": 6, "eos_token_id": list(range(6, 200))},
    {"eos_token_id": list(range(6, 150))},
    {"bad_words_ids": [[10], [11, 12]], "suppress_tokens": [20, 21]},
    {"stop_strings": ["a", "e", "o"]},
    {"forced_eos_token_id": 2},
    {"num_beams": 3},
    {"prompt_lookup_num_tokens": 3},
    {"guidance_scale": 1.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: ",".join(each))
def test_every_option_gives_what_generate_gives(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    engine = make_engine()
    prompts = ragged(4, 40, seed=20)
    seed = options.get("seed")
    expected = []
    for index, prompt in enumerate(prompts):
        own = options if seed is None else {**options, "seed": (seed + index) % 2**63}
        expected.append(engine.generate(prompt, max_new_tokens=9, mode=BASELINE, **own))
    for results in (
        engine.generate_batch(prompts, max_new_tokens=9, **options),
        engine.generate_many(prompts, max_new_tokens=9, **options),
    ):
        assert [result.token_ids for result in results] == [each.token_ids for each in expected]
        assert [result.finish_reason for result in results] == [each.finish_reason for each in expected]


def test_processors_criteria_and_allowed_tokens_of_ones_own(make_engine: MakeEngine) -> None:
    """prefix_allowed_tokens_fn is told the number of the prompt, as transformers tells it the batch index."""
    engine = make_engine()
    prompts = ragged(3, 30, seed=21)
    asked: set[int] = set()

    def allowed(index: int, _ids: torch.Tensor) -> list[int]:
        asked.add(index)
        return [30 + index, 40 + index]

    for mode in ("prefix_cache", "baseline"):  # together, and each alone
        asked.clear()
        results = engine.generate_batch(prompts, 4, mode=mode, prefix_allowed_tokens_fn=allowed)
        assert asked == {0, 1, 2}
        for index, result in enumerate(results):
            assert set(result.token_ids) <= {30 + index, 40 + index}

    def prefer_50(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 50] += 1000
        return scores

    def after_three(ids: torch.Tensor, _scores: Any) -> torch.Tensor:
        return torch.full((ids.shape[0],), ids[0, -3:].tolist() == [50, 50, 50])

    from transformers import LogitsProcessorList, StoppingCriteriaList

    results = engine.generate_batch(
        prompts,
        max_new_tokens=9,
        logits_processor=LogitsProcessorList([prefer_50]),
        stopping_criteria=StoppingCriteriaList([after_three]),
    )
    assert [result.token_ids for result in results] == [[50, 50, 50]] * 3
    assert {result.finish_reason for result in results} == {"stop"}


def test_sampling_is_reproducible_and_differs_between_equal_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [random_ids(30, 1)] * 4
    first, second = (
        [r.token_ids for r in engine.generate_batch(prompts, 12, do_sample=True, seed=3)] for _ in range(2)
    )
    assert first == second
    assert len({tuple(ids) for ids in first}) > 1
    torch.manual_seed(0)
    state = torch.get_rng_state()
    engine.generate_batch(prompts, 4, do_sample=True, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_that_finish_early_stop_costing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence's last forward is that of its last token."""
    engine = make_engine()
    prompts = ragged(5, 40, seed=23)
    answers = baseline(engine, prompts, max_new_tokens=12)
    ends = sorted({ids[3] for ids in answers[:2]})
    expected = baseline(engine, prompts, max_new_tokens=12, eos_token_id=ends)
    assert len({len(ids) for ids in expected}) > 1
    fed = count_fed(monkeypatch, engine.model)
    results = engine.generate_batch(prompts, max_new_tokens=12, eos_token_id=ends)
    assert [result.token_ids for result in results] == expected
    longest = max(len(ids) for ids in expected)
    steps = fed[len(fed) - (longest - 1) :]
    assert steps == [sum(len(ids) > step for ids in expected) for step in range(1, longest)]


# --- modes, and models that cannot run batches -----------------------------------------------


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_modes(make_engine: MakeEngine, mode: GenerationMode) -> None:
    engine = make_engine()
    prompts = ragged(3, 64, seed=30)
    expected = baseline(engine, prompts, max_new_tokens=5)
    results = engine.generate_batch(prompts, max_new_tokens=5, mode=mode)
    assert [result.token_ids for result in results] == expected
    assert {result.mode for result in results} == {mode.value}
    stored = engine.cache_stats()["chunks"]
    assert (stored == 0) is (mode is BASELINE)


@pytest.mark.usefixtures("approximate_reuse")
def test_chunk_reuse_finds_moved_text(make_engine: MakeEngine) -> None:
    engine = make_engine()
    document = random_ids(96, 5)
    engine.warm(document)
    prompts = [random_ids(9, 60 + i) + document + random_ids(20, 70 + i) for i in range(3)]
    results = engine.generate_many(prompts, max_new_tokens=3, mode="chunk_kv_reuse")
    origins = {span.origin for result in results for span in result.spans}
    assert origins & {Origin.APPROXIMATE, Origin.RECOMPUTED}


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("method", ["generate_batch", "generate_many"])
def test_moved_text_is_repaired_together(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Each prompt gets the answer and the account that it gets alone, in as many forwards as one of them."""
    pay_always(monkeypatch)
    together, alone = make_engine(recompute_ratio=0.5), make_engine(recompute_ratio=0.5)
    document = random_ids(96, 5)
    prompts = [random_ids(9, 60 + i) + document + random_ids(20, 70 + i) for i in range(4)]
    for engine in (together, alone):
        engine.warm(document)
    asked = {"max_new_tokens": 6, "mode": "chunk_kv_reuse"}
    expected = [alone.generate(prompt, **asked) for prompt in prompts]
    fed = count_fed(monkeypatch, together.model)
    results = getattr(together, method)(prompts, **asked)
    assert [result.token_ids for result in results] == [each.token_ids for each in expected]
    assert [result.recomputed_tokens for result in results] == [each.recomputed_tokens for each in expected]
    assert all(0 < result.recomputed_tokens < result.cached_tokens for result in results)
    assert together.cache_stats()["batches"]["sequences"] == 4
    assert sum(tokens == 4 for tokens in fed) == 5  # steps in which all four get their next token
    check_accounts(results, prompts)


def test_the_model_changes_between_two_answers(make_engine: MakeEngine) -> None:
    """Whoever takes an answer may change the model; those without one begin anew."""
    engine = make_engine()
    prompts = ragged(4, 40, seed=36)
    old = baseline(engine, prompts, max_new_tokens=9)
    shortest, ends = 0, [2]

    def ended(index: int, ids: torch.Tensor) -> list[int]:
        is_over = index == shortest and len(ids) >= len(prompts[shortest]) + 2
        return ends if is_over else [token for token in range(300) if token not in ends]

    asked = {"max_new_tokens": 9, "eos_token_id": ends, "prefix_allowed_tokens_fn": ended}
    found = {}
    for index, result in engine.stream_many(prompts, **asked):
        if not found:
            with torch.no_grad():
                engine.model.lm_head.weight.mul_(-1.0)
        found[index] = result.token_ids
    assert len(found[0]) == 3
    for index in (1, 2, 3):
        own = {**asked, "prefix_allowed_tokens_fn": lambda _, ids, i=index: ended(i, ids)}
        expected = engine.generate(prompts[index], mode=BASELINE, **own).token_ids
        assert found[index] == expected != old[index][: len(expected)]


def test_bit_exact_engines_refuse_batches_and_run_many_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(bit_exact=True)
    prompts = ragged(3, 48, seed=31)
    with pytest.raises(InvalidRequestError, match="generate_batch cannot be bit-exact"):
        engine.generate_batch(prompts)
    expected = baseline(engine, prompts, max_new_tokens=4)
    assert [result.token_ids for result in engine.generate_many(prompts, max_new_tokens=4)] == expected


@pytest.mark.usefixtures("approximate_reuse")
def test_overlap_engines_run_one_by_one(make_engine: MakeEngine) -> None:
    engine = make_engine(overlap_k=8)
    prompts = ragged(3, 48, seed=32)
    assert len(engine.generate_batch(prompts, max_new_tokens=4)) == 3
    assert engine.cache_stats()["batches"]["batches"] == 0


@pytest.mark.parametrize("name", list(LENGTH_DEPENDENT))
def test_rope_that_changes_with_length(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(name)
    prompts = [*ragged(3, 30, seed=33, longest=20), *ragged(2, ROPE_RANGE, seed=34)]
    expected = baseline(engine, prompts, max_new_tokens=4)
    assert [result.token_ids for result in engine.generate_many(prompts, max_new_tokens=4)] == expected


def test_a_model_in_training_mode_is_left_as_it_was(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = ragged(3, 40, seed=35)
    expected = baseline(engine, prompts, max_new_tokens=4)
    engine.model.train()
    before = engine.model.config._attn_implementation
    assert [result.token_ids for result in engine.generate_batch(prompts, max_new_tokens=4)] == expected
    assert engine.model.training
    assert engine.model.config._attn_implementation == before


# --- whole workloads -------------------------------------------------------------------------


def families(count: int, loners: int, duplicates: int, *, shared: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    starts = [random_ids(shared, 500 + i) for i in range(6)]
    prompts = [starts[i % 6] + random_ids(draw.randint(1, 20), 900 + i) for i in range(count)]
    prompts += [random_ids(draw.randint(5, 40), 5000 + i) for i in range(loners)]
    prompts += [draw.choice(prompts) for _ in range(duplicates)]
    draw.shuffle(prompts)
    return prompts


def test_three_hundred_mixed_prompts(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 families, 20 loners, 30 duplicates, shuffled: order kept, equal to BASELINE, prefixes run once."""
    engine = make_engine()
    prompts = families(250, 20, 30, shared=64)
    assert len(prompts) == 300
    expected = baseline(engine, prompts, max_new_tokens=3)
    fed = count_fed(monkeypatch, engine.model)
    results = engine.generate_many(prompts, max_new_tokens=3)
    assert [result.token_ids for result in results] == expected
    check_accounts(results, prompts)
    live = sum(span.length for result in results for span in result.spans if span.origin is Origin.LIVE)
    starts = {tuple(prompt[:64]) for prompt in prompts if len(prompt) > 64}
    assert len(starts) == 6
    own = sum(len(prompt) - 64 if tuple(prompt[:64]) in starts else len(prompt) for prompt in prompts)
    assert live <= 6 * 64 + own
    answers = sum(len(result.token_ids) - 1 for result in results)
    assert sum(fed) == live + answers  # what the accounts call live is what went through the model


def test_a_family_larger_than_a_batch_computes_its_prefix_once(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    prompts = ragged(20, 64, seed=41, longest=10)
    expected = baseline(engine, prompts, max_new_tokens=3)
    fed = count_fed(monkeypatch, engine.model)
    results = engine.generate_many(prompts, max_new_tokens=3, max_batch_tokens=64 + 13 * 4)
    assert [result.token_ids for result in results] == expected
    assert engine.cache_stats()["batches"]["sequences"] == 20
    tails = sum(len(prompt) - 64 for prompt in prompts)
    assert sum(fed) <= 64 + tails + sum(len(result.token_ids) - 1 for result in results)


def test_what_is_shared_between_groups_is_computed_once(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families with a common start join one after the other; there is room for two prompts at once."""
    engine = make_engine()
    root = random_ids(48, 1)
    prompts = [root + random_ids(32, 2 + i % 3) + random_ids(6, 100 + i) for i in range(12)]
    random.Random(0).shuffle(prompts)
    expected = baseline(engine, prompts, max_new_tokens=3)
    fed = count_fed(monkeypatch, engine.model)
    results = engine.generate_many(prompts, max_new_tokens=3, max_batch_tokens=48 + 32 + 9 * 4)
    assert [result.token_ids for result in results] == expected
    assert engine.cache_stats()["batches"]["sequences"] == 12
    live = sum(span.length for result in results for span in result.spans if span.origin is Origin.LIVE)
    assert live <= 48 + 3 * 32 + 12 * 6
    assert sum(fed) == live + sum(len(result.token_ids) - 1 for result in results)


def test_a_bound_below_one_prompt_runs_them_one_by_one(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = ragged(4, 40, seed=42)
    expected = baseline(engine, prompts, max_new_tokens=3)
    results = engine.generate_many(prompts, max_new_tokens=3, max_batch_tokens=1)
    assert [result.token_ids for result in results] == expected


def test_the_bound_holds(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = ragged(40, 64, seed=43)
    engine.generate_many(prompts, max_new_tokens=3, max_batch_tokens=400)
    counts = engine.cache_stats()["batches"]
    assert counts["sequences"] == 40
    assert counts["largest_kv_bytes"] <= 400 * engine.layout.bytes_per_token


def test_results_are_streamed_as_they_finish(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [*ragged(3, 40, seed=44), random_ids(30, 45)]
    expected = baseline(engine, prompts, max_new_tokens=4)
    seen: dict[int, list[int]] = {}
    for index, result in engine.stream_many(prompts, max_new_tokens=4):
        seen[index] = result.token_ids
        if len(seen) == 1:  # the engine is free between two results
            assert engine.generate(prompts[1], max_new_tokens=4, mode=BASELINE).token_ids == expected[1]
    assert [seen[index] for index in range(4)] == expected


def test_no_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.generate_batch([]) == []
    assert engine.generate_many([]) == []
    assert list(engine.stream_many([])) == []


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["generate_batch", "generate_many", "stream_many"])
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[7, 8], [], [9]], "prompt 1: the prompt is empty"),
        ([[7, 8], [9], [10, 99_999]], "prompt 2: token id 99999 is outside"),
        ([[7], [8] * 5_000], r"prompt 1: prompt and max_new_tokens need 5064 positions"),
        ([[7], "", "x"], "prompt 1: the prompt is empty"),
        ([[7], [{"role": "user"}]], "prompt 1: message 0 must be a mapping"),
        ([[7], 3.5], "prompt 1: a prompt must be a string"),
        ("one text", "prompts must be a list of prompts, got str"),
        ([7, 8, 9], "this is a single one"),
        ([{"role": "user", "content": "x"}], "this is a single one"),
        (None, "prompts must be a list of prompts, got NoneType"),
        (iter([[7], [8]]), r"got list_iterator; pass list\(prompts\)"),
    ],
)
def test_bad_prompts_are_named_before_any_work(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, method: str, prompts: Any, message: str
) -> None:
    engine = make_engine()
    fed = count_fed(monkeypatch, engine.model)
    with pytest.raises(InvalidRequestError, match=message):
        getattr(engine, method)(prompts)
    assert fed == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_tokens": 0}, "max_batch_tokens must be None or an integer of at least 1, got 0"),
        ({"max_batch_tokens": "many"}, "max_batch_tokens must be None"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"mode": "fast"}, "mode"),
        ({"streamer": object()}, "a streamer takes one answer"),
        ({"nonsense": 1}, "unknown generation option 'nonsense'"),
        ({"seed": -1}, "seed must be an integer"),
    ],
)
def test_bad_options(make_engine: MakeEngine, options: dict[str, Any], message: str) -> None:
    engine = make_engine()
    for method in (engine.generate_batch, engine.generate_many, engine.stream_many):
        with pytest.raises(InvalidRequestError, match=message):
            method([[7, 8], [7, 9]], **options)


def test_a_failing_row_does_not_lose_the_others(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = ragged(5, 40, seed=50)
    expected = baseline(engine, prompts, max_new_tokens=6)
    bad = len(prompts[3])

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bad <= ids.shape[1] <= bad + 6 and ids[0, :bad].tolist() == prompts[3]:
            raise RuntimeError("not this one")
        return scores

    from transformers import LogitsProcessorList

    with pytest.raises(
        PartialResultsError, match="1 of 5 prompts failed; prompt 3: RuntimeError: not this one"
    ) as e:
        engine.generate_batch(prompts, max_new_tokens=6, logits_processor=LogitsProcessorList([fails]))
    found = e.value.results
    assert found[3] is None
    assert [found[i].token_ids for i in (0, 1, 2, 4)] == [expected[i] for i in (0, 1, 2, 4)]
    assert list(e.value.failures) == [3]
    assert [r.token_ids for r in engine.generate_batch(prompts, max_new_tokens=6)] == expected


@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_batch_that_runs_out_of_memory_is_finished_one_by_one(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    engine = make_engine()
    prompts = ragged(6, 40, seed=51)
    expected = baseline(engine, prompts, max_new_tokens=6)
    forward = engine.model.forward
    left = [when]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] > 1 and kwargs.get("position_ids") is not None:
            if left[0] == 0:
                left[0] -= 1
                raise RuntimeError("out of memory")
            left[0] -= 1
        return forward(*args, **kwargs)

    replace_forward(monkeypatch, engine.model, failing)
    with pytest.warns(RuntimeWarning, match=r"a batch of 6 prompts failed \(RuntimeError: out of memory\)"):
        results = engine.generate_batch(prompts, max_new_tokens=6)
    assert [result.token_ids for result in results] == expected
    assert left[0] < 0
    check_accounts(results, prompts)


@pytest.mark.parametrize("failing", [{1}, {5}, {0, 1, 2, 3, 4, 5}])
def test_prompts_that_cannot_join_run_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, failing: set[int]
) -> None:
    engine = make_engine()
    prompts = ragged(6, 40, seed=54)
    expected = baseline(engine, prompts, max_new_tokens=4)
    join, count = Scheduler.join, iter(range(6))

    def joining(scheduler: Scheduler, *arguments: Any, **options: Any) -> Any:
        if next(count) in failing:
            raise ValueError("no slots")
        return join(scheduler, *arguments, **options)

    monkeypatch.setattr(Scheduler, "join", joining)
    results = engine.generate_batch(prompts, max_new_tokens=4)
    assert [result.token_ids for result in results] == expected
    check_accounts(results, prompts)


# --- cancelling ------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [1, 2, 4])
def test_an_interrupt_leaves_the_engine_usable(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    engine = make_engine()
    prompts = ragged(5, 40, seed=52)
    expected = baseline(engine, prompts, max_new_tokens=6)
    forward, calls = engine.model.forward, [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == when:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    replace_forward(monkeypatch, engine.model, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch(prompts, max_new_tokens=6)
    monkeypatch.undo()
    engine.cache_manager.check_integrity()
    assert engine.model.config._attn_implementation == "sdpa"
    assert [r.token_ids for r in engine.generate_batch(prompts, max_new_tokens=6)] == expected
    assert engine.generate(prompts[0], max_new_tokens=6, mode="prefix_cache").token_ids == expected[0]


def test_closing_a_stream_of_many_leaves_the_engine_usable(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = ragged(6, 40, seed=53)
    ends = sorted({ids[2] for ids in baseline(engine, prompts[:1], max_new_tokens=6)})
    expected = baseline(engine, prompts, max_new_tokens=6)
    stream = engine.stream_many(prompts, max_new_tokens=6, eos_token_id=ends)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.core.parts.workspace.nbytes, "the next call finds its memory"
    engine.cache_manager.check_integrity()
    assert engine.model.config._attn_implementation == "sdpa"
    assert [r.token_ids for r in engine.generate_many(prompts, max_new_tokens=6)] == expected


# --- the cache around it ---------------------------------------------------------------------


def test_salts_do_not_meet(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = ragged(3, 64, seed=60)
    engine.generate_batch(prompts, max_new_tokens=2, cache_salt="a")
    other = engine.generate_batch(prompts, max_new_tokens=2, cache_salt="b")
    live = sum(span.length for result in other for span in result.spans if span.origin is Origin.LIVE)
    assert live == 64 + sum(len(prompt) - 64 for prompt in prompts)


@pytest.mark.parametrize("max_chunks", [0, 1, 3])
def test_small_caches(make_engine: MakeEngine, max_chunks: int) -> None:
    engine = make_engine(max_chunks=max_chunks)
    prompts = ragged(6, 64, seed=61)
    expected = baseline(engine, prompts, max_new_tokens=4)
    for _ in range(2):
        assert [r.token_ids for r in engine.generate_many(prompts, max_new_tokens=4)] == expected
        assert engine.cache_stats()["chunks"] <= max_chunks


def test_batches_from_disk(make_engine: MakeEngine, tmp_path: Any) -> None:
    first = make_engine(disk_cache_dir=tmp_path)
    prompts = ragged(4, 64, seed=62)
    expected = [result.token_ids for result in first.generate_batch(prompts, max_new_tokens=4)]
    first.close()
    second = make_engine(model=first.model, disk_cache_dir=tmp_path)
    results = second.generate_batch(prompts, max_new_tokens=4)
    assert [result.token_ids for result in results] == expected
    assert all(result.cached_tokens == result.prompt_tokens - 1 for result in results)


def test_an_arena_full_of_nan_does_no_harm(make_engine: MakeEngine) -> None:
    """Slots that nobody has filled yet are read under a mask."""
    engine = make_engine()
    prompts = ragged(5, 40, seed=63)
    expected = baseline(engine, prompts, max_new_tokens=6)
    engine.generate_batch(prompts, max_new_tokens=6)
    kept = engine.core.parts.workspace._kept
    assert kept is not None
    for slab in kept.arena.slabs:
        slab[:, :, len(kept.token_ids) :] = float("nan")
    assert [r.token_ids for r in engine.generate_batch(prompts, max_new_tokens=6)] == expected
