"""What the layers of a model see: everything before a token, a sliding window of it, or something else.

Configurations and keyword arguments name windows in many ways, and not every name has an effect. So we read
the masks that a model makes itself: a few tokens at the far end of its range go through it, behind a cache
that only claims to be full, with attention that records its mask and computes nothing. That costs one decode
step and no memory, however long the range is. Knows no engine and no backend but its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from kvboost.compat import comparable, probing, text_config
from kvboost.errors import UnsupportedModelError
from kvboost.identity.structure import own_name
from kvboost.kernels.scope import AttentionCall, forward_scope

_TOKENS = 3  # enough to tell a sliding window from a chunk, which does not move with every token
_RANGE_TOKENS = 32_768  # for models that name no maximum length
_HIDDEN = -1e4  # a mask that adds this or less hides the key


@dataclass(frozen=True)
class Windows:
    """Per layer, how many tokens a token sees, itself included; None = all of them.

    `refusal` says why windows alone do not describe the masks, or why nothing could be learned (`layers` is
    empty then). `by_module` has the same windows by attention module. Windows of `range_tokens` or more have
    no effect.
    """

    layers: tuple[int | None, ...]
    by_module: WeakKeyDictionary[torch.nn.Module, int | None]
    range_tokens: int
    refusal: str = ""
    is_own_attention: bool = False  # no layer calls transformers' attention interface
    is_otherwise: bool = False  # a mask is neither causal nor a window: chunks, a prefix that sees ahead

    @property
    def smallest(self) -> int | None:
        """The smallest window in use; None = no layer has one."""
        return min((window for window in self.layers if window is not None), default=None)


_LEARNED: WeakKeyDictionary[torch.nn.Module, tuple[Any, Windows]] = WeakKeyDictionary()


def windows_of(model: Any) -> Windows:
    """What the layers of `model` see; measured the first time, when the caller holds the model lock."""
    kept = _LEARNED.get(model)
    return kept[1] if kept is not None else windows_now(model)


def windows_now(model: Any) -> Windows:
    """The same, measured again if the model's config or its modules have changed."""
    fields = {name: comparable(value) for name, value in vars(text_config(model)).items()}
    made_of = (fields, [id(module) for module in model.modules()])
    kept = _LEARNED.get(model)
    if kept is None or kept[0] != made_of:
        kept = _LEARNED[model] = (made_of, _learn(model))
    return kept[1]


def _learn(model: Any) -> Windows:
    recorder = _Recorder()
    cached = _far_end(model)
    device = model.get_input_embeddings().weight.device
    config = text_config(model)
    num_layers = int(config.num_hidden_layers)
    try:
        with probing(model, "showing its masks"), _with_masks(config), forward_scope(model, recorder):
            model(
                input_ids=torch.zeros(1, _TOKENS, dtype=torch.long, device=device),
                past_key_values=_FullCache(num_layers, cached),
                use_cache=True,
            )
    except UnsupportedModelError as error:
        return Windows((), WeakKeyDictionary(), cached, str(error))
    if len(recorder.seen) != num_layers:
        reason = f"{len(recorder.seen)} of {num_layers} layers call transformers' attention interface"
        return Windows((), WeakKeyDictionary(), cached, reason, is_own_attention=not recorder.seen)
    learned = _read([(module, mask) for module, mask, _ in recorder.seen], cached)
    named = [window if window is None or window <= cached else None for _, _, window in recorder.seen]
    if not learned.refusal and not _uses_masks(config) and named != list(learned.layers):
        # kernels without a mask go by the argument alone
        reason = f"its layers name windows of {named} tokens, and their masks show {list(learned.layers)}"
        return Windows(learned.layers, learned.by_module, cached, reason)
    return learned


def _uses_masks(config: Any) -> bool:
    return own_name(config._attn_implementation) in ("sdpa", "eager")


@contextmanager
def _with_masks(config: Any) -> Iterator[None]:
    """Inside, the model makes masks, even if its own kernels need none."""
    before = config._attn_implementation
    if not _uses_masks(config):
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = before


def _far_end(model: Any) -> int:
    """Tokens before the last ones of the model's range; longer windows have no effect."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    longest = int(limit) if isinstance(limit, int) and limit > 0 else _RANGE_TOKENS
    return max(1, longest - _TOKENS - 1)


def _read(seen: Sequence[tuple[torch.nn.Module, torch.Tensor | None]], cached: int) -> Windows:
    """Windows of recorded masks, each `[1, 1, n, cached + n]`."""
    known: dict[int, tuple[int | None, str]] = {}  # layers share masks
    layers: list[int | None] = []
    by_module: WeakKeyDictionary[torch.nn.Module, int | None] = WeakKeyDictionary()
    refusals: list[str] = []
    for number, (module, mask) in enumerate(seen):
        if id(mask) not in known:
            try:
                known[id(mask)] = _window(mask, cached)
            except _UnknownMaskError as error:
                reason = f"the mask of layer {number} {error}"
                otherwise = isinstance(error, _OtherMaskError)
                return Windows((), WeakKeyDictionary(), cached, reason, is_otherwise=otherwise)
        window, problem = known[id(mask)]
        if problem:
            refusals.append(f"the mask of layer {number} {problem}")
        elif module in by_module and by_module[module] != window:
            refusals.append(f"layer {number} is used again with another mask")
        layers.append(window)
        by_module[module] = window
    return Windows(tuple(layers), by_module, cached, next(iter(refusals), ""))


class _UnknownMaskError(Exception):
    """There is no mask `[1, 1, n, tokens]` to read."""


class _OtherMaskError(_UnknownMaskError):
    """A mask that is neither causal nor a sliding window."""


def _window(mask: torch.Tensor | None, cached: int) -> tuple[int | None, str]:
    """The window of a mask, and what else it does; "" = nothing."""
    tokens = cached + _TOKENS
    if mask is None:
        raise _UnknownMaskError("is left to the attention function")
    if mask.dim() != 4 or mask.shape[0] != 1 or mask.shape[2:] != (_TOKENS, tokens):
        raise _UnknownMaskError(f"has the shape {tuple(mask.shape)}, expected {(1, 1, _TOKENS, tokens)}")
    visible = mask if mask.dtype == torch.bool else mask > _HIDDEN
    first = int(visible[0, 0, -1].to(torch.uint8).argmax())  # that the last token sees
    window = None if first == 0 else tokens - first
    keys = torch.arange(tokens, device=mask.device)
    queries = torch.arange(cached, tokens, device=mask.device)[:, None]
    expected = keys <= queries
    if window is not None:
        expected &= keys > queries - window
    if not bool((visible == expected).all()):
        raise _OtherMaskError("is neither causal nor a sliding window")
    if mask.dtype != torch.bool and bool((mask.masked_fill(~visible, 0) != 0).any()):
        return window, "adds a bias to what is seen"
    return window, ""


class _Recorder:
    """A backend that records the mask of every layer and the window that it names, and returns zeros."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.nn.Module, torch.Tensor | None, int | None]] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Zeros `[1, n, heads, head_dim]`."""
        self.seen.append((call.module, call.mask, call.extra.get("sliding_window")))
        batch, heads, tokens, _ = call.query.shape
        return call.query.new_zeros(batch, tokens, heads, call.value.shape[3])


class _FullLayer(CacheLayerMixin):
    """A cache layer that claims to hold `length` tokens, and holds none."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    is_initialized = True

    def __init__(self, length: int) -> None:
        self.length = length
        self.keys = self.values = None

    def lazy_initialization(self, *_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views `[1, kv_heads, length + n, head_dim]` that repeat the first of the new tokens."""
        tokens = self.length + key_states.shape[-2]
        keys, values = (states[:, :, :1].expand(-1, -1, tokens, -1) for states in (key_states, value_states))
        return keys, values

    def get_seq_length(self, *_args: Any) -> int:
        return self.length

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """(kv_length, kv_offset); older versions pass positions, newer ones the query length."""
        return self.length + (query.shape[0] if isinstance(query, torch.Tensor) else query), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class _FullCache(Cache):
    """A cache whose layers claim to hold `length` tokens each."""

    def __init__(self, num_layers: int, length: int) -> None:
        super().__init__(layers=[_FullLayer(length) for _ in range(num_layers)])


def kept_by_own_cache(model: Any) -> tuple[int | None, ...]:
    """Per layer, how many tokens the cache keeps that transformers' generate makes; None = all."""
    cache = DynamicCache(config=text_config(model))
    return tuple(
        int(layer.sliding_window) if getattr(layer, "is_sliding", False) else None for layer in cache.layers
    )
