"""One forward over any set of positions: live tokens and recomputed ones in the same pass.

Only the tokens at the given positions go through the model, each with its own position and seeing
every key at and before it; their K/V are scattered into place. What is not fed costs nothing, and
that is what makes repairing a cache cheaper than filling it. Knows arenas and models, not why a
position was chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvboost.kernels.scattered import ScatteredAttention
from kvboost.kernels.scope import forward_scope
from kvboost.kv.arena import Arena
from kvboost.run import decode

# Mask elements of one forward, on a CPU and on a GPU: long sets of positions go through in blocks.
_MAX_MASK_ELEMENTS = {False: 1 << 24, True: 1 << 26}


class _EnoughLayers(Exception):  # noqa: N818  # not an error
    """The layers that were asked for have written their KV."""


def sparse_forward(
    model: Any,
    token_ids: np.ndarray,
    arena: Arena,
    positions: np.ndarray,
    *,
    position_offset: int = 0,
) -> None:
    """Compute the KV of `token_ids` `[tokens]` at sorted `positions` `[n]` and write it into `arena`.

    Every position before the last of `positions` must be filled or among them. Afterwards the arena
    is filled up to the last one, or as far as it was.
    """
    if len(positions) == 0:
        return
    first, end = int(positions[0]), int(positions[-1]) + 1
    if end - first == len(positions) and end >= arena.length:  # a contiguous tail is a plain prefill
        arena.set_length(first)
        decode.prefill(model, token_ids, arena, end, position_offset=position_offset)
        return
    filled_to = max(arena.length, end)
    device = model.get_input_embeddings().weight.device
    size = max(64, _MAX_MASK_ELEMENTS[device.type == "cuda"] // end)
    try:
        for start in range(0, len(positions), size):
            block = positions[start : start + size]
            attention = ScatteredAttention(torch.from_numpy(block).to(device), int(block[-1]) + 1)
            # Behind the last layer's KV nothing is needed any more.
            run_scattered(
                model, token_ids, arena, attention, layers=len(arena.layers), position_offset=position_offset
            )
    finally:
        arena.set_length(filled_to)


def run_scattered(
    model: Any,
    token_ids: np.ndarray,
    arena: Arena,
    attention: ScatteredAttention,
    *,
    layers: int | None = None,
    position_offset: int = 0,
) -> None:
    """One forward over the positions of `attention`; with `layers`, only as far as those write their KV."""
    arena.set_length(attention.tokens)
    positions = attention.positions
    device = positions.device
    ids = torch.from_numpy(token_ids).to(device)[positions].unsqueeze(0)
    dtype = model.get_input_embeddings().weight.dtype
    arena.stop_after_layer = None if layers is None else (layers - 1, _EnoughLayers())
    try:
        with torch.no_grad(), arena.scatter_at(positions), forward_scope(model, attention):
            model(
                input_ids=ids,
                position_ids=positions.unsqueeze(0) + position_offset,
                attention_mask=attention.mask(0, len(positions), attention.tokens, dtype),
                past_key_values=arena,
                use_cache=True,
                logits_to_keep=1,
            )
    except _EnoughLayers:
        pass
    finally:
        arena.stop_after_layer = None
