"""KV on its way out of a GPU, whole when it is read, and copies that stay there."""

from __future__ import annotations

import gc

import pytest
import torch

from kvboost.kv.offload import Offloader
from kvboost.kv.pinned import POOL
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def busy() -> None:
    """Give the GPU some tenths of a second to do."""
    torch.cuda._sleep(300_000_000)


def test_a_copy_is_whole_when_it_is_read() -> None:
    device = torch.device("cuda", 0)
    POOL.serve(device)
    offloader = Offloader(device, ring_bytes=1 << 20)
    slab = torch.zeros(8, 4_000, 64, device=device)
    copies = []
    for number in range(40):  # each takes an eighth of the ring, so it goes round
        if number % 10 == 0:
            busy()
        slab[:, 7 : 7 + 64].fill_(number)
        copies.append(offloader.copy(slab[:, 7 : 7 + 64]))
        slab[:, 7 : 7 + 64].fill_(-1)  # its slots are another's at once
    for number, (host, arrival) in enumerate(copies):
        assert arrival is not None
        arrival.wait()
        assert bool((host == number).all()), number
    host, arrival = offloader.copy(torch.ones(1 << 20, device=device))  # larger than the ring
    assert arrival is None
    assert bool((host == 1).all())


def test_the_device_reads_what_has_arrived() -> None:
    device = torch.device("cuda", 0)
    POOL.serve(device)
    offloader = Offloader(device)
    for number in range(1, 6):
        source = torch.full((1 << 20,), float(number), device=device)
        busy()
        host, arrival = offloader.copy(source)
        assert arrival is not None
        with torch.cuda.stream(torch.cuda.Stream()):  # which knows nothing of the other streams
            arrival.order(device)
            back = host.to(device, non_blocking=True)
            assert bool((back == number).all())


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_hot_chunks_lie_on_the_device(make_engine: MakeEngine, bits: int) -> None:
    engine = make_engine("llama", device="cuda", kv_cache_bits=bits, gpu_cache_bytes=10_000_000)
    prompt = random_ids(150, seed=1)
    engine.generate(prompt, 1, mode="prefix_cache")
    stats = engine.cache_stats()["gpu_cache"]
    assert 0 < stats["bytes"] <= stats["budget"] == 10_000_000
    engine.core.resident.drop()  # what lies in the engine's batch was not quantized
    want = engine.generate([*prompt, 3], 8, mode="prefix_cache").token_ids
    engine.core.resident.drop()
    assert engine.generate([*prompt, 3], 8, mode="prefix_cache").token_ids == want
    found = engine.cache_stats()["gpu_cache"]
    assert found["hits"] > stats["hits"]
    assert found["misses"] == stats["misses"]
    if bits == 16:
        assert engine.generate([*prompt, 3], 8, mode="baseline").token_ids == want
    engine.clear()
    gc.collect()
    assert not engine.cache_stats()["gpu_cache"]["bytes"]


def test_a_tier_that_is_too_small_is_passed_by(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", device="cuda", gpu_cache_bytes=20_000)
    prompt = random_ids(150, seed=1)
    want = engine.generate(prompt, 8, mode="baseline").token_ids
    for _ in range(3):
        assert engine.generate(prompt, 8, mode="prefix_cache").token_ids == want
        engine.core.resident.drop()
        stats = engine.cache_stats()["gpu_cache"]
        assert stats["bytes"] <= 20_000
