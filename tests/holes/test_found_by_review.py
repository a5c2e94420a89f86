"""What a second hostile review found, each in its shortest form."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import KVBoost
from kvboost.errors import InvalidRequestError
from kvboost.identity import weights
from kvboost.parts import model_fit
from tests.fixture_types import MakeEngine
from tests.holes.stock import stock_answer
from tests.holes.test_hole_4_state_at_store_time import with_adapters
from tests.tiny_models import random_ids, tiny_model

PROMPT = random_ids(40, seed=11)


def is_right(engine: KVBoost, prompt: list[int] = PROMPT) -> None:
    for _ in range(2):
        answer = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
        assert answer.token_ids == stock_answer(engine.model, prompt, 4)


@pytest.mark.parametrize("rounds", range(4))
def test_packed_weights_of_an_adapted_model_and_the_one_inside(rounds: int, make_engine: MakeEngine) -> None:
    """Two watches look at the same layers: a copy is current for both or for none."""
    adapted = with_adapters(tiny_model("llama"))
    one, two = make_engine(model=adapted), make_engine(model=adapted.get_base_model())
    weight = adapted.get_base_model().lm_head.weight
    for _ in range(rounds):
        weight.data.mul_(-1.0)
        is_right(one)
    weight.data.mul_(-1.5)
    is_right(one, [*PROMPT, 7])
    weight.data.mul_(-1.5)
    is_right(two, [*PROMPT, 8])
    is_right(one, [*PROMPT, 9])


def gains_a_child(model: Any) -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.extra(super().forward(hidden))
            return result

    layer = model.model.layers[0].mlp.up_proj
    layer.__class__ = Adapted
    torch.manual_seed(0)
    layer.extra = torch.nn.Linear(layer.out_features, layer.out_features)


def gains_a_buffer(model: Any) -> None:
    kind = type(model.model.layers[0].mlp.act_fn)

    class Louder(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = super().forward(hidden) * self.gain
            return result

    activation = model.model.layers[0].mlp.act_fn
    activation.__class__ = Louder
    activation.register_buffer("gain", torch.tensor(-3.0))


@pytest.mark.parametrize("gains", [gains_a_child, gains_a_buffer])
def test_a_module_that_had_nothing_and_gains_something(
    gains: Callable[[Any], None], make_engine: MakeEngine
) -> None:
    engine = make_engine()
    is_right(engine)
    gains(engine.model)
    assert engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache").cached_tokens == 0
    is_right(engine)


def test_weights_that_change_while_an_engine_is_made(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not taken for what the model's own forward writes to."""
    model = tiny_model("llama")
    probe = model_fit.probe_layout

    def probing(each: Any) -> Any:
        each.model.layers[0].mlp.up_proj.weight.data.mul_(-1.1)
        each.model.rotary_emb.inv_freq.mul_(0.9)
        monkeypatch.undo()
        return probe(each)

    monkeypatch.setattr(model_fit, "probe_layout", probing)
    engine = make_engine(model=model)
    is_right(engine)
    for change in (
        lambda: model.model.layers[0].mlp.up_proj.weight.data.mul_(-1.5),
        lambda: model.model.rotary_emb.inv_freq.mul_(0.5),
    ):
        change()
        assert engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache").cached_tokens == 0
        is_right(engine)


@pytest.mark.parametrize("form", ["transposed", "sliced", "expanded"])
def test_a_weight_that_does_not_lie_in_one_piece(form: str, make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1].mlp.up_proj
    values = layer.weight.detach()
    if form == "transposed":
        values = values.t().contiguous().t()
    elif form == "sliced":
        values = torch.cat([values, values], dim=1)[:, : values.shape[1]]
    else:
        values = values[:1].expand(values.shape)
    layer.weight = torch.nn.Parameter(values, requires_grad=False)
    engine = make_engine(model=model)
    is_right(engine)
    if form == "expanded":
        layer.weight.data[0].mul_(-1.5)
    else:
        layer.weight.data.mul_(-1.5)
    assert engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache").cached_tokens == 0
    is_right(engine)


@pytest.mark.parametrize(
    "odd", [torch.ones(3), np.ones(3), threading.Lock(), object()], ids=lambda value: type(value).__name__
)
def test_a_config_with_an_odd_field(odd: Any, make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    model.config.odd_field = odd
    engine = make_engine(model=model)
    is_right(engine)
    assert engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache").cached_tokens == 39
    model.config.odd_field = [1, {"two": 2}]
    assert engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache").cached_tokens == 0
    model.config.odd_field[1]["two"] = 3
    assert engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache").cached_tokens == 0


@pytest.mark.parametrize("place", ["forward", "_old_forward"])
def test_a_forward_replaced_under_the_hooks_of_accelerate(place: str, make_engine: MakeEngine) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = tiny_model("llama")
    layer = model.model.layers[0].mlp
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    engine = make_engine(model=model)
    is_right(engine)
    assert engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache").cached_tokens == 39
    own = getattr(layer, place)
    setattr(layer, place, lambda hidden: own(hidden) * -2.0)
    answer = engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
    assert answer.spans[0].reason == "gated: the forward of model.layers.0.mlp was replaced"
    assert answer.token_ids == stock_answer(model, PROMPT, 4)
    setattr(layer, place, own)
    is_right(engine)


def test_what_a_user_changes_while_a_request_runs_stays(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model)
    layer = model.model.layers[0].mlp.up_proj

    def mine(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, layer.weight) * 2

    def changing(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        layer.forward = mine
        model.set_attn_implementation("eager")
        return scores

    engine.generate(PROMPT, max_new_tokens=3, logits_processor=[changing])
    assert layer.forward is mine
    assert model.config._attn_implementation == "eager"
    del layer.forward
    is_right(engine)


def test_memory_of_replaced_weights_is_not_held(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    engine = make_engine(model=model, weights_check_seconds=None)
    engine.generate(PROMPT, max_new_tokens=3)
    old = weakref.ref(model.lm_head.weight.data.untyped_storage())
    watch = engine.core.parts.fit._namespaces.watch
    engine.close()
    assert watch._known is None
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert old() is None or old().data_ptr() != model.lm_head.weight.data_ptr()  # type: ignore[union-attr]
    other = make_engine(model=model)
    del other
    gc.collect()
    is_right(make_engine(model=model))


def test_the_digest_is_of_the_moment_that_was_read(make_engine: MakeEngine) -> None:
    """An adapter is switched between the reading and the digest, and back."""
    adapted = with_adapters(tiny_model("llama"))
    engine = make_engine(model=adapted)
    tracker = engine.core.parts.fit._namespaces
    state = tracker.watch.read()
    adapted.set_adapter("two")
    tracker._seen = (-1, -1)
    two = tracker.of(state, "")
    adapted.set_adapter("one")
    one = tracker.current("")
    assert one.key != two.key
    adapted.set_adapter("two")
    assert tracker.current("") == two
    adapted.eval()
    is_right(engine)


def test_adapters_that_begin_where_the_prompt_calls_them(make_engine: MakeEngine) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        task_type="CAUSAL_LM",
        alora_invocation_tokens=[20, 21],
        init_lora_weights=False,
    )
    model = get_peft_model(tiny_model("llama"), config).eval()
    model.config.architectures = ["LlamaForCausalLM"]
    engine = make_engine(model=model)
    answer = engine.generate([*PROMPT, 20, 21, 30], max_new_tokens=3, mode="prefix_cache")
    assert answer.spans[0].reason == "gated: the adapter default begins where the prompt calls it"
    assert engine.cache_stats()["chunks"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "a", "do_sample": True},
        {"top_p": "a"},
        {"num_beams": "2"},
        {"seed": True},
        {"do_sample": "yes"},
    ],
    ids=str,
)
def test_options_of_a_wrong_type(options: dict[str, Any], make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        make_engine().generate(PROMPT, max_new_tokens=3, **options)


@pytest.mark.parametrize("slice_bytes", [4, 64, 1_000, 4_097, 1 << 20])
def test_a_checksum_does_not_depend_on_its_slices(slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on a CPU nor in the sum that is used on a GPU, where every pass saw a change."""
    for tensor in (
        torch.randn(1_000),
        torch.randn(333).to(torch.bfloat16),
        torch.arange(7, dtype=torch.uint8),
    ):
        for on_device in (False, True):
            if on_device:
                monkeypatch.setattr(weights, "_is_on_cpu", lambda _part: False)
            whole, parts = weights.Checksum(tensor), weights.Checksum(tensor)
            while whole.advance(1 << 30):
                pass
            while parts.advance(slice_bytes):
                pass
            assert parts.digest() == whole.digest()
            changed = tensor.clone()
            changed[len(changed) // 2] += 1
            assert weights.checksum(changed) != weights.checksum(tensor)
            monkeypatch.undo()


@pytest.mark.slow  # torch's compiler takes a minute to load and trace
def test_a_compiled_model(tokenizer: Any) -> None:
    model = torch.compile(tiny_model("llama"), backend="eager")
    model.config.architectures = ["LlamaForCausalLM"]
    engine = KVBoost(model, tokenizer, chunk_size=16)
    for _ in range(2):
        answer = engine.generate(PROMPT, max_new_tokens=3, mode="prefix_cache")
    assert answer.cached_tokens == 39


def test_weights_that_are_offloaded(make_engine: MakeEngine) -> None:
    from accelerate import cpu_offload

    model = tiny_model("llama")
    cpu_offload(model.model.layers[1], execution_device="cpu")
    engine = make_engine(model=model)
    for _ in range(2):
        answer = engine.generate(PROMPT, max_new_tokens=3, mode="prefix_cache")
        assert answer.spans[0].reason == "gated: weights are offloaded"
        assert answer.token_ids == stock_answer(model, PROMPT, 3)


def test_a_hook_put_behind_one_of_accelerate(make_engine: MakeEngine) -> None:
    from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module

    class Steering(ModelHook):  # type: ignore[misc]
        def post_forward(self, _module: Any, output: Any) -> Any:
            return output * -2.0

    model = tiny_model("llama")
    layer = model.model.layers[0].mlp
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    engine = make_engine(model=model)
    is_right(engine)
    add_hook_to_module(layer, Steering(), append=True)
    answer = engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
    assert answer.cached_tokens == 0
    assert answer.token_ids == stock_answer(model, PROMPT, 4)


def other_module(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def other_class(model: Any) -> None:
    class Louder(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = super().forward(hidden) * -2.0
            return result

    model.model.layers[0].mlp.__class__ = Louder


@pytest.mark.parametrize("change", [other_module, other_class])
def test_modules_without_weights_and_classes_count(
    change: Callable[[Any], None], make_engine: MakeEngine
) -> None:
    engine = make_engine()
    is_right(engine)
    change(engine.model)
    assert engine.generate(PROMPT, max_new_tokens=4, mode="prefix_cache").cached_tokens == 0
    is_right(engine)


def test_an_engine_with_a_disk_collected_as_garbage_in_the_savers_own_thread(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = KVBoost(tiny_model("llama"), tokenizer, chunk_size=16, disk_cache_dir=tmp_path)
    disk = engine.core.parts.disk
    assert disk is not None
    held = [engine]
    del engine
    write = disk.tier.write_records
    has_returned = threading.Event()  # until then the call itself holds the engine

    def collecting(records: Any) -> Any:
        assert has_returned.wait(20)
        monkeypatch.undo()
        held.clear()
        gc.collect()
        return write(records)

    monkeypatch.setattr(disk.tier, "write_records", collecting)
    held[0].generate(PROMPT, max_new_tokens=2)
    has_returned.set()
    disk._saver.join(timeout=20)
    assert not disk._saver.is_alive()
