"""The arena: a Hugging Face `Cache` that owns its positions and never concatenates.

All layers of a request live in one buffer, a slab `[batch, rows, capacity, head_dim]` whose rows
are the KV heads of all layers (one slab per device, dtype and head size; mostly just one). A
layer's keys are a view of some rows, so a stored chunk `[rows, tokens, head_dim]` is placed by a
single strided copy, and decoding writes in place. Together with compat.py this module absorbs the
differences between transformers' cache interfaces. It does not know where KV comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from kvboost.compat import CROP_ZERO_EMPTIES, probing
from kvboost.errors import UnsupportedModelError
from kvboost.models import PastKVType

Packed = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class SlabSpec:
    """Rows that share device, dtype and head size."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    rows: int


@dataclass(frozen=True)
class RowRange:
    """Rows `[start, end)` of slab number `slab`."""

    slab: int
    start: int
    end: int


@dataclass(frozen=True)
class RowBlock:
    """Rows of slab number `slab`: `heads` of them, again at every one of `firsts`."""

    slab: int
    firsts: range
    heads: int

    @property
    def rows(self) -> int:
        return len(self.firsts) * self.heads

    def of(self, slab: torch.Tensor) -> torch.Tensor:
        """The view `[..., layers, heads, tokens, head_dim]` of a slab `[..., rows, tokens, head_dim]`."""
        between = slab.narrow(-3, self.firsts[0], self.firsts[-1] + self.heads - self.firsts[0])
        return between.unfold(-3, self.heads, self.firsts.step).movedim(-1, -3)


def row_blocks(ranges: Iterable[RowRange]) -> list[RowBlock]:
    """Ranges gathered into as few blocks as possible: of most models, one."""
    starts: dict[tuple[int, int], list[int]] = {}
    for rows in ranges:
        starts.setdefault((rows.slab, rows.end - rows.start), []).append(rows.start)
    return [
        RowBlock(slab, firsts, heads)
        for (slab, heads), numbers in starts.items()
        for firsts in _equal_steps(sorted(numbers))
    ]


def _equal_steps(numbers: list[int]) -> list[range]:
    """Cut ascending numbers into runs of equal steps, each as a range."""
    runs: list[range] = []
    for number in numbers:
        last = runs[-1] if runs else None
        if last is not None and len(last) == 1:
            runs[-1] = range(last[0], number + 1, number - last[0])
        elif last is not None and number == last[-1] + last.step:
            runs[-1] = range(last[0], number + 1, last.step)
        else:
            runs.append(range(number, number + 1))
    return runs


@dataclass(frozen=True)
class KVLayout:
    """Which rows of which slab hold the keys and the values of each layer."""

    slabs: tuple[SlabSpec, ...]
    layers: tuple[tuple[RowRange, RowRange], ...]

    @classmethod
    def of(cls, past_key_values: PastKVType) -> KVLayout:
        """The layout of tensors `[batch, kv_heads, tokens, head_dim]` as a model made them."""
        groups: dict[tuple[torch.device, torch.dtype, int], int] = {}
        rows: list[int] = []

        def take(tensor: torch.Tensor) -> RowRange:
            group = (tensor.device, tensor.dtype, tensor.shape[3])
            slab = groups.setdefault(group, len(groups))
            if slab == len(rows):
                rows.append(0)
            start = rows[slab]
            rows[slab] += tensor.shape[1]
            return RowRange(slab, start, rows[slab])

        layers = tuple((take(key), take(value)) for key, value in past_key_values)
        slabs = tuple(SlabSpec(*group, rows=rows[slab]) for group, slab in groups.items())
        return cls(slabs, layers)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of one token's KV over all layers."""
        return sum(spec.rows * spec.head_dim * spec.dtype.itemsize for spec in self.slabs)

    def pack(self, past_key_values: PastKVType, device: torch.device | None = None) -> Packed:
        """Copy `[1, kv_heads, tokens, head_dim]` pairs into buffers `[rows, tokens, head_dim]`."""
        tokens = past_key_values[0][0].shape[2]
        packed = tuple(
            torch.empty(spec.rows, tokens, spec.head_dim, dtype=spec.dtype, device=device or spec.device)
            for spec in self.slabs
        )
        for pair, ranges in zip(past_key_values, self.layers, strict=True):
            for tensor, where in zip(pair, ranges, strict=True):
                packed[where.slab][where.start : where.end].copy_(tensor[0])
        return packed

    def unpack(self, packed: Packed) -> PastKVType:
        """Views `[1, kv_heads, tokens, head_dim]` per layer of buffers `[rows, tokens, head_dim]`."""
        return tuple(
            (
                packed[k.slab][k.start : k.end].unsqueeze(0),
                packed[v.slab][v.start : v.end].unsqueeze(0),
            )
            for k, v in self.layers
        )


def probe_layout(model: Any) -> KVLayout:
    """Learn the layout of a model's KV from a forward over two tokens."""
    device = model.get_input_embeddings().weight.device
    cache = DynamicCache()
    with probing(model, "computing the KV of two tokens"):
        model(
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
            past_key_values=cache,
            use_cache=True,
        )
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    pairs = [
        (layer.keys, layer.values)
        for layer in cache.layers
        if isinstance(getattr(layer, "keys", None), torch.Tensor)
    ]
    if len(pairs) != expected:
        raise UnsupportedModelError(
            f"{type(model).__name__} filled {len(pairs)} of {expected} cache layers with the KV of two "
            "tokens; kvboost needs one key and value tensor per layer and token"
        )
    if kept := [key.shape[-2] for key, _ in pairs if key.shape[-2] != 2]:
        raise UnsupportedModelError(
            f"{type(model).__name__} put the KV of {kept[0]} tokens into a cache layer when it read two; "
            "kvboost needs one key and value tensor per layer and token"
        )
    return KVLayout.of(tuple(pairs))


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
        """Take the views anew after the arena's slabs were replaced."""
        key_rows, value_rows = self._arena.layout.layers[self._index]
        self._keys = self._arena.slabs[key_rows.slab][:, key_rows.start : key_rows.end]
        self._values = self._arena.slabs[value_rows.slab][:, value_rows.start : value_rows.end]

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
        positions = self._arena.scatter_positions
        if positions is not None:
            target = positions.to(self._keys.device)
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
    """KV of one request, `[batch, kv_heads, capacity, head_dim]` per layer, allocated once.

    Appending grows it where it must; `scatter_at` writes at given positions instead.
    """

    def __init__(self, layout: KVLayout, capacity: int, batch: int = 1) -> None:
        self.layout = layout
        self.scatter_positions: torch.Tensor | None = None
        self.stop_after_layer: tuple[int, Exception] | None = None
        self.written_by: Callable[[], None] | None = None  # told of every forward that appends
        self.slabs = [
            _zeros((batch, spec.rows, capacity, spec.head_dim), spec.dtype, spec.device)
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
        """Declare the first `length` positions filled, and all others not."""
        if not 0 <= length <= self.capacity:
            raise ValueError(f"length must be from 0 to the capacity {self.capacity}, got {length}")
        for layer in self.layers:
            layer.length = length

    def place_at(self, packed: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        """Copy buffers `[rows, n, head_dim]` to positions `[n]`, in every row."""
        for slab, part in zip(self.slabs, packed, strict=True):
            target = part.to(slab.device).expand(slab.shape[0], *part.shape)
            slab.index_copy_(2, positions.to(slab.device), target)

    def clear(self, start: int, end: int) -> None:
        """Zero positions `[start, end)`."""
        for slab in self.slabs:
            slab[:, :, start:end].zero_()

    def move(self, start: int, to: int, count: int) -> None:
        """Copy `count` positions from `start` on to those from `to` on; the two may not overlap."""
        for slab in self.slabs:
            slab[:, :, to : to + count] = slab[:, :, start : start + count]

    def gathered(self, positions: torch.Tensor) -> Packed:
        """Copies of `positions` `[n]` of row 0, `[rows, n, head_dim]`."""
        return tuple(slab[0].index_select(1, positions.to(slab.device)) for slab in self.slabs)

    def between(self, start: int, end: int) -> Packed:
        """Views of positions `[start, end)` of row 0, `[rows, tokens, head_dim]`."""
        return tuple(slab[0, :, start:end] for slab in self.slabs)

    def as_past_key_values(self) -> PastKVType:
        """Views `[batch, kv_heads, length, head_dim]` per layer."""
        return tuple((layer.keys, layer.values) for layer in self.layers)

    @contextmanager
    def scatter_at(self, positions: torch.Tensor) -> Iterator[None]:
        """Inside, `update` writes its n tokens at `positions` `[n]` and returns all filled ones."""
        self.scatter_positions = positions
        try:
            yield
        finally:
            self.scatter_positions = None

    def check_stop(self, layer: int) -> None:
        """Leave the forward, by the exception that was asked for, once `layer` has scattered its KV."""
        if self.stop_after_layer is not None and layer == self.stop_after_layer[0]:
            raise self.stop_after_layer[1]

    def grow(self, needed: int) -> None:
        """Move to slabs of at least `needed` positions, half as many again as before."""
        capacity = max(needed, self.capacity + self.capacity // 2)
        larger = []
        for slab in self.slabs:
            batch, rows, old, dim = slab.shape
            target = _zeros((batch, rows, capacity, dim), slab.dtype, slab.device)
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
    """Memory that outlives the call: never an inference tensor, which only inference mode may write to."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def own_copy(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous copy on `device` that keeps no larger storage alive (pinned next to a GPU)."""
    pin = device.type == "cpu" and view.device.type == "cuda"
    with torch.inference_mode(False):
        copy = torch.empty(view.shape, dtype=view.dtype, device=device, pin_memory=pin)
    return copy.copy_(view)
