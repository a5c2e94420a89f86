"""Hole 4: KV is stored, and answers are remembered, only if the model is still what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.batching.scheduler import Scheduler
from kvboost.models import GenerationResult
from tests.checked_requests import read_request
from tests.fixture_types import MakeEngine
from tests.holes.stock import stock_answer
from tests.tiny_models import random_ids, tiny_model

PROMPT = random_ids(50, seed=4)
CHANGED = "the model changed meanwhile"


def change(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(-1.5)


def exact_everywhere(engine: KVBoost, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        for _ in range(2):
            answer = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
            assert answer.token_ids == stock_answer(engine.model, prompt, 4)


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(model, config, adapter_name="one")
    adapted.add_adapter("two", config)
    adapted.set_adapter("one")
    adapted.config.architectures = ["LlamaForCausalLM"]
    return adapted.eval()


def test_prepare_under_one_adapter_and_commit_under_another(make_engine: MakeEngine) -> None:
    model = with_adapters(tiny_model("llama"))
    engine = make_engine(model=model)
    prepared = engine.prepare(PROMPT)
    output = model.generate(**prepared, max_new_tokens=4, do_sample=False)
    model.set_adapter("two")
    model.eval()
    report = engine.commit(prepared, output)
    assert report.stored == 0
    assert report.refused == {CHANGED: 1}
    exact_everywhere(engine, [PROMPT])
    model.set_adapter("one")
    model.eval()
    exact_everywhere(engine, [PROMPT])


def test_an_adapter_switched_while_ones_own_generate_runs(make_engine: MakeEngine) -> None:
    """At prepare and at commit it is the same one, in between it was not."""
    model = with_adapters(tiny_model("llama"))
    engine = make_engine(model=model)
    prepared = engine.prepare(PROMPT)
    model.set_adapter("two")
    output = model.generate(**prepared, max_new_tokens=4, do_sample=False)
    model.set_adapter("one")
    model.eval()
    assert engine.commit(prepared, output).refused == {CHANGED: 1}
    exact_everywhere(engine, [PROMPT])


def test_a_prepared_cache_that_was_used_twice(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prepared = engine.prepare(PROMPT)
    first = engine.model.generate(**prepared, max_new_tokens=4, do_sample=False)
    engine.model(input_ids=torch.tensor([[7, 8, 9]]), past_key_values=prepared["past_key_values"])
    report = engine.commit(prepared, first)
    assert report.stored == 0
    assert report.refused == {"the cache does not hold what prompt and answer say": 1}


def test_a_stream_that_begins_after_the_change(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
    started: list[Callable[[], None]] = []
    monkeypatch.setattr("threading.Thread.start", lambda self: started.append(self.run))
    stream = engine.stream(PROMPT, max_new_tokens=4, mode="prefix_cache")
    monkeypatch.undo()
    change(engine.model)
    started[0]()
    stream._thread = None
    assert stream.result.token_ids == stock_answer(engine.model, PROMPT, 4)
    assert stream.result.cached_tokens == 0
    exact_everywhere(engine, [PROMPT])


def test_a_change_while_an_answer_is_made(make_engine: MakeEngine) -> None:
    """What was computed before and after it belongs to no model: nothing is kept."""
    engine = make_engine()

    def changing(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if _ids.shape[1] == len(PROMPT) + 2:
            change(engine.model)
        return scores

    engine.generate(PROMPT, max_new_tokens=6, mode="prefix_cache", logits_processor=[changing])
    stats = engine.cache_stats()
    assert stats["chunks"] == 0
    assert stats["refused"] == {CHANGED: 1}
    exact_everywhere(engine, [PROMPT])


def test_answers_of_a_changed_model_are_not_remembered(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def changing(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        change(engine.model)
        return scores

    engine.generate([{"role": "user", "content": "hello"}], max_new_tokens=6, logits_processor=[changing])
    assert not len(engine.core.parts.reader.answers)


@pytest.mark.parametrize("taken", [1, 2])
def test_stream_many_with_a_change_between_two_results(taken: int, make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [[*PROMPT[:30], *random_ids(3 + number, seed=number)] for number in range(4)]
    stream = engine.stream_many(prompts, 4, mode="prefix_cache")
    before = {index: stock_answer(engine.model, prompt, 4) for index, prompt in enumerate(prompts)}
    for _ in range(taken):
        index, answer = next(stream)
        assert answer.token_ids == before[index]
    change(engine.model)
    for index, answer in stream:
        # those that had finished in the same step are through
        assert answer.token_ids in (before[index], stock_answer(engine.model, prompts[index], 4))
    exact_everywhere(engine, prompts)


def test_stream_many_answers_of_unfinished_rows_come_from_the_model_as_it_is(make_engine: MakeEngine) -> None:
    engine = make_engine()
    candidates = [[*PROMPT[:30], *random_ids(3 + number, seed=number)] for number in range(20)]
    first_tokens = {stock_answer(engine.model, prompt, 1)[0]: prompt for prompt in candidates}
    ends, *_ = first_tokens
    prompts = list(first_tokens.values())
    assert len(prompts) > 2
    stream = engine.stream_many(prompts, 6, mode="prefix_cache", eos_token_id=ends)
    assert next(stream)[1].token_ids == [ends]
    change(engine.model)
    for index, answer in stream:
        assert answer.token_ids == stock_answer(engine.model, prompts[index], 6, eos_token_id=ends)
    exact_everywhere(engine, prompts)


class Listener:
    """Notes what becomes of a request of the running batch."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.result: GenerationResult | None = None

    def token(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def done(self, result: GenerationResult) -> None:
        self.result = result

    def failed(self, error: Exception) -> None:
        raise error


@pytest.mark.parametrize("after", range(5))
def test_a_running_batch_with_a_change_between_two_steps(after: int, make_engine: MakeEngine) -> None:
    engine = make_engine()
    batch = engine.core.scheduler(max_sequences=4, max_tokens=2_048)
    prompts = [[*PROMPT[:30], *random_ids(4 + number, seed=number)] for number in range(3)]
    listeners = [Listener() for _ in prompts]
    for prompt, listener in zip(prompts, listeners, strict=True):
        batch.join(read_request(engine, prompt, 6), listener)
    for _ in range(after):
        batch.step()
    given = [list(listener.tokens) for listener in listeners]
    change(engine.model)
    late = Listener()
    batch.join(read_request(engine, [*PROMPT[:30], 9, 9], 6), late)
    while batch.sequences:
        batch.step()
    for prompt, before, listener in zip(prompts, given, listeners, strict=True):
        assert listener.tokens[: len(before)] == before
        assert listener.tokens == before + stock_answer(engine.model, [*prompt, *before], 6 - len(before))
        assert listener.result is not None
        assert listener.result.token_ids == listener.tokens
        if not before or after < 2:
            assert {span.reason for span in listener.result.spans} == {CHANGED}
    assert late.tokens == stock_answer(engine.model, [*PROMPT[:30], 9, 9], 6)
    exact_everywhere(engine, [*prompts, [*PROMPT[:30], 9, 9]])


def test_a_running_batch_on_a_model_that_nothing_is_known_of(make_engine: MakeEngine) -> None:
    engine = make_engine()
    batch = engine.core.scheduler(max_sequences=4, max_tokens=2_048)
    first, second = Listener(), Listener()
    batch.join(read_request(engine, PROMPT, 6), first)
    batch.step()
    batch.step()
    given = list(first.tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch.join(read_request(engine, PROMPT[:20], 4), second)
        while batch.sequences:
            batch.step()
        assert second.tokens == stock_answer(engine.model, PROMPT[:20], 4)
        assert first.tokens == given + stock_answer(engine.model, [*PROMPT, *given], 6 - len(given))
    assert second.result is not None
    assert second.result.spans[0].reason == "gated: autocast is on"
    exact_everywhere(engine, [PROMPT, PROMPT[:20]])


def test_a_score_while_the_model_changes(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    step = Scheduler.step

    def changing(scheduler: Scheduler) -> None:
        step(scheduler)
        change(engine.model)

    monkeypatch.setattr(Scheduler, "step", changing)
    engine.score([PROMPT, PROMPT[:40]], [[5, 6], [7]])
    exact_everywhere(engine, [PROMPT, PROMPT[:40]])
