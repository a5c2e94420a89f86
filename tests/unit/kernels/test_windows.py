"""What a model's masks say about its windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost.kernels import windows
from kvboost.kernels.folded import can_fold
from kvboost.kernels.windows import kept_by_own_cache, windows_of
from kvboost.kv.layout import probe_layout
from kvboost.run.packed_step import why_not
from tests.sweep.tiny_configs import build
from tests.tiny_models import ARCHITECTURES, tiny_model

CACHED = 61
TOKENS = CACHED + windows._TOKENS
WINDOWED = {
    "mistral": (40,) * 3,
    "phi3": (40,) * 3,
    "qwen2_sliding": (None, 40, 40),
    "gemma2": (40, None, 40),
    "gemma3": (40, None, 40),
}


def _mask(seen: Any) -> torch.Tensor:
    """`[1, 1, n, tokens]` of what `seen(query, key)` says."""
    queries, keys = torch.arange(CACHED, TOKENS)[:, None], torch.arange(TOKENS)
    return seen(queries, keys)[None, None]


def _causal(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return keys <= queries


@pytest.mark.parametrize("size", [1, 2, 7, CACHED, CACHED + 1, TOKENS - 1, TOKENS, None])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16])
def test_a_window_is_read_off_its_mask(size: int | None, dtype: torch.dtype) -> None:
    mask = _mask(lambda q, k: _causal(q, k) & (k > q - size) if size else _causal(q, k))
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    expected = None if size is None or size >= TOKENS else size
    assert windows._window(mask, CACHED) == (expected, "")


@pytest.mark.parametrize(
    "seen",
    [
        lambda q, k: _causal(q, k) & (k // 32 == q // 32),  # chunks
        lambda q, k: k <= q + 1,  # what comes later
        lambda q, k: _causal(q, k) & ((k > q - 9) | (k < 4)),  # a window and the first tokens
        lambda q, k: _causal(q, k) & (k % 2 == q % 2),  # every second
        lambda q, k: (k < 0) & (q < 0),  # nothing
    ],
)
def test_other_masks_are_none_of_both(seen: Any) -> None:
    with pytest.raises(windows._OtherMaskError, match="neither causal nor a sliding window"):
        windows._window(_mask(seen), CACHED)


def test_a_bias_is_told_with_the_window() -> None:
    mask = torch.zeros(1, 1, windows._TOKENS, TOKENS).masked_fill_(~_mask(_causal), -torch.inf)
    mask[..., 5] = -0.5
    assert windows._window(mask, CACHED) == (None, "adds a bias to what is seen")


@pytest.mark.parametrize("mask", [None, torch.ones(1, TOKENS), torch.ones(1, 1, windows._TOKENS, 9)])
def test_what_is_no_mask_is_not_read(mask: torch.Tensor | None) -> None:
    with pytest.raises(windows._UnknownMaskError):
        windows._window(mask, CACHED)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_tested_architecture_shows_its_windows(name: str) -> None:
    model = tiny_model(name)
    learned = windows_of(model)
    if learned.is_own_attention:
        assert not can_fold(model)
        assert why_not(model, probe_layout(model)) == learned.refusal != ""
        return
    assert learned.refusal == ""
    assert learned.layers == WINDOWED.get(name, (None,) * 3)
    assert list(learned.by_module.values()) == list(learned.layers)
    assert can_fold(model) == (model.config._attn_implementation == "sdpa")
    assert kept_by_own_cache(model) == learned.layers
    assert why_not(model, probe_layout(model)) == ""


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("gemma2").train()
    model.model.layers[0].eval()
    training = [module.training for module in model.modules()]
    config, attributes = model.config.to_dict(), set(vars(model))
    implementation = model.config._attn_implementation
    windows_of(model)
    assert [module.training for module in model.modules()] == training
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == implementation
    assert set(vars(model)) == attributes


def test_other_kernels_must_name_what_the_masks_show() -> None:
    """A kernel without masks goes by the argument that a layer passes: PhiMoE passes none."""
    plain, by_mask = tiny_model("mistral"), build("phimoe")
    for model in (plain, by_mask):
        model.config._attn_implementation = "another"
    assert windows_of(plain).refusal == ""
    learned = windows_of(by_mask)
    assert plain.config._attn_implementation == "another"
    assert learned.is_own_attention or "name windows of" in learned.refusal


def test_attention_that_goes_by_its_name_is_not_folded() -> None:
    """Falcon under another name than "sdpa" would add a mask of truth values to its scores."""
    model = build("falcon")
    assert windows_of(model).is_own_attention
    assert not can_fold(model)
