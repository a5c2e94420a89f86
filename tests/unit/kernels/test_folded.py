"""Folded attention gives what transformers' own sdpa function gives."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.compat import attention_function
from kvboost.kernels import folded, scope
from kvboost.kernels.folded import FoldedAttention, can_fold
from kvboost.kernels.scope import NAME, AttentionCall, forward_scope

HEAD_DIM = 8


class Call:
    """Random inputs of one attention call, and a causal mask over a cache."""

    def __init__(
        self,
        *,
        batch: int = 1,
        kv_heads: int = 2,
        group: int = 3,
        new: int = 4,
        cached: int = 7,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        total = cached + new

        def random(heads: int, tokens: int) -> torch.Tensor:
            return torch.randn(batch, heads, tokens, HEAD_DIM, generator=generator).to(dtype)

        self.query = random(kv_heads * group, new)
        self.key = random(kv_heads, total)
        self.value = random(kv_heads, total)
        rows = torch.arange(cached, total).view(-1, 1)
        self.mask = (torch.arange(total) <= rows).expand(batch, 1, new, total).clone()
        self.module: Any = SimpleNamespace(num_key_value_groups=group, is_causal=True, layer_idx=0)
        self.backend = FoldedAttention()

    def both(self, mask: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        stock = attention_function("sdpa")
        arguments = (self.module, self.query, self.key, self.value)
        mine = self.backend.attend(AttentionCall.from_transformers(*arguments, mask, **options))
        theirs, _ = stock(*arguments, None if mask is None else mask.clone(), **options)
        assert mine.shape == theirs.shape
        assert mine.is_contiguous()
        return mine, theirs


@pytest.fixture
def stock_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Notes every call that is passed on to the stock function."""
    calls: list[dict[str, Any]] = []
    real = attention_function("sdpa")

    def noting(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(scope, "attention_function", lambda _own: noting)
    return calls


@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(2, 4),
    new=st.sampled_from([1, 2, 5, 64]),
    cached=st.integers(0, 9),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_causal_masks(batch: int, kv_heads: int, group: int, new: int, cached: int, seed: int) -> None:
    call = Call(batch=batch, kv_heads=kv_heads, group=group, new=new, cached=cached, seed=seed)
    torch.testing.assert_close(*call.both(call.mask), rtol=1e-5, atol=1e-6)


def test_it_really_folds(stock_calls: list[dict[str, Any]]) -> None:
    call = Call()
    call.both(call.mask)
    Call(new=1).both(None)
    assert stock_calls == []


@pytest.mark.parametrize("new", [1, 4])
def test_padding_of_some_sequences(new: int) -> None:
    call = Call(batch=3, new=new)
    call.mask[1, :, :, :3] = False
    call.mask[2, :, :, 2:6] = False
    torch.testing.assert_close(*call.both(call.mask), rtol=1e-5, atol=1e-6)


def test_one_mask_for_all_sequences_of_a_batch() -> None:
    call = Call(batch=3)
    torch.testing.assert_close(*call.both(call.mask[:1]), rtol=1e-5, atol=1e-6)


def test_a_window_of_keys() -> None:
    call = Call(new=5, cached=10)
    positions = torch.arange(15)
    call.mask &= (positions.view(1, -1) > torch.arange(10, 15).view(-1, 1) - 4).view(1, 1, 5, 15)
    torch.testing.assert_close(*call.both(call.mask), rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_is_like_the_stock_one() -> None:
    """Left padding leaves queries without any key; what comes of them must not be worse than before."""
    call = Call(batch=2, new=4, cached=0)
    call.mask[1, :, :2] = False
    mine, theirs = call.both(call.mask)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_additive_masks() -> None:
    call = Call(batch=2)
    additive = torch.zeros(call.mask.shape).masked_fill(~call.mask, torch.finfo(torch.float32).min)
    additive[1, :, :, 2] = -0.7
    torch.testing.assert_close(*call.both(additive), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    call = Call(dtype=dtype)
    torch.testing.assert_close(*call.both(call.mask), rtol=2e-2, atol=2e-2)


def test_one_token_without_a_mask() -> None:
    torch.testing.assert_close(*Call(new=1, batch=2).both(None), rtol=1e-5, atol=1e-6)


def test_scaling_is_passed_on() -> None:
    call = Call()
    mine, theirs = call.both(call.mask, scaling=0.9)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(mine, call.both(call.mask)[0])


def test_values_may_have_another_head_size() -> None:
    call = Call()
    call.value = torch.randn(1, 2, 11, 5)
    torch.testing.assert_close(*call.both(call.mask), rtol=1e-5, atol=1e-6)


def test_keys_may_be_views_of_a_larger_buffer() -> None:
    call = Call(batch=2)
    buffer = torch.randn(2, 5, 40, HEAD_DIM)
    buffer[:, 1:3, :11] = call.key
    wanted = call.both(call.mask)[1]
    call.key = buffer[:, 1:3, :11]
    torch.testing.assert_close(call.both(call.mask)[0], wanted, rtol=1e-5, atol=1e-6)


def test_a_mask_serves_layers_with_other_group_sizes() -> None:
    """Layers of one model share the mask tensor, and may have other numbers of heads."""
    small, large = Call(group=2), Call(group=4)
    large.backend, mask = small.backend, small.mask
    torch.testing.assert_close(*small.both(mask), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*large.both(mask), rtol=1e-5, atol=1e-6)


def test_a_mask_serves_layers_with_other_dtypes() -> None:
    full, half = Call(), Call(dtype=torch.bfloat16)
    half.backend, mask = full.backend, full.mask
    torch.testing.assert_close(*full.both(mask), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*half.both(mask), rtol=2e-2, atol=2e-2)


def test_a_mask_that_was_changed_is_read_again() -> None:
    call = Call()
    call.both(call.mask)
    call.mask[:, :, :, 0] = False
    torch.testing.assert_close(*call.both(call.mask), rtol=1e-5, atol=1e-6)


def test_layers_share_what_is_made_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once per mask, and goes with the mask."""
    made = []
    fold = folded._fold_mask

    def counting(*arguments: Any) -> torch.Tensor:
        made.append(weakref.ref(result := fold(*arguments)))
        return result

    monkeypatch.setattr(folded, "_fold_mask", counting)
    call = Call()
    for _ in range(3):
        call.both(call.mask)
    assert len(made) == 1
    assert made[0]() is not None
    call.mask = call.mask.clone()
    assert made[0]() is None
    call.both(call.mask)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("shape", "mask", "options"),
    [
        ({"group": 1}, True, {}),
        ({"new": 65, "batch": 2}, True, {}),
        ({"new": 4, "cached": 0}, False, {}),
        ({}, True, {"is_causal": False}),
        ({}, True, {"something_new": 3}),
    ],
    ids=["no groups", "many tokens", "no mask", "not causal", "unknown argument"],
)
def test_what_it_does_not_know_goes_to_the_stock_function(
    stock_calls: list[dict[str, Any]], shape: dict[str, int], mask: bool, options: dict[str, Any]
) -> None:
    call = Call(**shape)  # type: ignore[arg-type]
    mine, theirs = call.both(call.mask if mask else None, **options)
    assert torch.equal(mine, theirs)
    assert len(stock_calls) == 1
    assert options.items() <= stock_calls[0].items()


def test_dropout_and_masks_per_head_go_to_the_stock_function(stock_calls: list[dict[str, Any]]) -> None:
    call = Call()
    call.backend.attend(AttentionCall(call.module, call.query, call.key, call.value, call.mask, dropout=0.5))
    per_head = call.mask.expand(-1, 6, -1, -1).clone()
    per_head[:, 3, :, :2] = False
    torch.testing.assert_close(*call.both(per_head), rtol=1e-5, atol=1e-6)
    assert [options["dropout"] for options in stock_calls] == [0.5, 0.0]


def test_arguments_that_change_nothing_are_no_obstacle(stock_calls: list[dict[str, Any]]) -> None:
    call = Call()
    call.both(call.mask, position_ids=torch.arange(4), use_cache=True, softcap=None, s_aux=None)
    assert stock_calls == []


# --- switching a model -----------------------------------------------------------------------


def test_a_model_runs_folded_inside_and_is_restored(make_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama()
    assert can_fold(model)
    calls = []
    attend = FoldedAttention.attend

    def counting(self: FoldedAttention, call: AttentionCall) -> torch.Tensor:
        calls.append(1)
        return attend(self, call)

    monkeypatch.setattr(FoldedAttention, "attend", counting)
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        stock = model(input_ids=ids, attention_mask=_padded(ids)).logits
        with forward_scope(model, FoldedAttention()):
            assert model.config._attn_implementation == NAME
            inside = model(input_ids=ids, attention_mask=_padded(ids)).logits
    assert model.config._attn_implementation == "sdpa"
    assert len(calls) == 2
    torch.testing.assert_close(inside[:, 3:], stock[:, 3:], rtol=1e-4, atol=1e-5)


def _padded(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    return mask


def test_only_sdpa_models_are_folded(make_llama: Any) -> None:
    assert not can_fold(make_llama(attn_implementation="eager"))


# --- two parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("new", "cached"), [(65, 1), (70, 300), (200, 64)])
def test_long_tails_are_split(
    new: int, cached: int, group: int, dtype: torch.dtype, stock_calls: list[dict[str, Any]]
) -> None:
    """Neither masked nor copied to all heads: that took 1.4 to 1.8 x as long."""
    call = Call(new=new, cached=cached, group=group, dtype=dtype)
    mine, theirs = call.both(call.mask)
    assert stock_calls == []
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("hidden", [(0, 0, 0, 0), (0, 0, 69, 6)])
def test_long_tails_that_do_not_see_everything_are_not(
    hidden: tuple[int, ...], stock_calls: list[dict[str, Any]]
) -> None:
    call = Call(new=70, cached=7)
    mask = call.mask.clone()
    mask[hidden] = False
    assert torch.equal(*call.both(mask))
    assert len(stock_calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("new", "cached"), [(1, 5), (4, 7), (30, 3), (64, 100)])
def test_two_parts_give_what_one_gives(new: int, cached: int, dtype: torch.dtype) -> None:
    call = Call(new=new, cached=cached, dtype=dtype)
    got = folded._in_two_parts(AttentionCall(call.module, call.query, call.key, call.value, None))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(got.float(), call.both(call.mask)[1].float(), rtol=0, atol=tolerance)


def test_only_a_plain_causal_tail_is_split() -> None:
    mask = Call(new=4, cached=7).mask
    assert folded._is_causal_tail(mask)
    additive = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    assert folded._is_causal_tail(additive)
    for at in ((0, 0, 0, 0), (0, 0, 3, 6), (0, 0, 2, 8)):  # padding, a window, a token that is hidden
        other = mask.clone()
        other[at] = False
        assert not folded._is_causal_tail(other)
    ahead = mask.clone()
    ahead[0, 0, 0, 10] = True
    assert not folded._is_causal_tail(ahead)
    assert not folded._is_causal_tail(mask.expand(2, 1, 4, 11).clone())
    assert not folded._is_causal_tail(mask[..., 7:].clone())  # nothing is cached


def test_a_mask_that_was_changed_is_looked_at_again() -> None:
    mask = Call(new=4, cached=7).mask.clone()
    backend = FoldedAttention()
    assert backend._derived(mask).is_causal_tail()
    mask[0, 0, 0, 0] = False
    assert not backend._derived(mask).is_causal_tail()
