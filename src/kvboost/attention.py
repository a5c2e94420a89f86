"""Attention over a long cache without copying K and V: fold the query groups.

With grouped-query attention and a mask, transformers repeats K and V to all query heads on every
layer and step. Folding the group into the query axis (`[batch, kv_heads, group * n, head_dim]`
against K and V as they lie) gives the same numbers without that copy. The function is registered
in transformers' attention interface under a name of ours and switched on only while the engine
runs a forward, and only on models whose own implementation is sdpa; whatever it does not know is
passed on to transformers' own sdpa function. Knows no cache and no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from transformers import AttentionInterface, AttentionMaskInterface

from kvboost.compat import sdpa_attention_function, sdpa_mask_function, text_config

NAME = "kvboost_folded"
# More new tokens than this, and the copies of the mask cost more than the folding saves.
_MAX_FOLDED_TOKENS = 64
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "sliding_window",
        "output_attentions",
        "output_hidden_states",
    }
)


def folded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` `[batch, heads, n, head_dim]` over `[batch, kv_heads, tokens, head_dim]`.

    Returns `[batch, n, heads, head_dim]`, like transformers' own functions.
    """
    batch, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    if not _can_fold(query, key, attention_mask, dropout, is_causal, kwargs):
        output: tuple[torch.Tensor, None] = sdpa_attention_function()(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return output
    group = heads // kv_heads
    folded = functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, group * tokens, head_dim),
        key,
        value,
        attn_mask=None if attention_mask is None else _fold_mask(attention_mask, group, query.dtype),
        scale=scaling,
    )
    result = folded.reshape(batch, heads, tokens, value.shape[3])
    return result.transpose(1, 2).contiguous(), None


def _can_fold(
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    extra: dict[str, Any],
) -> bool:
    tokens = query.shape[2]
    if tokens > _MAX_FOLDED_TOKENS or query.shape[1] == key.shape[1] or dropout:
        return False
    if attention_mask is None and tokens > 1:
        return False  # plain causal prefill keeps the stock kernel
    if attention_mask is not None and attention_mask.shape[1] != 1:
        return False  # a mask per head
    if is_causal is False:
        return False
    return all(name in _HARMLESS or argument is None for name, argument in extra.items())


def _fold_mask(mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask `[batch, 1, group * n, tokens]`, made once per mask and shared by the layers."""
    made_for = (group, dtype, mask._version)
    kept: tuple[Any, torch.Tensor] | None = getattr(mask, "_kvboost_folded", None)
    if kept is not None and kept[0] == made_for:
        return kept[1]
    values = mask
    if mask.dtype == torch.bool:
        values = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    folded_mask = values.repeat(1, 1, group, 1)
    mask._kvboost_folded = (made_for, folded_mask)  # type: ignore[attr-defined]  # rides along with its mask
    return folded_mask


def can_engage(model: Any) -> bool:
    """Whether the folded function may stand in for the model's own attention."""
    return bool(text_config(model)._attn_implementation == "sdpa")


@contextmanager
def folded(model: Any) -> Iterator[None]:
    """Run the model with folded attention inside; restore its own implementation afterwards."""
    AttentionInterface.register(NAME, folded_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask_function())
    config = text_config(model)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
