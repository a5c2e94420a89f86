"""What tests/fuzz found, each in its shortest form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvboost import KVBoost
from tests.holes.stock import stock_answer
from tests.holes.test_hole_4_state_at_store_time import Listener
from tests.tiny_models import random_ids, tiny_model

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
    batch = engine.running_batch(max_rows=4, prompt_tokens=2_048)
    prompts = [random_ids(30 + number, seed=number) for number in range(3)]
    listeners = [Listener() for _ in prompts]
    hook = engine.model.model.layers[0].register_forward_hook(lambda _m, _i, output: output)
    batch.join(engine.read_request(prompts[0], 5), listeners[0])
    hook.remove()
    batch.join(engine.read_request(prompts[1], 5), listeners[1])
    batch.step()
    engine.model.model.layers[1].self_attn.v_proj.weight.data.mul_(-1.5)
    given = [list(each.tokens) for each in listeners]
    batch.join(engine.read_request(prompts[2], 5), listeners[2])
    while batch.rows:
        batch.step()
    for prompt, before, listener in zip(prompts, given, listeners, strict=True):
        rest = stock_answer(engine.model, [*prompt, *before], 5 - len(before))
        assert listener.tokens == before + rest
    with torch.no_grad():
        answer = engine.generate(prompts[2], max_new_tokens=5, mode="prefix_cache")
    assert answer.token_ids == stock_answer(engine.model, prompts[2], 5)
