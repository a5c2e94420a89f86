"""What only a GPU can tell: exactness in bfloat16, both homes of the cache, bit-exactness, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.checked_requests import read_request
from tests.engine.reuse_checks import check_store, documents, joined, pay_always
from tests.engine.test_scheduler import run
from tests.equivalence.capture import generate_with_logits
from tests.fixture_types import MakeEngine
from tests.tiny_models import ARCHITECTURES, long_model, random_ids, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("cache_device", ["cpu", "model"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefix_hit_equals_baseline(architecture: str, cache_device: str, make_engine: MakeEngine) -> None:
    engine = make_engine(architecture, device="cuda", cache_device=cache_device)
    shared = random_ids(150, seed=1)
    engine.warm(shared)
    for cut, tail in ((1, 5), (17, 60), (100, 70), (149, 20), (150, 9)):
        prompt = shared[:cut] + random_ids(tail, seed=cut, low=100)
        expected, expected_logits = generate_with_logits(engine, prompt, mode="baseline", max_new_tokens=24)
        result, logits = generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=24)
        assert result.cached_tokens >= cut
        assert (logits - expected_logits).abs().max() <= 1e-2 * expected_logits.abs().max()
        assert result.token_ids == expected.token_ids


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_bfloat16_logits_stay_close(architecture: str, make_engine: MakeEngine) -> None:
    engine = make_engine(architecture, device="cuda", dtype=torch.bfloat16)
    shared = random_ids(150, seed=2)
    engine.warm(shared)
    prompt = shared[:131] + random_ids(20, seed=3)
    _, expected = generate_with_logits(engine, prompt, mode="baseline", max_new_tokens=1)
    result, logits = generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=1)
    assert result.cached_tokens == 131
    assert (logits - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("tokens", [2_100, 3_300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("known", [0, 700])
def test_long_prompts_in_half_precision_stay_close(
    known: int, dtype: torch.dtype, tokens: int, make_engine: MakeEngine
) -> None:
    """Prompts of some thousand tokens go through torch's own kernel, in parts where text is known."""
    engine = make_engine(model=long_model(dtype=dtype), device="cuda")
    shared = random_ids(known, seed=4)
    if known:
        engine.warm(shared)
    prompt = [*shared, *random_ids(tokens, seed=tokens)]
    _, expected = generate_with_logits(engine, prompt, mode="baseline", max_new_tokens=2)
    result, logits = generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=2)
    assert result.cached_tokens == known
    assert (logits - expected).norm() <= 0.05 * expected.norm()
    steps = engine.cache_stats()["steps"]
    assert steps["by_kernel"] == steps["forwards"] > 0


@pytest.mark.parametrize("cache_device", ["cpu", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "phi3"])
def test_bit_exact(architecture: str, dtype: torch.dtype, cache_device: str, make_engine: MakeEngine) -> None:
    engine = make_engine(architecture, device="cuda", dtype=dtype, bit_exact=True, cache_device=cache_device)
    shared = random_ids(160, seed=4)
    engine.warm(shared)
    for cut, tail in ((40, 30), (128, 16), (160, 45)):
        prompt = shared[:cut] + random_ids(tail, seed=cut)
        expected, expected_logits = generate_with_logits(engine, prompt, mode="baseline", max_new_tokens=16)
        result, logits = generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=16)
        assert result.cached_tokens == cut - cut % 16
        assert torch.equal(logits, expected_logits)
        assert result.token_ids == expected.token_ids


@pytest.mark.parametrize("cache_device", ["cpu", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "error"), [(8, 0.05), ("k8v4", 0.3), (4, 0.5)])
def test_quantized_kv_stays_close(
    bits: Any, error: float, dtype: torch.dtype, cache_device: str, make_engine: MakeEngine
) -> None:
    engine = make_engine("llama", device="cuda", dtype=dtype, kv_cache_bits=bits, cache_device=cache_device)
    shared = random_ids(150, seed=12)
    engine.warm(shared)
    engine.cache_manager.check_integrity()
    prompt = shared[:131] + random_ids(20, seed=13)
    _, expected = generate_with_logits(engine, prompt, mode="baseline", max_new_tokens=1)
    engine.core.parts.workspace.drop()  # what is left in the arena was never quantized
    result, logits = generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=1)
    assert result.cached_tokens == 131
    assert {span.reason for span in result.spans if span.origin.value == "exact"} == {
        "exact prefix, quantized"
    }
    assert 0 < (logits - expected).norm() <= error * expected.norm()
    match = engine.cache_manager.match_prefix(shared, engine.namespace())
    for found in match.matches:
        for part in found.chunk.kv.tensors:
            assert part.device.type == ("cuda" if cache_device == "model" else "cpu")
            assert part.is_cuda or part.is_pinned()


def _shaped_like_8b() -> Any:
    """A random model with the layer shapes of an 8B model, few layers deep."""
    return tiny_model(
        "llama",
        dtype=torch.bfloat16,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=16384,
    )


@pytest.mark.parametrize("cache_device", ["cpu", "model"])
def test_bit_exact_at_8b_width(cache_device: str, make_engine: MakeEngine) -> None:
    engine = make_engine(
        model=_shaped_like_8b(), device="cuda", bit_exact=True, chunk_size=128, cache_device=cache_device
    )
    shared = random_ids(4000, seed=5)
    engine.warm(shared)
    for cut in (700, 2048, 4000):
        prompt = shared[:cut] + random_ids(50, seed=cut)
        _, expected = generate_with_logits(engine, prompt, mode="baseline", max_new_tokens=4)
        result, logits = generate_with_logits(engine, prompt, mode="prefix_cache", max_new_tokens=4)
        assert result.cached_tokens == cut - cut % 128
        assert torch.equal(logits, expected)


def test_chunks_live_where_they_should(make_engine: MakeEngine) -> None:
    for cache_device, kind in (("cpu", "cpu"), ("model", "cuda")):
        engine = make_engine("llama", device="cuda", cache_device=cache_device)
        ids = random_ids(40, seed=6)
        engine.warm(ids)
        match = engine.cache_manager.match_prefix(ids, engine.core.parts.fit._namespaces.current(""))
        for found in match.matches:
            for part in found.chunk.kv.tensors:
                assert part.device.type == kind
                assert kind == "cuda" or part.is_pinned()


def test_weights_on_the_gpu_are_checked_over(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", device="cuda")
    ids = random_ids(40, seed=7)
    engine.warm(ids)
    with torch.no_grad():
        engine.model.model.layers[0].mlp.up_proj.weight[0, 0] += 0.25
    assert engine.generate(ids, max_new_tokens=2).cached_tokens == 0


@pytest.mark.parametrize("cache_device", ["cpu", "model"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batches_equal_baseline(architecture: str, cache_device: str, make_engine: MakeEngine) -> None:
    engine = make_engine(architecture, device="cuda", cache_device=cache_device)
    shared = random_ids(90, seed=20)
    prompts = [shared + random_ids(1 + 7 * i, seed=21 + i) for i in range(6)]
    expected = [engine.generate(prompt, 12, mode="baseline").token_ids for prompt in prompts]
    for _ in ("cold", "warm"):
        assert [result.token_ids for result in engine.generate_batch(prompts, 12)] == expected
    sampled = [r.token_ids for r in engine.generate_batch(prompts, 12, do_sample=True, seed=3)]
    alone = [
        engine.generate(prompt, 12, mode="baseline", do_sample=True, seed=3 + i).token_ids
        for i, prompt in enumerate(prompts)
    ]
    assert sampled == alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
def test_scores_in_half_precision_stay_close(
    architecture: str, dtype: torch.dtype, make_engine: MakeEngine
) -> None:
    engine = make_engine(architecture, device="cuda", dtype=dtype)
    shared = random_ids(90, seed=30)
    prompts = [shared + random_ids(4 + 3 * i, seed=31 + i) for i in range(4)]
    continuations = [random_ids(3, seed=41 + i) for i in range(4)]
    expected = [float(score) for score in engine.score(prompts, continuations, mode="baseline")]
    for _ in ("cold", "warm"):
        found = [float(score) for score in engine.score(prompts, continuations)]
        assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("cache_device", ["cpu", "model"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_running_batch_equals_baseline(
    architecture: str, cache_device: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(architecture, device="cuda", cache_device=cache_device)
    shared = random_ids(90, seed=60)
    prompts = [shared[: 90 - 11 * (i % 3)] + random_ids(1 + 7 * i, seed=61 + i) for i in range(7)]
    expected = [engine.generate(prompt, 12, mode="baseline").token_ids for prompt in prompts]
    scheduler = engine.core.scheduler(max_sequences=3, max_tokens=600)
    heard = run(scheduler, [(2 * i, read_request(engine, prompt, 12)) for i, prompt in enumerate(prompts)])
    assert [one.tokens for one in heard] == expected


@pytest.mark.usefixtures("approximate_reuse")
@pytest.mark.parametrize("cache_device", ["cpu", "model"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_repair_in_a_running_batch(
    architecture: str, cache_device: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with moved text beside exact ones: each as it would be alone."""
    pay_always(monkeypatch)
    shelf = documents(2, seed=42, low=40, high=60)
    engine = make_engine(architecture, device="cuda", cache_device=cache_device)
    prompts = [
        [*random_ids(5, seed=i), *joined(shelf[:: 1 - 2 * (i % 2)]), *random_ids(9, seed=10 + i)]
        for i in range(4)
    ]
    modes = ["chunk_kv_reuse", "prefix_cache", "chunk_kv_reuse", "prefix_cache"]
    expected = []
    for prompt, mode in zip(prompts, modes, strict=True):
        alone = make_engine(architecture, device="cuda", cache_device=cache_device, model=engine.model)
        for document in shelf:
            alone.warm(document)
        expected.append(alone.generate(prompt, 12, mode=mode).token_ids)
    for document in shelf:
        engine.warm(document)
    requests = [read_request(engine, each, 12, mode) for each, mode in zip(prompts, modes, strict=True)]
    order = [0, 2, 1, 3]  # what exact ones store would be found by the others
    heard = run(engine.core.scheduler(max_sequences=4, max_tokens=800), [(0, requests[i]) for i in order])
    assert [one.tokens for one in heard] == [expected[i] for i in order]
    check_store(engine)


def test_a_disk_cache_serves_the_gpu(make_engine: MakeEngine, tmp_path: Any) -> None:
    first = make_engine(device="cuda", disk_cache_dir=tmp_path)
    prompts = [random_ids(90, seed=50) + random_ids(5 + i, seed=51 + i) for i in range(3)]
    expected = [result.token_ids for result in first.generate_batch(prompts, 8)]
    first.close()
    second = make_engine(model=first.model, device="cuda", disk_cache_dir=tmp_path)
    results = second.generate_batch(prompts, 8)
    assert [result.token_ids for result in results] == expected
    assert all(result.cached_tokens == result.prompt_tokens - 1 for result in results)
