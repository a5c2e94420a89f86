"""Grouped-query attention over a long cache without copying K and V: the query groups are folded.

With grouped queries and a mask, transformers repeats K and V to all query heads on every layer and step.
Folding the group into the query axis (`[batch, kv_heads, group * n, head_dim]` against K and V as they lie)
gives the same numbers without that copy. It stands in for sdpa alone; calls that it cannot compute go to
transformers' own sdpa function. Knows no cache and no engine.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as functional

from kvboost.compat import text_config
from kvboost.identity.structure import own_name
from kvboost.kernels.partial import merged, partial_attention
from kvboost.kernels.scope import AttentionCall, model_attention
from kvboost.kernels.windows import windows_of

# With more new tokens than this, copying the mask costs more than folding saves.
_MAX_FOLDED_TOKENS = 64


def can_fold(model: Any) -> bool:
    """Whether folded attention may stand in for the model's own.

    Models that do not use transformers' attention interface may still look at the name in their config, and
    take another path where it is not "sdpa", with masks not made for it.
    """
    return _is_sdpa(model) and not windows_of(model).is_own_attention


def _is_sdpa(model: Any) -> bool:
    return bool(own_name(text_config(model)._attn_implementation) == "sdpa")


class FoldedAttention:
    """The backend of plain forwards. What it derives from a mask is made once and shared by the layers."""

    def __init__(self) -> None:
        self._masks: dict[int, _Derived] = {}  # by the id of the mask, as long as that lives

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention `[batch, n, heads, head_dim]`."""
        mask = call.mask
        if mask is not None and _may_split(call) and self._derived(mask).is_causal_tail():
            return _in_two_parts(call)
        if not _may_fold(call):
            return model_attention(call)
        query, key, value = call.query, call.key, call.value
        batch, heads, tokens, head_dim = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        out = functional.scaled_dot_product_attention(
            query.reshape(batch, kv_heads, group * tokens, head_dim),
            key,
            value,
            attn_mask=None if mask is None else self._derived(mask).folded(group, query.dtype),
            scale=call.scaling,
        )
        return out.reshape(batch, heads, tokens, value.shape[3]).transpose(1, 2).contiguous()

    def _derived(self, mask: torch.Tensor) -> _Derived:
        """What is known of a mask; of one that was written to since, nothing."""
        key = id(mask)
        known = self._masks.get(key)
        if known is None or known.version != mask._version:
            known = self._masks[key] = _Derived(mask, lambda _: self._masks.pop(key, None))
        return known


class _Derived:
    """What was derived from one version of a mask. It does not keep the mask alive, and goes with it."""

    def __init__(self, mask: torch.Tensor, forget: Any) -> None:
        self.version = mask._version
        self._mask = weakref.ref(mask, forget)
        self._folded: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._is_causal_tail: bool | None = None

    def folded(self, group: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[batch, 1, group * n, tokens]`."""
        made = self._folded.get((group, dtype))
        if made is None:
            made = self._folded[group, dtype] = _fold_mask(self._alive(), group, dtype)
        return made

    def is_causal_tail(self) -> bool:
        """Whether the new tokens just follow cached ones, all of which they see."""
        if self._is_causal_tail is None:
            self._is_causal_tail = _is_causal_tail(self._alive())
        return self._is_causal_tail

    def _alive(self) -> torch.Tensor:
        mask = self._mask()
        assert mask is not None  # the caller has it
        return mask


def _may_fold(call: AttentionCall) -> bool:
    mask = call.mask
    _, heads, tokens, _ = call.query.shape
    if tokens > _MAX_FOLDED_TOKENS or heads == call.key.shape[1]:
        return False
    if mask is None and tokens > 1:
        return False  # plain causal prefill keeps the stock kernel
    if mask is not None and mask.shape[1] != 1:
        return False  # a mask per head
    if call.is_causal is False:
        return False
    return call.is_plain


def _fold_mask(mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask `[batch, 1, group * n, tokens]` of a boolean or additive one `[batch, 1, n, tokens]`."""
    values = mask
    if mask.dtype == torch.bool:
        values = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return values.repeat(1, 1, group, 1)


# --- two parts -----------------------------------------------------------------------------------


def _may_split(call: AttentionCall) -> bool:
    """Kernels without a mask are the fast ones; they need a mask that is a causal tail.

    On a CPU, which folds short tails, this is for long ones: masks cost there more than what they hide.
    """
    query = call.query
    if query.shape[0] != 1 or call.is_causal is False or not call.is_plain:
        return False
    if query.device.type == "cpu":
        is_kernels = query.dtype in (torch.float32, torch.bfloat16) and query.shape[3] == call.value.shape[3]
        return is_kernels and query.shape[2] > _MAX_FOLDED_TOKENS
    return query.device.type == "cuda"


def _is_causal_tail(mask: torch.Tensor) -> bool:
    """Whether `[1, 1, n, tokens]` lets the last n tokens see all before them."""
    tokens = mask.shape[2]
    if mask.shape[:2] != (1, 1) or tokens >= mask.shape[3]:
        return False
    visible = mask if mask.dtype == torch.bool else mask == 0
    corner = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril_()
    cached = mask.shape[3] - tokens
    return bool(visible[0, 0, :, :cached].all() & (visible[0, 0, :, cached:] == corner).all())


def _in_two_parts(call: AttentionCall) -> torch.Tensor:
    """The last n tokens over those before them, folded, and over themselves: `[1, n, heads, head_dim]`."""
    query, key, value, scale = call.query, call.key, call.value, call.scale
    tokens, head_dim = query.shape[2:]
    kv_heads = key.shape[1]
    cached = key.shape[2] - tokens
    own, own_sums = partial_attention(
        query, key[:, :, cached:], value[:, :, cached:], None, scale, causal=True
    )
    folded_query = query.reshape(1, kv_heads, -1, head_dim)
    seen, sums = partial_attention(folded_query, key[:, :, :cached], value[:, :, :cached], None, scale)
    out = merged(own, own_sums, seen.reshape(own.shape), sums.reshape(own_sums.shape))
    return out.transpose(1, 2).to(query.dtype).contiguous()
