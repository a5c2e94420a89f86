"""The arena: a Hugging Face `Cache` that owns its memory and never concatenates.

The KV of all layers lies in slabs `[batch, heads, capacity, head_dim]` (layout.py), mostly in just one.
A layer's keys are a view of some of its heads, so a stored chunk `[heads, tokens, head_dim]` is placed by
a single strided copy, and decoding writes in place. A slot is one of the `capacity` places for a token.
Together with compat.py this module absorbs the differences between transformers' cache interfaces. It
does not know where KV comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvboost.compat import CROP_ZERO_EMPTIES
from kvboost.kv.layout import KVLayout, Packed
from kvboost.models import PastKVType

_ALIGNED_BYTES = 64  # as torch aligns its own
_MANY_BYTES = 1 << 28


class ArenaLayer(CacheLayerMixin):
    """One layer's view of the arena; what the attention module of that layer talks to."""

    is_compileable = False
    is_croppable = True
    is_sliding = False  # all keys are kept; a sliding window is the mask's business
    is_initialized = True

    def __init__(self, arena: Arena, index: int) -> None:
        self._arena = arena
        self._index = index
        self.length = 0
        self.bind()

    def bind(self) -> None:
        """Take new views after the arena replaced its slabs."""
        key, value = self._arena.layout.layers[self._index]
        self._keys = self._arena.slabs[key.slab][:, key.start : key.end]
        self._values = self._arena.slabs[value.slab][:, value.start : value.end]

    @property
    def keys(self) -> torch.Tensor:
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> torch.Tensor:
        return self._values[:, :, : self.length]

    @property
    def device(self) -> torch.device:
        return self._keys.device

    def lazy_initialization(self, *_states: torch.Tensor) -> None:
        """Nothing to do: the slabs exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[batch, kv_heads, n, head_dim]` at the end, or scatter where the arena says so."""
        slots = self._arena.scatter_slots
        if slots is not None:
            target = slots.to(self._keys.device)
            self._keys.index_copy_(2, target, key_states)
            self._values.index_copy_(2, target, value_states)
            self._arena.check_stop(self._index)
            return self.keys, self.values
        if self._index == 0 and self._arena.written_by is not None:
            self._arena.written_by()
        end = self.length + key_states.shape[-2]
        if end > self._arena.capacity:
            self._arena.grow(end)
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys, self.values

    def get_seq_length(self, *_args: Any) -> int:
        return self.length

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """(kv_length, kv_offset); older versions pass positions, newer ones the query length."""
        new_tokens = query.shape[0] if isinstance(query, torch.Tensor) else query
        return self.length + new_tokens, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.length = 0

    def crop(self, amount: int) -> None:
        """Negative: drop that many tokens. Positive: keep that many (older transformers)."""
        if amount == 0 and not CROP_ZERO_EMPTIES:
            return
        self.length = max(0, self.length + amount) if amount < 0 else min(self.length, amount)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("the arena reorders all layers at once")

    def offload(self) -> None:
        raise NotImplementedError("an arena cannot be offloaded")

    prefetch = offload


class Arena(Cache):
    """KV of one request or of a running batch, `[batch, kv_heads, capacity, head_dim]` per layer.

    It is allocated once. Appending grows it only when it is full; `scatter_at` writes to given slots instead.
    """

    def __init__(self, layout: KVLayout, capacity: int, batch: int = 1) -> None:
        self.layout = layout
        self.scatter_slots: torch.Tensor | None = None
        self.stop_after_layer: tuple[int, Exception] | None = None
        self.written_by: Callable[[], None] | None = None  # told of every forward that appends
        self.slabs = [
            _zeros((batch, spec.heads, capacity, spec.head_dim), spec.dtype, spec.device)
            for spec in layout.slabs
        ]
        super().__init__(layers=[ArenaLayer(self, index) for index in range(len(layout.layers))])

    @property
    def capacity(self) -> int:
        return self.slabs[0].shape[2]

    @property
    def batch(self) -> int:
        return self.slabs[0].shape[0]

    @property
    def length(self) -> int:
        """Tokens whose KV all layers hold."""
        return min(int(layer.length) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def set_length(self, length: int) -> None:
        """Declare the first `length` slots filled, and all others not."""
        if not 0 <= length <= self.capacity:
            raise ValueError(f"length must be from 0 to the capacity {self.capacity}, got {length}")
        for layer in self.layers:
            layer.length = length

    def place_at(self, packed: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        """Copy buffers `[heads, n, head_dim]` to slots `[n]` of every sequence."""
        for slab, part in zip(self.slabs, packed, strict=True):
            target = part.to(slab.device).expand(slab.shape[0], *part.shape)
            slab.index_copy_(2, slots.to(slab.device), target)

    def place(self, packed: Sequence[torch.Tensor], start: int) -> None:
        """Copy buffers `[heads, n, head_dim]` to the slots from `start` on of every sequence."""
        for slab, part in zip(self.slabs, packed, strict=True):
            slab[:, :, start : start + part.shape[1]] = part.to(slab.device)

    def clear(self, start: int, end: int) -> None:
        """Zero slots `[start, end)`."""
        for slab in self.slabs:
            slab[:, :, start:end].zero_()

    def move(self, start: int, to: int, count: int) -> None:
        """Copy `count` slots from `start` on to those from `to` on; the two may not overlap."""
        for slab in self.slabs:
            slab[:, :, to : to + count] = slab[:, :, start : start + count]

    def gathered(self, slots: torch.Tensor) -> Packed:
        """Copies `[heads, n, head_dim]` of `slots` `[n]` of the first sequence."""
        return tuple(slab[0].index_select(1, slots.to(slab.device)) for slab in self.slabs)

    def between(self, start: int, end: int) -> Packed:
        """Views `[heads, tokens, head_dim]` of slots `[start, end)` of the first sequence."""
        return tuple(slab[0, :, start:end] for slab in self.slabs)

    def as_past_key_values(self) -> PastKVType:
        """Views `[batch, kv_heads, length, head_dim]` per layer."""
        return tuple((layer.keys, layer.values) for layer in self.layers)

    @contextmanager
    def scatter_at(self, slots: torch.Tensor) -> Iterator[None]:
        """Inside, `update` writes its n tokens to `slots` `[n]` and returns the KV of all filled slots."""
        self.scatter_slots = slots
        try:
            yield
        finally:
            self.scatter_slots = None

    def check_stop(self, layer: int) -> None:
        """Raise the exception of `stop_after_layer`, once that layer has scattered its KV."""
        if self.stop_after_layer is not None and layer == self.stop_after_layer[0]:
            raise self.stop_after_layer[1]

    def grow(self, needed: int) -> None:
        """Move to slabs of at least `needed` slots, and at least 1.5 times as many as before."""
        capacity = max(needed, self.capacity + self.capacity // 2)
        larger = []
        for slab in self.slabs:
            batch, heads, old, dim = slab.shape
            target = _zeros((batch, heads, capacity, dim), slab.dtype, slab.device)
            target[:, :, :old] = slab
            larger.append(target)
        self._replace(larger)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._replace([slab.index_select(0, beam_idx.to(slab.device)) for slab in self.slabs])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace([slab.repeat_interleave(repeats, dim=0) for slab in self.slabs])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._replace([slab[indices.to(slab.device)] for slab in self.slabs])

    def _replace(self, slabs: list[torch.Tensor]) -> None:
        self.slabs = slabs
        for layer in self.layers:
            layer.bind()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that outlive the call: never an inference tensor, which only inference mode may write to.

    On a CPU, of many the system gives pages as they are touched: slots that nobody uses take no memory. Few
    are faster written at once.
    """
    size = math.prod(shape) * dtype.itemsize
    with torch.inference_mode(False):
        if device.type != "cpu" or size < _MANY_BYTES:
            return torch.zeros(shape, dtype=dtype, device=device)
        pages = torch.from_numpy(np.zeros(size + _ALIGNED_BYTES, dtype=np.uint8))
        start = -pages.data_ptr() % _ALIGNED_BYTES
        return pages[start : start + size].view(dtype).view(shape)


def own_copy(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous copy on `device` that keeps no larger storage alive."""
    with torch.inference_mode(False):
        copy = torch.empty(view.shape, dtype=view.dtype, device=device)
    return copy.copy_(view)
