"""KV as small as it can be (8 bytes per token), for benchmarks of the store that need no model.

The store treats it like any other; only its size differs. Knows no benchmark.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from kvboost.kv.codec import KVCodec
from kvboost.kv.layout import KVLayout, Packed
from kvboost.store.chunking import ChunkRegistry
from kvboost.store.inserter import StoreReport
from kvboost.store.manager import KVCacheManager


@cache
def tiny_codec() -> KVCodec:
    """One layer, one head, one number for each key and value."""
    empty = torch.empty(1, 1, 0, 1)
    return KVCodec(KVLayout.of(((empty, empty),)))


def store(manager: KVCacheManager, tokens: np.ndarray) -> StoreReport:
    """Store `tokens` `[tokens]` the way the engine does, with tiny KV."""
    cuts = ChunkRegistry(manager.chunk_size).cuts(tokens)  # type: ignore[arg-type]
    return manager.store_prefix(tokens, cuts, tiny_codec(), _extract)


def _extract(start: int, end: int) -> Packed:
    return (torch.zeros(2, end - start, 1),)
