"""Whose KV it is: anything that changes KV changes the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from kvboost.identity import model_state
from kvboost.identity.model_state import ModelWatch
from kvboost.identity.namespace import Namespace, NamespaceTracker

SETTINGS = {"kv_cache_bits": 16, "bit_exact": False}
MakeLlama = Callable[..., LlamaForCausalLM]


def key_of(model: Any, settings: dict[str, Any] = SETTINGS, salt: str = "") -> str:
    return NamespaceTracker(model, settings).current(salt).key


def weights_digest(module: torch.nn.Module) -> str:
    watch = ModelWatch(module)
    watch.read()
    return str(sorted(watch.checksums().items()))


@pytest.fixture(scope="module")
def llama(make_llama: MakeLlama) -> LlamaForCausalLM:
    return make_llama(num_hidden_layers=1, hidden_size=16, intermediate_size=16, vocab_size=20)


def test_the_same_model_has_the_same_key(make_llama: MakeLlama) -> None:
    assert key_of(make_llama()) == key_of(make_llama())
    assert key_of(make_llama()) != key_of(make_llama(seed=1))


def test_a_model_loaded_twice_has_the_same_key(make_llama: MakeLlama, tmp_path: Path) -> None:
    make_llama().save_pretrained(tmp_path / "one")
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    first.save_pretrained(tmp_path / "two")
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert key_of(first) == key_of(second)


def test_any_single_weight_changes_the_key(llama: LlamaForCausalLM) -> None:
    before = key_of(llama)
    names = [name for name, _ in llama.named_parameters()]
    assert len(names) > 8
    for name in names:
        parameter = llama.get_parameter(name)
        flat = parameter.data.view(-1)
        for place in (0, flat.numel() // 2, flat.numel() - 1):
            old = flat[place].item()
            flat[place] += 0.5
            assert key_of(llama) != before, f"{name}[{place}]"
            flat[place] = old
    assert key_of(llama) == before


def test_the_smallest_change_of_one_weight_changes_the_key(llama: LlamaForCausalLM) -> None:
    before = key_of(llama)
    flat = llama.lm_head.weight.data.view(-1)
    old = flat[7].clone()
    flat[7] = torch.nextafter(old, torch.tensor(torch.inf))
    assert key_of(llama) != before
    flat[7] = old


def test_swapped_weights_change_the_key(llama: LlamaForCausalLM) -> None:
    before = key_of(llama)
    flat = llama.lm_head.weight.data.view(-1)
    first, second = flat[0].item(), flat[1].item()
    flat[0], flat[1] = second, first
    assert key_of(llama) != before
    flat[0], flat[1] = first, second
    assert key_of(llama) == before


def test_dtype_config_and_class_change_the_key(make_llama: MakeLlama) -> None:
    keys = {
        key_of(make_llama()),
        key_of(make_llama().to(torch.bfloat16)),
        key_of(make_llama(rope_theta=20_000.0)),
        key_of(make_llama(rms_norm_eps=1e-3)),
        key_of(make_llama(rope_scaling={"rope_type": "linear", "factor": 2.0})),
        key_of(make_llama(attn_implementation="eager")),
    }
    assert len(keys) == 6


def test_settings_and_salt_change_the_key(llama: LlamaForCausalLM) -> None:
    keys = {
        key_of(llama),
        key_of(llama, {**SETTINGS, "kv_cache_bits": 8}),
        key_of(llama, {**SETTINGS, "bit_exact": True}),
        key_of(llama, {**SETTINGS, "block": 64}),
        key_of(llama, salt="a"),
        key_of(llama, salt="b"),
    }
    assert len(keys) == 6


def test_the_salt_is_not_in_the_family(llama: LlamaForCausalLM) -> None:
    tracker = NamespaceTracker(llama, SETTINGS)
    plain, salted = tracker.current(""), tracker.current("tenant")
    assert plain.family == salted.family
    assert plain.key != salted.key
    assert (plain.salt, salted.salt) == ("", "tenant")
    assert tracker.current("tenant") == salted


def test_a_change_in_place_is_noticed(make_llama: MakeLlama) -> None:
    model = make_llama()
    tracker = NamespaceTracker(model, SETTINGS)
    before = tracker.current("")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1
    after = tracker.current("")
    assert after.key != before.key
    assert after.family != before.family
    assert tracker.current("salt").family == after.family
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] -= 1
    model.load_state_dict(make_llama().state_dict())
    assert tracker.current("") == before


def test_a_replaced_parameter_is_noticed(make_llama: MakeLlama) -> None:
    model = make_llama()
    tracker = NamespaceTracker(model, SETTINGS)
    before = tracker.current("").key
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    assert tracker.current("").key != before


def test_replaced_data_is_noticed(make_llama: MakeLlama) -> None:
    model = make_llama()
    tracker = NamespaceTracker(model, SETTINGS)
    before = tracker.current("").key
    model.lm_head.weight.data = model.lm_head.weight.data * 2
    assert tracker.current("").key != before
    doubled = tracker.current("").key
    model.to(torch.bfloat16)
    assert tracker.current("").key not in (before, doubled)


def test_a_training_step_is_noticed(make_llama: MakeLlama) -> None:
    model = make_llama()
    tracker = NamespaceTracker(model, SETTINGS)
    before = tracker.current("").key
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(5).unsqueeze(0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert tracker.current("").key != before


def test_an_adapter_that_is_switched_is_noticed(make_llama: MakeLlama) -> None:
    """Adapter layers keep their state in plain attributes, which no version counter covers."""
    model = make_llama()
    layer = model.model.layers[0].self_attn.q_proj
    layer.merged_adapters = []
    layer._active_adapter = ["one"]
    tracker = NamespaceTracker(model, SETTINGS)
    keys = [tracker.current("").key]
    layer._active_adapter = ["two"]
    keys.append(tracker.current("").key)
    layer.merged_adapters = ["two"]
    keys.append(tracker.current("").key)
    assert len(set(keys)) == 3


def test_weights_are_checked_over_once(make_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    checksum = model_state.checksum

    def counting(tensor: torch.Tensor) -> bytes:
        calls.append(1)
        return checksum(tensor)

    tracker = NamespaceTracker(make_llama(), SETTINGS)
    monkeypatch.setattr(model_state, "checksum", counting)
    for salt in ("", "a", "b", ""):
        tracker.current(salt)
    assert not calls
    tracker.watch.check_all()
    assert calls


def test_memory_of_salts_is_bounded(llama: LlamaForCausalLM) -> None:
    tracker = NamespaceTracker(llama, SETTINGS)
    first = tracker.current("0")
    for number in range(9_000):
        tracker.current(str(number))
    assert len(tracker._keys) <= 4_097
    assert tracker.current("0") == first


def test_weights_of_all_kinds_have_a_checksum() -> None:
    class Odd(torch.nn.Module):
        def __init__(self, number: float, flag: bool) -> None:
            super().__init__()
            self.scalar = torch.nn.Parameter(torch.tensor(number))
            self.empty = torch.nn.Parameter(torch.zeros(0))
            self.turned = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
            self.register_buffer("flag", torch.tensor([flag, False]))
            self.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))

    digests = {weights_digest(Odd(*values)) for values in ((1.0, True), (2.0, True), (1.0, False))}
    assert len(digests) == 3
    assert weights_digest(Odd(1.0, True)) == weights_digest(Odd(1.0, True))


def test_names_shapes_and_dtypes_count() -> None:
    def module(**parameters: torch.Tensor) -> torch.nn.Module:
        result = torch.nn.Module()
        for name, values in parameters.items():
            result.register_parameter(name, torch.nn.Parameter(values))
        return result

    digests = [
        weights_digest(module(a=torch.zeros(4), b=torch.ones(4))),
        weights_digest(module(b=torch.zeros(4), a=torch.ones(4))),
        weights_digest(module(a=torch.zeros(2, 2), b=torch.ones(4))),
        weights_digest(module(a=torch.zeros(4))),
        weights_digest(module(a=torch.zeros(4), c=torch.ones(4))),
        weights_digest(module(a=torch.zeros(4, dtype=torch.float16))),
        weights_digest(module(a=torch.zeros(4, dtype=torch.bfloat16))),
    ]
    assert len(set(digests)) == 7


def test_offsets_have_namespaces_of_their_own() -> None:
    plain = Namespace("a" * 64, "family", "salt")
    moved = plain.at_offset(5)
    assert moved.key not in (plain.key, plain.at_offset(6).key)
    assert moved == plain.at_offset(5)
    assert (moved.family, moved.salt) == ("family", "salt")


def test_what_differs_from_machine_to_machine_does_not_count(make_llama: MakeLlama) -> None:
    """Folders, commits and library versions in the config, at any depth: machines share what they read."""
    before = key_of(make_llama())
    for number in range(2):
        model = make_llama()
        model.config._name_or_path = f"/home/{number}/model"
        model.config._commit_hash = f"{number}" * 40
        model.config.transformers_version = f"5.{number}"
        model.config.of_a_part = {"a": [{"_name_or_path": f"/{number}", "transformers_version": f"{number}"}]}
        assert key_of(model) == key_of(model)
        found = key_of(model)
        model.config.of_a_part["a"][0]["size"] = 3
        assert key_of(model) != found
        if number == 0:
            first = found
    assert found == first != before
