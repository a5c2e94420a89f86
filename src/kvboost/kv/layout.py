"""Where the KV heads of a model lie: which slab, and which heads of it, holds each layer's keys and values.

A slab is one buffer `[batch, heads, capacity, head_dim]` for the KV heads of all layers, keys and values,
that share device, dtype and head size; most models need just one. A chunk's KV in this layout is `Packed`:
a buffer `[heads, tokens, head_dim]` per slab. Knows the model only to probe it, and no cache and no store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache

from kvboost.compat import probing
from kvboost.errors import UnsupportedModelError
from kvboost.models import PastKVType

Packed = tuple[torch.Tensor, ...]  # per slab, [heads, tokens, head_dim]


@dataclass(frozen=True)
class SlabSpec:
    """One slab: how many KV heads it has, and their device, dtype and size."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    heads: int


@dataclass(frozen=True)
class HeadRange:
    """Heads `[start, end)` of slab number `slab`: the keys, or the values, of one layer."""

    slab: int
    start: int
    end: int


@dataclass(frozen=True)
class HeadBlock:
    """Heads of several layers in slab number `slab`: `heads_per_layer` from each of `firsts` on."""

    slab: int
    firsts: range
    heads_per_layer: int

    @property
    def heads(self) -> int:
        """Heads of all its layers."""
        return len(self.firsts) * self.heads_per_layer

    def of(self, slab: torch.Tensor) -> torch.Tensor:
        """Its view `[..., layers, heads_per_layer, tokens, head_dim]`.

        `slab` is `[..., heads, tokens, head_dim]`.
        """
        between = slab.narrow(-3, self.firsts[0], self.firsts[-1] + self.heads_per_layer - self.firsts[0])
        return between.unfold(-3, self.heads_per_layer, self.firsts.step).movedim(-1, -3)


def head_blocks(ranges: Iterable[HeadRange]) -> list[HeadBlock]:
    """Gather ranges into as few blocks as possible: one for most models."""
    starts: dict[tuple[int, int], list[int]] = {}
    for where in ranges:
        starts.setdefault((where.slab, where.end - where.start), []).append(where.start)
    return [
        HeadBlock(slab, firsts, heads)
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
    """Which heads of which slab hold the keys and the values of each layer."""

    slabs: tuple[SlabSpec, ...]
    layers: tuple[tuple[HeadRange, HeadRange], ...]

    @classmethod
    def of(cls, past_key_values: PastKVType) -> KVLayout:
        """The layout of tensors `[batch, kv_heads, tokens, head_dim]` as a model made them."""
        groups: dict[tuple[torch.device, torch.dtype, int], int] = {}
        heads: list[int] = []  # by slab, so far

        def take(tensor: torch.Tensor) -> HeadRange:
            group = (tensor.device, tensor.dtype, tensor.shape[3])
            slab = groups.setdefault(group, len(groups))
            if slab == len(heads):
                heads.append(0)
            start = heads[slab]
            heads[slab] += tensor.shape[1]
            return HeadRange(slab, start, heads[slab])

        layers = tuple((take(key), take(value)) for key, value in past_key_values)
        slabs = tuple(SlabSpec(*group, heads=heads[slab]) for group, slab in groups.items())
        return cls(slabs, layers)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of one token's KV over all layers."""
        return sum(spec.heads * spec.head_dim * spec.dtype.itemsize for spec in self.slabs)

    def pack(self, past_key_values: PastKVType, device: torch.device | None = None) -> Packed:
        """Copy `[1, kv_heads, tokens, head_dim]` pairs into buffers `[heads, tokens, head_dim]`."""
        tokens = past_key_values[0][0].shape[2]
        packed = tuple(
            torch.empty(spec.heads, tokens, spec.head_dim, dtype=spec.dtype, device=device or spec.device)
            for spec in self.slabs
        )
        for pair, ranges in zip(past_key_values, self.layers, strict=True):
            for tensor, where in zip(pair, ranges, strict=True):
                packed[where.slab][where.start : where.end].copy_(tensor[0])
        return packed

    def unpack(self, packed: Packed) -> PastKVType:
        """Views `[1, kv_heads, tokens, head_dim]` per layer of buffers `[heads, tokens, head_dim]`."""
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
