"""Crashes and bad manners that a hostile review found, one test each."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.errors import InvalidRequestError
from kvboost.kernels import linears
from tests.fixture_types import MakeEngine
from tests.holes.stock import stock_answer
from tests.threads import at_once
from tests.tiny_models import random_ids, tiny_model, tiny_tokenizer

PROMPT = random_ids(50, seed=9)
ROOT = Path(__file__).parents[2]


def flags(model: torch.nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_inference_mode_and_then_a_plain_call(bits: int, make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_bits=bits)
    with torch.inference_mode():
        engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
        engine.generate_batch([PROMPT[:20], PROMPT[:30]], 3)
    for ids in (PROMPT, [*PROMPT, 8], PROMPT[:40]):
        engine.generate(ids, max_new_tokens=4)
    engine.generate_batch([PROMPT[:20], PROMPT[:30]], 3)
    with torch.inference_mode():
        engine.generate([*PROMPT, 9], max_new_tokens=4)


def test_a_model_made_in_inference_mode(make_engine: MakeEngine) -> None:
    with torch.inference_mode():
        model = tiny_model("llama")
    engine = make_engine(model=model)
    for _ in range(2):
        answer = engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
        assert answer.token_ids == stock_answer(model, PROMPT, 4)
    model.lm_head.weight.data.neg_()
    assert engine.generate(PROMPT, max_new_tokens=4).token_ids == stock_answer(model, PROMPT, 4)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_seeds_of_two_threads_do_not_disturb_each_other(
    options: dict[str, Any], make_engine: MakeEngine
) -> None:
    engines = [make_engine(model=tiny_model("llama", seed=number)) for number in range(2)]

    def answers(engine: KVBoost) -> list[list[int]]:
        return [
            engine.generate(
                PROMPT,
                max_new_tokens=8,
                do_sample=True,
                temperature=2.0,
                seed=seed,
                mode="prefix_cache",
                **options,
            ).token_ids
            for seed in range(6)
        ]

    expected = [answers(engine) for engine in engines]
    assert len({tuple(answer) for answer in expected[0]}) > 1
    found: dict[int, list[list[int]]] = {}

    def drawing() -> None:
        for _ in range(2_000):
            torch.rand(3)

    at_once(
        *(lambda number=number: found.update({number: answers(engines[number])}) for number in range(2)),  # type: ignore[misc]
        drawing,
    )
    assert [found[0], found[1]] == expected


def test_a_seed_leaves_the_callers_generator_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    engine.generate(PROMPT, max_new_tokens=4, do_sample=True, seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_an_engine_made_while_the_model_trains(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    model.train()
    model.model.layers[1].eval()
    before = flags(model)
    engine = make_engine(model=model)
    assert flags(model) == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about checkpoints without gradients
        answer = engine.generate(PROMPT, max_new_tokens=3)
    assert answer.spans[0].reason.endswith("is in train mode")
    assert flags(model) == before
    model.eval()
    for _ in range(2):
        answer = engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
        assert answer.token_ids == stock_answer(model, PROMPT, 4)
    assert answer.cached_tokens == 49


def test_every_train_flag_is_as_it_was(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    model.train()
    model.model.layers[0].mlp.eval()
    before = flags(model)
    engine = make_engine(model=model)
    engine.generate(PROMPT, max_new_tokens=3)
    engine.generate_batch([PROMPT, PROMPT[:20]], 3)
    engine.warm(PROMPT)
    engine.score([PROMPT], [[4]])
    assert flags(model) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_afterwards(dtype: torch.dtype, make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model)
    engine.generate(PROMPT, max_new_tokens=4)
    model.to(dtype)
    for _ in range(2):
        answer = engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
        assert answer.token_ids == stock_answer(model, PROMPT, 4)
        assert "not those that the engine was made for" in answer.spans[0].reason
    engine.generate_batch([PROMPT, PROMPT[:20]], 3)
    model.to(torch.float32)
    for _ in range(2):
        answer = engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
        assert answer.token_ids == stock_answer(model, PROMPT, 4)
    assert answer.cached_tokens == 49


def test_another_attention_implementation_afterwards(make_engine: MakeEngine) -> None:
    model = tiny_model("mistral")
    engine = make_engine(model=model)
    prompts = [PROMPT, PROMPT[:30]]
    for implementation in ("eager", "sdpa", "eager"):
        model.set_attn_implementation(implementation)
        for _ in range(2):
            found = engine.generate_batch(prompts, 4)
            assert [each.token_ids for each in found] == [stock_answer(model, ids, 4) for ids in prompts]
        assert model.config._attn_implementation == implementation


def test_close_frees_what_it_held(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    one, two = make_engine(model=model), make_engine(model=model)
    for engine in (one, two):
        engine.generate(PROMPT, max_new_tokens=4)
        engine.pin(PROMPT)
        assert engine.cache_stats()["packed_weights_bytes"] > 0
    one.close()
    stats = one.cache_stats()
    assert (stats["chunks"], stats["bytes"], stats["workspace_bytes"]) == (0, 0, 0)
    assert not one.core.parts.reader.answers
    assert linears.packed_bytes(model) > 0  # the other engine uses them
    assert two.generate(PROMPT, max_new_tokens=4).cached_tokens == 49
    two.close()
    assert linears.packed_bytes(model) == 0
    two.close()


def test_engines_that_nobody_closed_let_go_of_packed_weights() -> None:
    model = tiny_model("llama")
    engine = KVBoost(model, tiny_tokenizer(), chunk_size=16)
    assert linears.packed_bytes(model) > 0
    other = KVBoost(model, tiny_tokenizer(), chunk_size=16)
    del engine
    gc.collect()
    assert linears.packed_bytes(model) > 0
    other.close()
    assert linears.packed_bytes(model) == 0


FORK = """
import os, sys, threading, time, torch
torch.set_num_threads(1)
from kvboost import KVBoost
from tests.tiny_models import random_ids, tiny_model, tiny_tokenizer
engine = KVBoost(tiny_model("llama"), tiny_tokenizer(), chunk_size=16)
prompt = random_ids(60, seed=1)
expected = engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids
stop = threading.Event()
def work(seed):
    while not stop.is_set():
        engine.generate(random_ids(40, seed=seed), max_new_tokens=20, mode="prefix_cache")
        engine.generate_batch([random_ids(40, seed=seed + 1), random_ids(30, seed=seed + 2)], 8)
        seed += 3
threads = [threading.Thread(target=work, args=(1_000 * number,)) for number in range(3)]
for thread in threads:
    thread.start()
for number in range(40):
    time.sleep(0.02)
    child = os.fork()
    if child == 0:
        own = engine.model.config._attn_implementation == "sdpa"
        bare = not any("forward" in vars(module) for module in engine.model.modules())
        first = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache").token_ids
        again = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
        engine.cache_manager.check_integrity()
        right = first == again.token_ids == expected and again.cached_tokens == 59
        os._exit(0 if own and bare and right else 3)
    deadline = time.time() + 20
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.time() < deadline:
        time.sleep(0.01)
    if status == (0, 0):
        os.kill(child, 9)
    if status != (child, 0):
        break
stop.set()
for thread in threads:
    thread.join()
print("done" if status == (child, 0) else f"fork {number}: {status}")
"""


def test_a_fork_while_threads_run() -> None:
    """The child of a fork has one thread: locks that others held are free, and the model is as it was."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr


@pytest.mark.parametrize("salt", ["half \ud800", 7, b"salt"])
def test_a_salt_that_is_no_text(salt: Any, make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        make_engine(cache_salt=salt)
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        make_engine().generate(PROMPT, max_new_tokens=2, cache_salt=salt)


def test_weights_changed_from_another_thread(make_engine: MakeEngine) -> None:
    engine = make_engine(weights_check_seconds=0.05)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            engine.model.lm_head.weight.data[5] += 0.001
            engine.weights_changed()

    def ask() -> None:
        try:
            for seed in range(12):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    engine.generate(random_ids(30, seed=seed), max_new_tokens=4)
        finally:
            stop.set()

    at_once(change, ask)
    for _ in range(2):
        answer = engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
        assert answer.token_ids == stock_answer(engine.model, PROMPT, 4)
