"""Repair on the device: keys turned in one launch, tokens chosen by attention that is observed in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvboost.batching.batch_memory import BatchMemory
from kvboost.kernels import turning
from kvboost.kernels.windows import windows_of
from kvboost.kernels.work import Stretch
from kvboost.kv import rope
from kvboost.kv.arena import Arena
from kvboost.models import ReusedRun
from kvboost.reuse.strategies.cacheblend import TAIL_TOKENS, attention_from_the_end
from kvboost.run import decode
from kvboost.run.packed_step import PackedModel
from tests.engine.reuse_checks import pay_always
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids, tiny_model

pytestmark = [
    pytest.mark.usefixtures("approximate_reuse"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [1, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_keys_are_turned_in_one_launch(dtype: torch.dtype, pairs: int, interleaved: bool) -> None:
    slab = torch.randn(6, 300, 2 * pairs + 8, device="cuda").to(dtype)
    want = slab.clone()
    turn = rope.Turn(tuple(10_000.0 ** (-number / pairs) for number in range(pairs)), interleaved)
    stretches = [(3, 40, 17), (50, 51, -5), (60, 160, 30_000), (200, 299, 17)]
    rows = [0, 2, 5]
    for start, end, shift in stretches:
        for row in rows:
            rope._turn_(want[row, start:end, : turn.channels], turn, shift)
    turning.turn(slab, rows, stretches, turn.inv_freq, interleaved=interleaved)
    assert torch.equal(slab[[1, 3, 4]], want[[1, 3, 4]])
    one_rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(slab.float(), want.float(), rtol=one_rounding, atol=one_rounding)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_observed_in_place(
    architecture: str, dtype: torch.dtype, make_engine: MakeEngine
) -> None:
    engine = make_engine(architecture, device="cuda", dtype=dtype)
    model, layout = engine.model, engine.layout
    tokens = min(160, windows_of(model).smallest or 160)  # beyond a window nothing is reused so
    ids = np.array(random_ids(tokens, seed=1))
    arena, elsewhere = Arena(layout, tokens), Arena(layout, 400)
    first, second, start = tokens // 4, tokens * 3 // 4, tokens - min(TAIL_TOKENS, tokens // 5)
    runs = [ReusedRun(0, first, 0, True), ReusedRun(first + 8, second, 4, False)]
    with decode.running(model, fast=True):
        decode.prefill(model, ids, arena, tokens)
        arena.set_length(second)
        for slab, other in zip(arena.slabs, elsewhere.slabs, strict=True):
            other.fill_(float("nan"))
            other[:, :, 100 : 100 + first] = slab[:, :, :first]
            other[:, :, 200 : 200 + second - first - 8] = slab[:, :, first + 8 : second]
        want = attention_from_the_end(model, ids, arena, runs, tokens - start)
        seen = [Stretch(100, first, 0), Stretch(200, second - first - 8, first + 8)]
        found = PackedModel(model, elsewhere).observe(seen, ids[start:], Stretch(350, tokens - start, start))
    assert want is not None
    assert found is not None
    close = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found, want, rtol=close, atol=close)


def answers(engine: Any) -> tuple[list[list[int]], list[int]]:
    """Of documents in several orders: tokens, and how many were computed again."""
    documents = [random_ids(70, seed=seed) for seed in range(4)]
    for document in documents:
        engine.warm(document)
    results = [
        engine.generate(
            [*(token for number in order for token in documents[number]), *random_ids(9, seed=sum(order))],
            8,
            mode="chunk_kv_reuse",
            recompute_ratio=0.15,
        )
        for order in ([1, 0, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0], [1, 3, 2, 0], [0, 2, 1, 3])
    ]
    return [result.token_ids for result in results], [result.recomputed_tokens for result in results]


def test_probes_are_captured_and_choose_what_a_copy_would(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    observed = make_engine("llama", device="cuda")
    found = answers(observed)
    steps = observed.cache_stats()["steps"]
    assert steps["probes"] == 5
    assert steps["captured_probes"] >= 2
    monkeypatch.setattr(BatchMemory, "probe_slots", lambda *_: None)
    copied = make_engine("llama", device="cuda")
    assert answers(copied) == found
    assert not copied.cache_stats()["steps"]["probes"]
    assert all(found[1])


def test_the_guard_reckons_with_what_was_measured(make_engine: MakeEngine) -> None:
    model = tiny_model("llama", hidden_size=2048, intermediate_size=8192, num_attention_heads=16)
    rates = make_engine(model=model, device="cuda", dtype=torch.bfloat16).core.parts.fit.costs.rates
    assert rates is not None
    assert 0 < rates.captured_s <= rates.launch_s < 1
    assert 0 < rates.token_s < 1e-3
    assert 0 <= rates.pair_s < rates.token_s
    assert rates.forward_s(100_000, 0) > rates.forward_s(16, 0) >= rates.captured_s
    from_host = make_engine("llama", device="cuda").core.parts.fit.costs.rates
    on_device = make_engine("llama", device="cuda", cache_device="model").core.parts.fit.costs.rates
    assert from_host is not None
    assert on_device is not None
    assert from_host.moved_s > on_device.moved_s
