"""Which models are refused, and with which reason."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvboost.compat import (
    CROP_ZERO_EMPTIES,
    SUPPORTED_ARCHITECTURES,
    TRANSFORMERS_VERSION,
    UNSUPPORTED_ARCHITECTURES,
    architecture_of,
    check_model_compatibility,
    choose_device,
    eval_mode,
    probing,
    rotary_modules,
    structural_refusal,
    text_config,
)
from kvboost.errors import UnsupportedModelError
from kvboost.kv.arena import Arena
from kvboost.kv.layout import probe_layout
from kvboost.kv.rope import KeyRotation, learn_rotation
from kvboost.proof.selftest import check_exactness
from kvboost.run import packed_step


def tiny_gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=16))


def tiny_gpt_neox() -> Any:
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
    )


def tiny_t5() -> Any:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )


def tiny_mamba() -> Any:
    return MambaForCausalLM(
        MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4, time_step_rank=2)
    )


class Bare:
    """A model of which only the config is known."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def named_modules(self) -> list[tuple[str, torch.nn.Module]]:
        return []


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (tiny_gpt2, "learned absolute positions"),
        (tiny_gpt_neox, "position ids may not be honoured"),
        (tiny_t5, "encoder-decoder"),
        (tiny_mamba, "not a KV cache"),
    ],
)
def test_known_incompatible_models_are_refused_with_the_reason(model: Any, reason: str) -> None:
    built = model()
    with pytest.raises(ValueError, match=reason) as refused:
        check_model_compatibility(built)
    assert isinstance(refused.value, UnsupportedModelError)
    assert type(built).__name__ in str(refused.value)
    assert "strict=False" in str(refused.value)
    with pytest.warns(UserWarning, match=reason):
        check_model_compatibility(built, strict=False)


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        ("BartConfig", {}, "encoder-decoder"),
        ("JambaConfig", {}, "not a KV cache"),
        ("FalconH1Config", {}, "not a KV cache"),
        ("Qwen3NextConfig", {}, "not a KV cache"),
        ("MiniMaxConfig", {}, "not a KV cache"),
        ("Lfm2Config", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "not a KV cache"),
        ("Gemma3nTextConfig", {}, "shares KV between layers"),
        ("Llama4TextConfig", {}, "chunked attention"),
    ],
)
def test_models_without_kv_per_layer_and_token_are_refused(
    config: str, settings: dict[str, Any], reason: str
) -> None:
    model = Bare(getattr(transformers, config)(**settings))
    assert reason in str(structural_refusal(model))
    with pytest.raises(UnsupportedModelError, match=reason):
        check_model_compatibility(model)


@pytest.mark.parametrize(
    "config",
    ["LlamaConfig", "MistralConfig", "Qwen3Config", "Gemma2Config", "Gemma3TextConfig", "SmolLM3Config"],
)
def test_ordinary_configs_have_nothing_against_them(config: str) -> None:
    assert structural_refusal(Bare(getattr(transformers, config)())) is None


def test_a_hybrid_that_its_config_hides_is_refused_when_it_is_probed() -> None:
    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=3,
        vocab_size=30,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        lru_width=16,
        attention_window_size=8,
    )
    with pytest.raises(UnsupportedModelError, match="of 3 cache layers"):
        probe_layout(transformers.RecurrentGemmaForCausalLM(config).eval())


def test_a_model_without_rope_is_refused(make_llama: Any) -> None:
    model = make_llama()
    del model.model.rotary_emb
    with pytest.raises(UnsupportedModelError, match="no rotary position embedding"):
        check_model_compatibility(model)


def test_a_tested_architecture_passes_in_silence(make_llama: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_model_compatibility(make_llama())
        check_model_compatibility(make_llama(), strict=False)


def test_an_untested_architecture_gives_a_warning(make_llama: Any) -> None:
    class SomethingNewForCausalLM(LlamaForCausalLM):
        pass

    model = make_llama()
    model.__class__ = SomethingNewForCausalLM
    for strict in (True, False):
        with pytest.warns(UserWarning, match="SomethingNewForCausalLM is not among the tested"):
            check_model_compatibility(model, strict=strict)


def test_the_architecture_is_the_class_or_what_the_config_says(make_llama: Any) -> None:
    model = make_llama()
    assert architecture_of(model) == "LlamaForCausalLM"

    class Wrapper(Bare):
        pass

    wrapped = Wrapper(model.config)
    model.config.architectures = None
    assert architecture_of(wrapped) == "Wrapper"
    model.config.architectures = ["GPT2LMHeadModel"]
    assert architecture_of(wrapped) == "GPT2LMHeadModel"
    assert architecture_of(model) == "LlamaForCausalLM", "a known class is not overruled"


def test_no_architecture_is_both_supported_and_not() -> None:
    assert not SUPPORTED_ARCHITECTURES & set(UNSUPPORTED_ARCHITECTURES)
    assert all(UNSUPPORTED_ARCHITECTURES.values())


def test_rotary_modules_and_text_config_are_found(make_llama: Any) -> None:
    model = make_llama()
    assert [name for name, _ in rotary_modules(model)] == ["model.rotary_emb"]
    assert rotary_modules(tiny_gpt2()) == []
    assert text_config(model) is model.config
    composite = transformers.Gemma3Config()
    assert text_config(Bare(composite)) is composite.text_config


def test_the_version_decides_what_crop_zero_means() -> None:
    assert (TRANSFORMERS_VERSION.major < 5) == CROP_ZERO_EMPTIES


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_cuda_before_mps_before_cpu(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert choose_device().type == chosen


# --- models that train, and models that fail ---------------------------------------------------


def test_eval_mode_restores_the_flag_of_every_submodule(make_llama: Any) -> None:
    model = make_llama().train()
    model.model.layers[0].mlp.eval()
    before = [module.training for module in model.modules()]
    assert len(set(before)) == 2
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    with pytest.raises(RuntimeError, match="in between"), eval_mode(model):
        raise RuntimeError("in between")
    assert [module.training for module in model.modules()] == before


def test_a_model_that_trains_is_probed_in_eval_mode(make_llama: Any) -> None:
    model = make_llama().train()
    model.gradient_checkpointing_enable()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    layout = probe_layout(model)
    check_exactness(model, layout)
    assert packed_step.can_run(model, Arena(layout, 4))
    assert isinstance(learn_rotation(model, layout), KeyRotation)
    assert [module.training for module in model.modules()] == before


def test_what_a_probe_raises_is_a_refusal_with_the_reason(make_llama: Any) -> None:
    model = make_llama()
    reason = "failed while counting: KeyError: 'gone'"
    with pytest.raises(UnsupportedModelError, match=reason) as refused, probing(model, "counting"):
        raise KeyError("gone")
    assert isinstance(refused.value.__cause__, KeyError)
    assert type(model).__name__ in str(refused.value)
    with pytest.raises(UnsupportedModelError, match=r"^as it was$"), probing(model, "counting"):
        raise UnsupportedModelError("as it was")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("no room"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        KeyboardInterrupt(),
    ],
)
def test_running_out_of_memory_says_nothing_about_the_model(make_llama: Any, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, probing(make_llama(), "counting"):
        raise error
    assert raised.value is error
