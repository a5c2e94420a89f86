"""Captured steps: equal to BASELINE on every architecture and head size, and gone when the model changes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from tests.engine.test_resident import OPTIONS
from tests.fixture_types import MakeEngine
from tests.tiny_models import ARCHITECTURES, long_model, random_ids, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


NOT_CAPTURED: dict[str, str] = {}  # architecture: why


def steps(engine: KVBoost) -> dict[str, Any]:
    return dict(engine.cache_stats()["steps"])


def check_exact(engine: KVBoost, *, captured: bool = True) -> None:
    """Answers alone and together equal BASELINE, and kernel and graphs really ran."""
    shared = random_ids(150, seed=1)
    prompts = [[*shared[:cut], *random_ids(tail, seed=cut)] for cut, tail in ((1, 5), (100, 70), (150, 9))]
    for _ in range(3):  # a size is captured when it was missed twice
        for prompt in prompts:
            want = engine.generate(prompt, 12, mode="baseline").token_ids
            assert engine.generate(prompt, 12, mode="prefix_cache").token_ids == want
    before = steps(engine)
    assert before["by_kernel"] == before["forwards"] > 0
    if captured:
        assert before["captured"] > before["forwards"] // 2, before
        assert before["graphs"]
        assert before["graph_bytes"]
        assert not before["not_captured"]
    many = [[*shared[:140], *random_ids(11, seed=50 + number)] for number in range(6)]
    wants = [engine.generate(prompt, 10, mode="baseline").token_ids for prompt in many]
    for _ in range(3):
        found = engine.generate_batch(many, 10, mode="prefix_cache")
        assert [result.token_ids for result in found] == wants
    assert not captured or steps(engine)["captured"] > before["captured"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str, make_engine: MakeEngine) -> None:
    engine = make_engine(architecture, device="cuda")
    if engine.core.parts.fit.why_not_packed:
        pytest.skip(f"runs alone: {engine.core.parts.fit.why_not_packed}")
    engine.generate(random_ids(20, seed=3), 6, mode="prefix_cache")
    engine.generate(random_ids(21, seed=4), 6, mode="prefix_cache")
    why = steps(engine)["not_captured"]
    check_exact(engine, captured=not why)
    assert not why or architecture in NOT_CAPTURED, why


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_size(head_dim: int, make_engine: MakeEngine) -> None:
    model = tiny_model("llama", hidden_size=4 * head_dim, head_dim=head_dim)
    check_exact(make_engine(model=model, device="cuda"))


@pytest.mark.parametrize("tokens", [513, 700, 1_100, 1_536])
def test_large_steps_are_captured(tokens: int, make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), device="cuda")
    for number in range(4):  # each missed twice, then replayed; behind known text too
        for known in (0, 300):
            prompt = [*random_ids(known, seed=1), *random_ids(tokens, seed=10 * number + tokens + known)]
            want = engine.generate(prompt, 4, mode="baseline").token_ids
            before = steps(engine).get("captured", 0)
            assert engine.generate(prompt, 4, mode="prefix_cache").token_ids == want
    after = steps(engine)
    assert after["captured"] >= before + 4, after  # the prompt in one, and three tokens
    assert not after["not_captured"]


def test_sampling_and_options_equal_generate(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", device="cuda")
    prompt = random_ids(60, seed=2)
    for option in OPTIONS:
        want = engine.generate(prompt, 12, mode="baseline", **option).token_ids
        for _ in range(2):
            assert engine.generate(prompt, 12, mode="prefix_cache", **option).token_ids == want, option
    assert steps(engine)["captured"]


def test_a_streamer_hears_every_token_once(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", device="cuda")
    prompt = random_ids(40, seed=8)

    class Streamer:
        def __init__(self) -> None:
            self.heard: list[int] = []
            self.ends = 0

        def put(self, value: torch.Tensor) -> None:
            self.heard += value.flatten().tolist()

        def end(self) -> None:
            self.ends += 1

    heard = {}
    for mode in ("baseline", "prefix_cache"):
        streamer = Streamer()
        result = engine.generate(prompt, 7, mode=mode, streamer=streamer)
        assert streamer.ends == 1
        assert streamer.heard[-len(result.token_ids) :] == result.token_ids
        heard[mode] = streamer.heard
    assert heard["baseline"] == heard["prefix_cache"]
    stream = engine.stream(prompt, 400, mode="prefix_cache")
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.generated_tokens < 400


@pytest.mark.parametrize("change", ["replaced", "moved", "written", "back"])
def test_graphs_go_when_the_model_changes(change: str, make_engine: MakeEngine) -> None:
    engine = make_engine("llama", device="cuda")
    check_exact(engine)
    layer = engine.model.model.layers[0].mlp.down_proj
    graphs = steps(engine)["graphs"]
    assert graphs
    with torch.no_grad():
        if change == "replaced":
            layer.weight = torch.nn.Parameter(layer.weight * 1.5)
        elif change == "moved":
            engine.model.to("cpu")
            torch.cuda.empty_cache()
            filler = torch.full((1 << 20,), float("nan"), device="cuda")
            engine.model.to("cuda")
            del filler
        elif change == "written":
            layer.weight.mul_(1.5)
        else:
            kept = layer.weight.detach().clone()
            layer.weight = torch.nn.Parameter(torch.full_like(kept, float("nan")))
            layer.weight = torch.nn.Parameter(kept)
    check_exact(engine)
    captured = engine.core.resident._scheduler.packed.captured  # type: ignore[union-attr]
    assert captured is not None
    assert captured.counts.dropped >= graphs


@pytest.mark.filterwarnings("ignore:Already found")  # two adapters are what is meant
def test_an_adapter_switch_is_heard(make_engine: MakeEngine) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama").cuda()
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, r=4)
    model.add_adapter(config, "one")
    model.add_adapter(config, "two")
    model.eval()  # layers of adapters come in training mode
    engine = make_engine(model=model, device="cuda")
    for adapter in ("one", "two", "one"):
        model.set_adapter(adapter)
        check_exact(engine)


def test_forward_hooks_are_run(make_engine: MakeEngine) -> None:
    """A hook that is not ours gates the engine: nothing captured runs past it."""
    engine = make_engine("llama", device="cuda")
    check_exact(engine)
    calls = []
    handle = engine.model.model.layers[0].register_forward_hook(lambda *_args: calls.append(1))
    prompt = random_ids(30, seed=9)
    want = engine.generate(prompt, 5, mode="baseline").token_ids
    calls.clear()
    assert engine.generate(prompt, 5, mode="prefix_cache").token_ids == want
    assert len(calls) >= 5
    handle.remove()
    check_exact(engine)


def test_memory_is_given_back(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", device="cuda")
    check_exact(engine)
    held = steps(engine)["graph_bytes"]
    assert 0 < held < 1 << 30
    engine.clear()
    check_exact(engine)  # text is forgotten, graphs are not
    before = torch.cuda.memory_allocated()
    engine.close()
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() < before
