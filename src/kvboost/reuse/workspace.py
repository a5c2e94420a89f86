"""The last request's arena, kept for the next one.

A request with the same prefix finds its KV in place already, and every request saves an allocation. The
store alone decides what may be reused; the arena only saves the copy. Knows arenas and tokens, no store.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout
from kvboost.locks import fork_safe_lock

_ROUND_TOKENS = 64  # the same memory alignment for every head, whatever the capacity
_HEADROOM_SHARE = 4  # a quarter more than asked for, where untouched memory costs nothing
_MEMORY_SHARE = 8  # an arena is kept if it is at most 1/8 of the device's memory


@dataclass(frozen=True)
class _Kept:
    arena: Arena
    namespace_key: str
    token_ids: np.ndarray  # of the positions that hold KV
    exact_tokens: int  # of them, the first ones that hold exact KV
    repaired: str  # how the others were repaired


class Workspace:
    """Lends arenas, and keeps the one given back last."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._kept: _Kept | None = None
        self._lock = fork_safe_lock(around_data=True)

    def take(
        self, capacity: int, namespace_key: str, token_ids: np.ndarray, repaired: str = ""
    ) -> tuple[Arena, int, int]:
        """An arena for `capacity` tokens, and how many of `token_ids` it holds: exact ones, and any.

        Those that are not exact count only if they were `repaired` in the same way.
        """
        capacity = -(-capacity // _ROUND_TOKENS) * _ROUND_TOKENS
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is None:
            return self._new(capacity), 0, 0
        common = 0
        if kept.namespace_key == namespace_key:
            size = min(len(kept.token_ids), len(token_ids))
            differs = kept.token_ids[:size] != token_ids[:size]
            common = int(np.argmax(differs)) if differs.any() else size
        if kept.arena.capacity < capacity:
            if not common:
                return self._new(capacity), 0, 0
            kept.arena.grow(capacity)
        kept.arena.set_length(0)
        exact = min(common, kept.exact_tokens)
        return kept.arena, exact, common if kept.repaired == repaired else exact

    def _new(self, capacity: int) -> Arena:
        """A new arena; on a CPU with room for the next turn, so that it need not grow then."""
        on_cpu = all(spec.device.type == "cpu" for spec in self._layout.slabs)
        headroom = capacity // _HEADROOM_SHARE // _ROUND_TOKENS * _ROUND_TOKENS if on_cpu else 0
        return Arena(self._layout, capacity + headroom)

    def give_back(
        self,
        arena: Arena,
        namespace_key: str,
        token_ids: np.ndarray,
        exact_tokens: int | None = None,
        repaired: str = "",
    ) -> None:
        """Keep `arena`, which holds KV of `token_ids`, for the next request.

        The first `exact_tokens` of them are exact (None = all), the others were `repaired` in this way.
        """
        if arena.batch != 1 or arena.nbytes > _limit_bytes(arena.slabs[0].device):
            return
        with self._lock:
            exact = len(token_ids) if exact_tokens is None else exact_tokens
            self._kept = _Kept(arena, namespace_key, np.array(token_ids, dtype=np.int64), exact, repaired)

    def drop(self) -> None:
        """Free the kept arena."""
        with self._lock:
            self._kept = None

    close = drop

    @property
    def nbytes(self) -> int:
        """Bytes of the kept arena."""
        kept = self._kept
        return kept.arena.nbytes if kept is not None else 0


def _limit_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // _MEMORY_SHARE
    import psutil

    return int(psutil.virtual_memory().total) // _MEMORY_SHARE
