"""Random KV of a small model whose layers differ, and its layout."""

from __future__ import annotations

import torch

from kvboost.kv.layout import KVLayout
from kvboost.models import PastKVType

# (kv_heads, key head_dim, value head_dim) of each layer: sizes differ, so there are several slabs.
SHAPES = ((2, 4, 4), (1, 4, 6), (3, 4, 4))


def past(tokens: int, batch: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> PastKVType:
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, dim, generator=generator).to(dtype)

    return tuple((random(heads, key), random(heads, value)) for heads, key, value in SHAPES)


LAYOUT = KVLayout.of(past(1))
