"""Attention over a long cache without copying K and V: fold the query groups.

With grouped-query attention and a mask, transformers repeats K and V to all query heads on every
layer and step. Folding the group into the query axis (`[batch, kv_heads, group * n, head_dim]`
against K and V as they lie) gives the same numbers without that copy. The function is registered
in transformers' attention interface under a name of ours and switched on only while the engine
runs a forward, and only on models whose own implementation is sdpa; whatever it does not know is
passed on to transformers' own sdpa function.

The name stands in the model's config meanwhile, where other threads and copies of the model meet it: for
them it is nothing but the model's own attention. Ours acts in the context of the forward alone.

While a `QueryPattern` is in force (a forward over scattered positions), queries go through in blocks
that see only the keys up to their last position, and their attention probabilities can be observed.
Knows no cache and no engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from transformers import AttentionInterface, AttentionMaskInterface

from kvboost import locks
from kvboost.compat import attention_function, mask_function, text_config
from kvboost.identity.attention_name import BORROWED_NAMES, BorrowedName, own_name
from kvboost.kernels.partial import merged, partial_attention

NAME = "kvboost_folded"
# More new tokens than this, and the copies of the mask cost more than the folding saves.
_MAX_FOLDED_TOKENS = 64
# Queries per block of a scattered forward, on a CPU and on a GPU.
_BLOCK_TOKENS = {False: 64, True: 512}
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
    pattern = _PATTERN.get()
    if pattern is not None:
        return pattern.attend(module, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs)
    if attention_mask is not None and _can_split(query, attention_mask, dropout, is_causal, kwargs):
        return _in_two_parts(query, key, value, scaling), None
    if not _can_fold(query, key, attention_mask, dropout, is_causal, kwargs):
        return pass_on(module, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs)
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
    if tokens > _MAX_FOLDED_TOKENS or query.shape[1] == key.shape[1]:
        return False
    if attention_mask is None and tokens > 1:
        return False  # plain causal prefill keeps the stock kernel
    if attention_mask is not None and attention_mask.shape[1] != 1:
        return False  # a mask per head
    if is_causal is False:
        return False
    return is_plain(dropout, extra)


def _can_split(
    query: torch.Tensor,
    mask: torch.Tensor,
    dropout: float,
    is_causal: bool | None,
    extra: dict[str, Any],
) -> bool:
    """Whether new tokens just follow cached ones: on a GPU, kernels without a mask are the fast ones."""
    if query.device.type != "cuda" or query.shape[0] != 1 or is_causal is False:
        return False
    return is_plain(dropout, extra) and _is_causal_tail(mask)


def _is_causal_tail(mask: torch.Tensor) -> bool:
    """Whether `[1, 1, n, tokens]` lets the last n tokens see all before them; looked at once per mask."""
    kept: tuple[int, bool] | None = getattr(mask, "_kvboost_tail", None)
    if kept is not None and kept[0] == mask._version:
        return kept[1]
    tokens = mask.shape[2]
    answer = False
    if mask.shape[:2] == (1, 1) and tokens < mask.shape[3]:
        visible = mask if mask.dtype == torch.bool else mask == 0
        corner = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril_()
        cached = mask.shape[3] - tokens
        answer = bool(visible[0, 0, :, :cached].all() & (visible[0, 0, :, cached:] == corner).all())
    mask._kvboost_tail = (mask._version, answer)  # type: ignore[attr-defined]  # rides along with its mask
    return answer


def _in_two_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """The last n tokens over those before them, folded, and over themselves: `[1, n, heads, head_dim]`."""
    tokens, head_dim = query.shape[2:]
    kv_heads = key.shape[1]
    scale = scaling if scaling is not None else head_dim**-0.5
    cached = key.shape[2] - tokens
    own, own_sums = partial_attention(
        query, key[:, :, cached:], value[:, :, cached:], None, scale, causal=True
    )
    folded_query = query.reshape(1, kv_heads, -1, head_dim)
    seen, sums = partial_attention(folded_query, key[:, :, :cached], value[:, :, :cached], None, scale)
    out = merged(own, own_sums, seen.reshape(own.shape), sums.reshape(own_sums.shape))
    return out.transpose(1, 2).to(query.dtype, memory_format=torch.contiguous_format)


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


def is_plain(dropout: float, extra: dict[str, Any]) -> bool:
    """Whether attention is nothing but a masked softmax, so that ours may stand in for the model's own."""
    return not dropout and all(name in _HARMLESS or argument is None for name, argument in extra.items())


class Pattern(Protocol):
    """What the queries of a forward see, where that is not all tokens before them."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float,
        scaling: float | None,
        is_causal: bool | None,
        extra: dict[str, Any],
        /,
    ) -> tuple[torch.Tensor, None]:
        """Attention of `query` `[1, heads, n, head_dim]`, as transformers' functions return it."""


class QueryPattern:
    """Queries at sorted positions `[n]`, each of which sees the keys at and before its own position.

    `filled` `[tokens]` names the keys that may be seen at all; None = all of them. With `observe`, the
    attention probability of every key is collected: the maximum over the queries, summed over heads
    and layers (`scores` `[tokens]`).
    """

    def __init__(
        self,
        positions: torch.Tensor,
        tokens: int,
        *,
        filled: torch.Tensor | None = None,
        observe: bool = False,
    ) -> None:
        self.positions = positions
        self.tokens = tokens
        self.filled = filled
        self.scores = torch.zeros(tokens, device=positions.device) if observe else None
        self._blocks: list[tuple[int, int, int]] = []
        self._ends = positions.tolist()
        self._masks: dict[Any, torch.Tensor] = {}
        size = _BLOCK_TOKENS[positions.device.type == "cuda"]
        for start in range(0, len(self._ends), size):
            end = min(start + size, len(self._ends))
            self._blocks.append((start, end, self._ends[end - 1] + 1))

    def mask(
        self,
        start: int,
        end: int,
        keys: int,
        dtype: torch.dtype,
        group: int = 1,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Additive mask `[1, 1, group * (end - start), keys]` of queries `[start, end)`, made once."""
        made_for = (start, end, keys, dtype, group, device or self.positions.device)
        if made_for not in self._masks:
            visible = torch.arange(keys, device=self.positions.device) <= self.positions[start:end, None]
            if self.filled is not None:
                visible &= self.filled[:keys]
            values = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            values.masked_fill_(~visible, torch.finfo(dtype).min)
            self._masks[made_for] = values.repeat(group, 1)[None, None].to(made_for[-1])
        return self._masks[made_for]

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float,
        scaling: float | None,
        is_causal: bool | None,
        extra: dict[str, Any],
    ) -> tuple[torch.Tensor, None]:
        """Attention of `query` `[1, heads, n, head_dim]`, block by block."""
        batch, heads, tokens, head_dim = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        known = is_plain(dropout, extra)
        if self.scores is not None:
            probabilities = self._observe(query, key, scaling, extra.get("softcap"))
            if known and batch == 1:
                seen = torch.bmm(probabilities.to(value.dtype), value[0])
                return seen.reshape(heads, tokens, -1).transpose(0, 1).unsqueeze(0), None
        if not known or batch != 1:
            return pass_on(module, query, key, value, attention_mask, dropout, scaling, is_causal, extra)
        result = query.new_empty(batch, heads, tokens, value.shape[3])
        for start, end, keys in self._blocks:
            block = functional.scaled_dot_product_attention(
                query[:, :, start:end].reshape(batch, kv_heads, group * (end - start), head_dim),
                key[:, :, :keys],
                value[:, :, :keys],
                attn_mask=self.mask(start, end, keys, query.dtype, group, query.device),
                scale=scaling,
            )
            result[:, :, start:end] = block.reshape(batch, heads, end - start, value.shape[3])
        return result.transpose(1, 2).contiguous(), None

    def _observe(
        self, query: torch.Tensor, key: torch.Tensor, scaling: float | None, softcap: float | None
    ) -> torch.Tensor:
        """Add to the scores; returns the attention probabilities `[kv_heads, group * n, tokens]`."""
        _, heads, tokens, head_dim = query.shape
        group = heads // key.shape[1]
        folded_query = query[0].reshape(key.shape[1], group * tokens, head_dim)
        weights = torch.bmm(folded_query, key[0].transpose(1, 2)).float()
        weights *= scaling if scaling is not None else head_dim**-0.5
        if softcap is not None:
            weights = torch.tanh(weights / softcap) * softcap
        weights += self.mask(0, tokens, self.tokens, torch.float32, group, weights.device)[0, 0]
        probabilities = weights.softmax(-1)
        assert self.scores is not None
        highest = probabilities.reshape(heads, tokens, -1).amax(1)
        self.scores += highest.sum(0).to(self.scores.device)
        return probabilities


_PATTERN: ContextVar[Pattern | None] = ContextVar("kvboost_query_pattern", default=None)
_OWN: ContextVar[str | None] = ContextVar("kvboost_own_attention", default=None)  # None: no forward of ours


def pass_on(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    extra: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """The model's own attention, for what ours does not know."""
    own = "eager" if _OWN.get() == "eager" else "sdpa"
    output = _own_function(module, own)(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **extra,
    )
    return output[0], None


def _own_function(module: torch.nn.Module, own: str) -> Callable[..., Any]:
    """What computes the model's attention where ours does not: its eager function, or a registered one."""
    if own == "eager":
        eager: Callable[..., Any] | None = getattr(
            sys.modules[type(module).__module__], "eager_attention_forward", None
        )
        if eager is not None:
            return eager
        own = "sdpa"
    function: Callable[..., Any] = attention_function(own)
    return function


def _attend(
    module: torch.nn.Module, *args: Any, own: str, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What stands under our names: our attention in a forward of ours, else the model's own as it is."""
    if _OWN.get() is None:
        result: tuple[torch.Tensor, torch.Tensor | None] = _own_function(module, own)(module, *args, **kwargs)
        return result
    return folded_attention(module, *args, **kwargs)


# --- the name in the config ----------------------------------------------------------------------


_naming = locks.fork_safe_lock()
_SWITCHED: list[tuple[Any, Any]] = []  # configs that hold our name now, with what stood there


def _name_over(own: str) -> BorrowedName:
    """Our name for models whose own implementation is `own`; without "flash", which has a meaning."""
    with _naming:
        if own not in BORROWED_NAMES:
            number = len(BORROWED_NAMES)
            name = BorrowedName(
                NAME if own == "sdpa" else f"kvboost_{number}_{own if own == 'eager' else 'other'}"
            )
            name.own = own
            AttentionInterface.register(name, partial(_attend, own=own))
            AttentionMaskInterface.register(name, mask_function(own))
            BORROWED_NAMES[own] = name
        return BORROWED_NAMES[own]


@contextmanager
def _switched(model: Any) -> Iterator[None]:
    """Inside, the model's attention is called under our name, and this context is a forward of ours."""
    config = text_config(model)
    before = config._attn_implementation
    own = str(own_name(before))
    entry = (config, before)
    active = _OWN.set(own)
    _SWITCHED.append(entry)
    try:
        config._attn_implementation = _name_over(own)
        yield
    finally:
        if isinstance(config._attn_implementation, BorrowedName):  # else somebody chose another one meanwhile
            config._attn_implementation = before
        with _naming:
            _SWITCHED[:] = [each for each in _SWITCHED if each is not entry]
        _OWN.reset(active)


def _restore_all() -> None:
    """In the child of a fork nobody runs a forward."""
    for config, before in reversed(_SWITCHED):
        config._attn_implementation = before
    _SWITCHED.clear()


locks.undo_in_child(_restore_all)


@contextmanager
def patterned(model: Any, pattern: Pattern) -> Iterator[None]:
    """Run forwards inside over the scattered positions of `pattern`, whatever the model's attention is."""
    active = _PATTERN.set(pattern)
    try:
        with _switched(model):
            yield
    finally:
        _PATTERN.reset(active)


def can_engage(model: Any) -> bool:
    """Whether the folded function may stand in for the model's own attention."""
    return bool(own_name(text_config(model)._attn_implementation) == "sdpa")


@contextmanager
def folded(model: Any) -> Iterator[None]:
    """Run the model with folded attention inside; restore its own implementation afterwards."""
    with _switched(model):
        yield
