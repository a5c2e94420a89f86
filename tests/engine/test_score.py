"""score: log-likelihoods with reuse equal those of a plain forward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvboost import GenerationMode, KVBoost
from kvboost.choices import Origin
from kvboost.errors import InvalidRequestError
from kvboost.models import ScoreResult
from tests.engine.reuse_checks import pay_always
from tests.fixture_types import MakeEngine
from tests.forwards import count_fed, replace_forward
from tests.tiny_models import ARCHITECTURES, LENGTH_DEPENDENT, ROPE_RANGE, random_ids

TOLERANCE = 1e-4


def plain(model: Any, prompt: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    """Per token, and whether each was the likeliest, by one forward over all of it."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([(prompt + continuation)[:-1]])).logits[0].float()
    scores = logits.log_softmax(-1)[len(prompt) - 1 :]
    values = scores.gather(-1, torch.tensor(continuation)[:, None])[:, 0].tolist()
    return values, scores.argmax(-1).tolist() == continuation


def check(engine: KVBoost, pairs: list[tuple[list[int], list[int]]], results: list[ScoreResult]) -> None:
    assert len(results) == len(pairs)
    for (prompt, continuation), result in zip(pairs, results, strict=True):
        values, greedy = plain(engine.model, prompt, continuation)
        assert result.token_log_likelihoods == pytest.approx(values, abs=TOLERANCE)
        assert result.log_likelihood == pytest.approx(sum(values), abs=TOLERANCE)
        assert float(result) == result.log_likelihood
        assert result.is_greedy is greedy
        assert result.token_ids == continuation
        assert result.prompt_tokens == len(prompt)
        assert result.spans[-1].end == len(prompt)
        assert result.cached_tokens == sum(s.length for s in result.spans if s.origin is not Origin.LIVE)


def choices(questions: int, shared: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Few-shot prompts with four choices each, of one to six tokens."""
    draw = random.Random(seed)
    start = random_ids(shared, seed)
    pairs = []
    for number in range(questions):
        prompt = start + random_ids(draw.randint(3, 30), 100 * seed + number)
        pairs += [(prompt, random_ids(draw.randint(1, 6), 7_000 + 10 * number + each)) for each in range(4)]
    return pairs


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_scores_equal_a_plain_forward(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(name)
    pairs = choices(4, 60, seed=1)
    for _ in ("cold", "warm"):
        check(engine, pairs, engine.score(*map(list, zip(*pairs, strict=True))))


def test_the_likeliest_continuation_is_greedy(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [random_ids(40, i) for i in range(3)]
    answers = [engine.generate(prompt, 5, mode="baseline").token_ids for prompt in prompts]
    assert all(result.is_greedy for result in engine.score(prompts, answers))
    changed = [[*ids[:-1], (ids[-1] + 1) % 300] for ids in answers]
    assert not any(result.is_greedy for result in engine.score(prompts, changed))


def test_shared_starts_are_computed_once_and_equal_forwards_are_shared(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices of one token each need one forward per question."""
    engine = make_engine()
    start = random_ids(64, 1)
    prompts = [start + random_ids(10, 50 + i) for i in range(5)]
    pairs = [(prompt, [30 + each]) for prompt in prompts for each in range(4)]
    assert not engine.why_not_packed
    fed = count_fed(monkeypatch, engine.model)
    results = engine.score(*map(list, zip(*pairs, strict=True)))
    assert sum(fed) == 64 + 5 * 10
    fed.clear()
    again = engine.score(*map(list, zip(*pairs, strict=True)))
    assert sum(fed) == 5  # the last token of every prompt
    assert all(result.cached_tokens == 73 for result in again)
    check(engine, pairs, results)


def test_equal_tokens_cut_at_different_places(make_engine: MakeEngine) -> None:
    engine = make_engine()
    text = random_ids(40, 3)
    pairs = [(text[:cut], text[cut:]) for cut in (10, 39, 20, 1)]
    check(engine, pairs, engine.score(*map(list, zip(*pairs, strict=True))))


def test_prompts_are_stored_and_continuations_are_not(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt, continuation = random_ids(40, 1), random_ids(8, 2)
    engine.score([prompt], [continuation])
    assert engine.generate(prompt, 2, mode="prefix_cache").cached_tokens == 39
    other = engine.generate(prompt + continuation, 2, mode="prefix_cache")
    assert other.cached_tokens == 40


def test_text_is_encoded_together_with_its_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokenizer = engine.tokenizer
    result = engine.score(["the cat"], [" sat"])[0]
    assert result.token_ids == tokenizer(" sat", add_special_tokens=False)["input_ids"]
    assert result.continuation == " sat"
    messages = [{"role": "user", "content": "hello"}]
    result = engine.score([messages], ["yes"])[0]
    assert result.token_ids == tokenizer("yes", add_special_tokens=False)["input_ids"]
    assert result.prompt_tokens == engine.generate(messages, 1, mode="baseline").prompt_tokens


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_modes(make_engine: MakeEngine, mode: GenerationMode) -> None:
    engine = make_engine()
    pairs = choices(3, 50, seed=4)
    results = engine.score(*map(list, zip(*pairs, strict=True)), mode=mode)
    check(engine, pairs, results)
    assert {result.mode for result in results} == {mode.value}
    assert (engine.cache_stats()["chunks"] == 0) is (mode is GenerationMode.BASELINE)


def test_approximate_reuse_scores_behind_moved_text(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything recomputed, moved text scores as if it had been read here."""
    engine = make_engine(recompute_ratio=1.0)
    pay_always(monkeypatch)
    document = random_ids(96, 5)
    engine.warm(document)
    pairs = [(random_ids(9, 60) + document + random_ids(20, 70), random_ids(5, 80))]
    results = engine.score(*map(list, zip(*pairs, strict=True)), mode="chunk_kv_reuse")
    check(engine, pairs, results)
    assert any(span.origin in (Origin.APPROXIMATE, Origin.RECOMPUTED) for span in results[0].spans)


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize(
    "options", [{"bit_exact": True}, {"overlap_k": 8}, {"kv_cache_bits": 8}, {"max_chunks": 0}]
)
def test_other_engines(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    engine = make_engine(**options)
    pairs = choices(3, 50, seed=5)
    check(engine, pairs, engine.score(*map(list, zip(*pairs, strict=True))))


@pytest.mark.parametrize("name", list(LENGTH_DEPENDENT))
def test_rope_that_changes_with_length(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(name)
    pairs = [*choices(2, 30, seed=6), *choices(1, ROPE_RANGE, seed=7)]
    results = engine.score(*map(list, zip(*pairs, strict=True)))
    for (prompt, continuation), result in zip(pairs, results, strict=True):
        from kvboost.kv import rope

        rope.reset_dynamic_frequencies(engine.model)
        values, _ = plain(engine.model, prompt, continuation)
        assert result.log_likelihood == pytest.approx(sum(values), abs=TOLERANCE)


def test_small_batches(make_engine: MakeEngine) -> None:
    engine = make_engine()
    pairs = choices(6, 64, seed=8)
    check(engine, pairs, engine.score(*map(list, zip(*pairs, strict=True)), max_batch_tokens=150))


def test_out_of_memory_goes_on_one_by_one(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    pairs = choices(3, 64, seed=9)
    forward = engine.model.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_ids") is not None:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    replace_forward(monkeypatch, engine.model, failing)
    with pytest.warns(RuntimeWarning, match="a batch of 12 prompts failed"):
        results = engine.score(*map(list, zip(*pairs, strict=True)))
    monkeypatch.undo()
    check(engine, pairs, results)


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ([[7, 8]], [[9], [10]], "every prompt needs one continuation, got 1 prompts and 2 continuations"),
        ([[7, 8], [9]], [[9], []], "prompt 1: the continuation is empty"),
        ([[7, 8], []], [[9], [9]], "prompt 1: the prompt is empty"),
        ([[7, 8]], [[99_999]], "prompt 0: token id 99999 is outside"),
        ([[7] * 1000], [[8] * 100], "prompt 0: prompt and continuation need 1099 positions"),
        ("text", ["more"], "prompts must be a list of prompts, got str"),
        (["text"], "more", "continuations must be a list of continuations, got str"),
        (["text"], [""], "prompt 0: the continuation is empty"),
        (["text"], [[3.5]], "prompt 0: a prompt must be a string"),
    ],
)
def test_bad_input(make_engine: MakeEngine, prompts: Any, continuations: Any, message: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=message):
        engine.score(prompts, continuations)


def test_the_last_token_needs_no_position(make_engine: MakeEngine) -> None:
    engine = make_engine()
    pairs = [(random_ids(1000, 1), random_ids(25, 2))]
    check(engine, pairs, engine.score(*map(list, zip(*pairs, strict=True))))


def test_nothing_to_score(make_engine: MakeEngine) -> None:
    assert make_engine().score([], []) == []
