"""The engine's behaviour on tiny models: warm, generate, stream, prepare and commit, budgets, state."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import GenerationMode
from tests.fixture_types import MakeEngine
from tests.threads import in_threads
from tests.tiny_models import VOCAB, random_ids, tiny_model


def test_warm_reports_what_it_kept(make_engine: MakeEngine) -> None:
    engine = make_engine()
    result = engine.warm(random_ids(40, seed=1))
    assert (result.chunks_stored, result.token_count, result.partial_tail_tokens) == (3, 40, 8)
    assert not result.chunk_boundary_aligned
    assert result.alignment_warning is not None
    assert int(engine.warm(random_ids(48, seed=2))) == 3
    assert engine.warm(random_ids(48, seed=2)).alignment_warning is None
    assert engine.cache_stats()["chunks"] == 6


def test_warm_runs_one_contiguous_prefill(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = random_ids(50, seed=3)
    engine.warm(ids)
    with torch.no_grad():
        reference = engine.model(torch.tensor([ids]), use_cache=True).past_key_values
    for match in engine.cache_manager.match_prefix(
        ids, engine.core.parts.fit._namespaces.current("")
    ).matches:
        for (key, value), layer in zip(match.chunk.past_key_values, reference.layers, strict=True):
            torch.testing.assert_close(key, layer.keys[:, :, match.start : match.end], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(
                value, layer.values[:, :, match.start : match.end], atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize("at", [0, 1, 15, 16, 17, 31, 32, 39, 40])
def test_reuse_goes_down_to_the_token(at: int, make_engine: MakeEngine) -> None:
    engine = make_engine()
    text = random_ids(40, seed=4, high=100)
    engine.warm(text)
    prompt = text[:at] + random_ids(6, seed=5, low=100)
    result = engine.generate(prompt, max_new_tokens=2, mode="prefix_cache")
    assert result.cached_tokens == at
    assert sum(span.length for span in result.spans) == len(prompt)
    if 0 < at < 40:
        assert result.spans[-1].reason == (f"diverged at token {at}: expected {text[at]}, got {prompt[at]}")


def test_a_fully_cached_prompt_computes_its_last_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(33, seed=6)
    engine.warm(prompt)
    result = engine.generate(prompt, max_new_tokens=5, mode="prefix_cache")
    assert result.cached_tokens == 32
    assert result.token_ids == engine.generate(prompt, max_new_tokens=5, mode="baseline").token_ids


def test_a_one_token_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine()
    result = engine.generate([7], max_new_tokens=3)
    assert result.cached_tokens == 0
    assert result.token_ids == engine.generate([7], max_new_tokens=3, mode="baseline").token_ids


def test_answers_are_stored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(20, seed=7)
    result = engine.generate(prompt, max_new_tokens=30, min_new_tokens=30)
    follow_up = prompt + result.token_ids + random_ids(4, seed=8)
    assert engine.generate(follow_up, max_new_tokens=2).cached_tokens == 20 + 29


def test_baseline_neither_reads_nor_writes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(30, seed=9)
    engine.warm(prompt)
    before = engine.cache_stats()
    result = engine.generate([*prompt, 9], max_new_tokens=4, mode=GenerationMode.BASELINE)
    assert result.cached_tokens == 0
    assert result.mode == "baseline"
    assert engine.cache_stats() == before


def test_salts_do_not_see_each_other(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(30, seed=10)
    engine.generate(prompt, max_new_tokens=2, cache_salt="alice")
    result = engine.generate(prompt, max_new_tokens=2, cache_salt="bob")
    assert result.cached_tokens == 0
    assert result.spans[0].reason == "never stored"
    assert engine.generate(prompt, max_new_tokens=2, cache_salt="alice").cached_tokens == 29


def test_text_warmed_at_an_offset_is_no_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = random_ids(32, seed=11)
    assert engine.warm(ids, position_offset=100).chunks_stored == 2
    assert engine.generate(ids, max_new_tokens=2, mode="prefix_cache").cached_tokens == 0
    offset_chunks = [
        entry.chunk
        for entry in engine.cache_manager._store.entries.values()
        if entry.chunk.position_start >= 100
    ]
    assert sorted(chunk.position_start for chunk in offset_chunks) == [100, 116]
    with pytest.raises(ValueError, match="position_offset"):
        engine.warm(ids, position_offset=-1)
    with pytest.raises(ValueError, match="1024"):
        engine.warm(ids, position_offset=1000)


def test_a_text_larger_than_the_budget_keeps_its_start(make_engine: MakeEngine) -> None:
    engine = make_engine(max_chunks=3)
    ids = random_ids(100, seed=12)
    assert engine.warm(ids).chunks_stored == 3
    result = engine.generate(ids, max_new_tokens=2, mode="prefix_cache")
    assert result.cached_tokens == 48
    assert result.token_ids == engine.generate(ids, max_new_tokens=2, mode="baseline").token_ids


def test_no_room_at_all_still_answers(make_engine: MakeEngine) -> None:
    engine = make_engine(max_cache_bytes=10)
    ids = random_ids(40, seed=13)
    for _ in range(2):
        result = engine.generate(ids, max_new_tokens=4)
        assert result.cached_tokens == 0
    assert result.token_ids == engine.generate(ids, max_new_tokens=4, mode="baseline").token_ids
    assert engine.cache_stats()["refused"]["larger than the budget"] >= 1


def test_chunk_boundary_window_is_exact(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_boundary_window=6)
    text = "One sentence. Another one, longer. And a third! Is this the fourth? It is. " * 3
    engine.warm(text)
    prompt = text[:150] + "something else"
    result = engine.generate(prompt, max_new_tokens=12, mode="prefix_cache")
    assert result.cached_tokens >= 150
    assert result.token_ids == engine.generate(prompt, max_new_tokens=12, mode="baseline").token_ids


def test_stream_closed_early_releases_everything(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm("a prompt " * 4)
    stream = engine.stream("a prompt " * 5, max_new_tokens=400, min_new_tokens=400)
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert len(stream.result.token_ids) < 400
    assert list(stream) == []
    assert engine.generate("a prompt " * 5, max_new_tokens=4).cached_tokens == 44


def test_stream_raises_in_the_readers_thread(make_engine: MakeEngine, monkeypatch: Any) -> None:
    engine = make_engine()

    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("the model broke")

    monkeypatch.setattr(engine.model, "generate", broken)
    with pytest.raises(RuntimeError, match="the model broke"):
        list(engine.stream("hello", max_new_tokens=4))


def test_an_error_inside_generate_leaves_all_usable(make_engine: MakeEngine, monkeypatch: Any) -> None:
    engine = make_engine()
    prompt = random_ids(40, seed=14)
    engine.warm(prompt[:30])
    with monkeypatch.context() as patch:

        def broken(*_args: Any, **_kwargs: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(engine.model, "generate", broken)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompt, max_new_tokens=4)
    engine.cache_manager.check_integrity()
    assert engine.model.config._attn_implementation == "sdpa"
    result = engine.generate(prompt, max_new_tokens=4)
    assert result.cached_tokens == 30
    assert result.token_ids == engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids


def test_prepare_and_commit(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(50, seed=15)
    engine.warm(prompt[:37])
    prepared = engine.prepare(prompt)
    assert prepared.spans[-1].start == 37
    output = engine.model.generate(**prepared, max_new_tokens=90, min_new_tokens=90, do_sample=False)
    expected = engine.generate(prompt, max_new_tokens=90, min_new_tokens=90, mode="baseline")
    assert output[0, 50:].tolist() == expected.token_ids
    report = engine.commit(prepared, output)
    assert report.stored > 0
    follow_up = output[0].tolist() + random_ids(5, seed=16)
    result = engine.generate(follow_up, max_new_tokens=4, mode="prefix_cache")
    assert result.cached_tokens == 50 + 89
    assert result.token_ids == engine.generate(follow_up, max_new_tokens=4, mode="baseline").token_ids


def test_commit_refuses_what_is_not_its_output(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(20, seed=17)
    prepared = engine.prepare(prompt)
    for wrong in ([1, 2, 3], random_ids(30, seed=18), [prompt, prompt]):
        with pytest.raises(ValueError, match="output_ids"):
            engine.commit(prepared, wrong)
    assert len(engine.cache_manager) == 0


def test_commit_after_beams_stores_the_prompt_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(40, seed=19)
    prepared = engine.prepare(prompt)
    prepared["past_key_values"].batch_repeat_interleave(2)
    output = engine.model.generate(**prepared, max_new_tokens=8, num_beams=2, do_sample=False)
    engine.commit(prepared, output)
    result = engine.generate([*output[0].tolist(), 9, 8], max_new_tokens=4, mode="prefix_cache")
    assert result.cached_tokens == 40
    assert (
        result.token_ids
        == engine.generate([*output[0].tolist(), 9, 8], max_new_tokens=4, mode="baseline").token_ids
    )


def test_the_model_is_as_it_was_before(make_engine: MakeEngine) -> None:
    model = tiny_model("gemma3")
    model.train()
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = set(vars(model))
    engine = make_engine(model=model)
    engine.warm(random_ids(40, seed=20))
    for options in ({}, {"num_beams": 2}, {"do_sample": True, "seed": 1}, {"prompt_lookup_num_tokens": 3}):
        engine.generate(random_ids(50, seed=20), max_new_tokens=4, **options)
    assert model.training
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.to_dict() == generation
    assert set(vars(model)) == attributes
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_sampling_leaves_the_callers_random_state(make_engine: MakeEngine) -> None:
    engine = make_engine()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = engine.generate("hello", max_new_tokens=12, do_sample=True, seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert engine.generate("hello", max_new_tokens=12, do_sample=True, seed=1).token_ids == first.token_ids
    assert engine.generate("hello", max_new_tokens=12, do_sample=True, seed=2).token_ids != first.token_ids


def test_chat_answers_are_spliced(make_engine: MakeEngine) -> None:
    engine = make_engine()
    messages = [{"role": "user", "content": "hi"}]
    unknown = list(range(len(engine.tokenizer), VOCAB))  # no text has them, so no chat may
    first = engine.generate(messages, max_new_tokens=9, mode="prefix_cache", suppress_tokens=unknown)
    messages += [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "and?"}]
    second = engine.generate(messages, max_new_tokens=9, mode="prefix_cache")
    assert second.cached_tokens == first.prompt_tokens + first.generated_tokens - 1
    assert second.token_ids == engine.generate(messages, max_new_tokens=9, mode="baseline").token_ids


def test_time_to_first_token_is_wall_time(make_engine: MakeEngine, monkeypatch: Any) -> None:
    engine = make_engine()
    slow = engine.cache_manager.match_prefix

    def delayed(*args: Any, **kwargs: Any) -> Any:
        threading.Event().wait(0.2)
        return slow(*args, **kwargs)

    monkeypatch.setattr(engine.cache_manager, "match_prefix", delayed)
    result = engine.generate(random_ids(20, seed=21), max_new_tokens=3)
    assert 200 <= result.ttft_ms <= result.total_ms


def test_changed_weights_are_noticed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_ids(40, seed=22)
    engine.warm(prompt)
    with torch.no_grad():
        engine.model.model.layers[1].mlp.up_proj.weight[3, 5] += 0.5
    result = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    assert result.cached_tokens == 0
    assert result.spans[0].reason == "other namespace"
    assert result.token_ids == engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids


def test_threads_give_the_sequential_answers(make_engine: MakeEngine) -> None:
    engine = make_engine(max_chunks=12)
    prompts = [random_ids(30, seed=k % 3) + random_ids(6, seed=100 + k) for k in range(24)]
    expected = [engine.generate(prompt, max_new_tokens=6, mode="baseline").token_ids for prompt in prompts]
    results: list[Any] = [None] * len(prompts)

    def work(first: int) -> None:
        for index in range(first, len(prompts), 4):
            results[index] = engine.generate(prompts[index], max_new_tokens=6, mode="prefix_cache").token_ids

    in_threads(4, work)
    assert results == expected


def test_two_engines_share_a_model(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    one, two = make_engine(model=model), make_engine(model=model, chunk_size=8)
    prompt = random_ids(40, seed=23)
    one.warm(prompt)
    assert two.generate(prompt, max_new_tokens=3).cached_tokens == 0
    assert one.generate(prompt, max_new_tokens=3).cached_tokens == 39


def test_clear_and_close(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate(random_ids(40, seed=24), max_new_tokens=4)
    assert engine.cache_stats()["workspace_bytes"] > 0
    engine.clear()
    assert engine.cache_stats()["chunks"] == 0
    assert engine.cache_stats()["bytes"] == 0
    assert engine.cache_stats()["workspace_bytes"] == 0
    engine.close()
    engine.close()


def test_numpy_and_tensor_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = random_ids(12, seed=25)
    expected = engine.generate(ids, max_new_tokens=3).token_ids
    assert engine.generate(np.array(ids), max_new_tokens=3).token_ids == expected
    assert engine.generate(torch.tensor(ids), max_new_tokens=3).token_ids == expected


def test_a_failure_while_storing_is_a_miss(make_engine: MakeEngine, monkeypatch: Any) -> None:
    engine = make_engine()
    ids = random_ids(40, seed=26)
    expected = engine.generate(ids, max_new_tokens=3, mode="baseline").token_ids

    def broken(*_args: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvboost.kv.arena.Arena.between", broken)
        assert engine.generate(ids, max_new_tokens=3).token_ids == expected
    assert engine.cache_stats()["refused"] == {"RuntimeError while storing": 1}
    assert engine.generate(ids, max_new_tokens=3).cached_tokens == 0
    assert engine.generate(ids, max_new_tokens=3).cached_tokens == 39
