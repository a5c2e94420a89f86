"""What tests/fuzz found, each in its shortest form."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.identity.weights import probed_places
from tests.checked_requests import read_request
from tests.fixture_types import MakeEngine
from tests.holes.stock import stock_answer
from tests.holes.test_hole_4_state_at_store_time import Listener
from tests.tiny_models import random_ids, tiny_model


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


def test_packed_weights_after_tensors_were_replaced_by_equal_ones(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model)
    prompt = random_ids(30, seed=3)
    engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    model.model.layers[0].mlp.up_proj.weight.data.mul_(-1.5)
    engine.clear()
    answer = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    assert answer.token_ids == stock_answer(model, prompt, 4)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_early_exit_does_not_assist_itself(architecture: str, make_engine: MakeEngine) -> None:
    engine = make_engine(architecture)
    prompt = random_ids(39, seed=4)
    expected = stock_answer(engine.model, prompt, 5, assistant_early_exit=1)
    for mode in ("baseline", "prefix_cache"):
        answer = engine.generate(prompt, max_new_tokens=5, mode=mode, assistant_early_exit=1)
        assert answer.token_ids == expected


def test_a_running_batch_with_requests_in_and_out_of_the_arena(make_engine: MakeEngine) -> None:
    engine = make_engine()
    batch = engine.core.scheduler(max_sequences=4, max_tokens=2_048)
    prompts = [random_ids(30 + number, seed=number) for number in range(3)]
    listeners = [Listener() for _ in prompts]
    hook = engine.model.model.layers[0].register_forward_hook(lambda _m, _i, output: output)
    batch.join(read_request(engine, prompts[0], 5), listeners[0])
    hook.remove()
    batch.join(read_request(engine, prompts[1], 5), listeners[1])
    batch.step()
    engine.model.model.layers[1].self_attn.v_proj.weight.data.mul_(-1.5)
    given = [list(each.tokens) for each in listeners]
    batch.join(read_request(engine, prompts[2], 5), listeners[2])
    while batch.sequences:
        batch.step()
    for prompt, before, listener in zip(prompts, given, listeners, strict=True):
        rest = stock_answer(engine.model, [*prompt, *before], 5 - len(before))
        assert listener.tokens == before + rest
    with torch.no_grad():
        answer = engine.generate(prompts[2], max_new_tokens=5, mode="prefix_cache")
    assert answer.token_ids == stock_answer(engine.model, prompts[2], 5)


def edited(model: Any, factor: float) -> None:
    """Rows of the embeddings through .data, but for the values that every request looks at."""
    weight = model.model.embed_tokens.weight
    chosen = torch.zeros(weight.shape, dtype=torch.bool)
    chosen[100:140] = True
    chosen.view(-1)[torch.from_numpy(probed_places(weight.numel()))] = False
    weight.data[chosen] *= factor


def test_a_part_of_a_weight_that_was_changed_and_changed_back(make_engine: MakeEngine) -> None:
    """What was stored before the change was noticed has the digest of other weights: it is forgotten."""
    engine = make_engine(weights_check_seconds=None)
    prompt = list(range(100, 140))
    edited(engine.model, 4.0)
    before = engine.namespace()
    engine.weights_changed()
    assert engine.generate(prompt, max_new_tokens=4, mode="prefix_cache").cached_tokens == 0
    assert engine.generate(prompt, max_new_tokens=4, mode="prefix_cache").cached_tokens == 39
    engine.pin(prompt)
    edited(engine.model, 0.25)
    assert engine.weights_changed()
    assert engine.namespace().key != before.key  # it might be what somebody else's KV is under
    answer = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    assert answer.token_ids == stock_answer(engine.model, prompt, 4)
    assert answer.cached_tokens == 0
    assert engine.generate(prompt, max_new_tokens=4, mode="prefix_cache").cached_tokens == 39
    assert engine.cache_stats()["refused"] == {"weights had changed unseen": 1}


def test_nothing_is_forgotten_where_nothing_was_stored_meanwhile(make_engine: MakeEngine) -> None:
    engine = make_engine(weights_check_seconds=None)
    prompt = list(range(100, 140))
    engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    engine.weights_changed()
    edited(engine.model, 4.0)
    assert engine.weights_changed()
    edited(engine.model, 0.25)
    assert engine.weights_changed()
    assert engine.generate(prompt, max_new_tokens=4, mode="prefix_cache").cached_tokens == 39


def test_kv_of_other_weights_is_not_left_on_disk(make_engine: MakeEngine, tmp_path: Path) -> None:
    prompt = list(range(100, 140))
    model = tiny_model("llama")
    one = make_engine(model=model, disk_cache_dir=tmp_path, weights_check_seconds=None)
    edited(model, 4.0)
    one.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    assert one.core.parts.disk is not None
    one.core.parts.disk.flush()
    one.close()
    two = make_engine(disk_cache_dir=tmp_path)
    answer = two.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    assert answer.cached_tokens == 0
    assert answer.token_ids == stock_answer(two.model, prompt, 4)


@pytest.mark.parametrize("field", [{"prompt_lookup_num_tokens": 2}, {"use_cache": False}], ids=str)
def test_prepare_under_a_generation_config_that_feeds_the_whole_prompt(
    field: dict[str, Any], make_engine: MakeEngine
) -> None:
    engine = make_engine()
    prompt = random_ids(40, seed=6)
    engine.warm(prompt[:20])
    for name, value in field.items():
        setattr(engine.model.generation_config, name, value)
    prepared = engine.prepare(prompt)
    assert prepared.spans[0].reason.startswith("gated: the generation config asks for")
    output = engine.model.generate(**prepared, max_new_tokens=4, do_sample=False)
    assert engine.commit(prepared, output).stored == 0
    for name in field:
        setattr(engine.model.generation_config, name, None)
    assert output[0, 40:].tolist() == stock_answer(engine.model, prompt, 4)


def test_another_dtype_seen_first_by_the_scrubber(make_engine: MakeEngine) -> None:
    engine = make_engine(weights_check_seconds=0.1)
    prompt = random_ids(40, seed=7)
    engine.generate(prompt, max_new_tokens=4)
    engine.model.to(torch.bfloat16)
    time.sleep(0.3)
    answer = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    assert "not those that the engine was made for" in answer.spans[0].reason
