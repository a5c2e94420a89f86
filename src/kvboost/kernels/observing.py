"""How much attention a few queries pay to each key, in Triton, without the matrix of probabilities.

Attention itself leaves the logarithm of every query's sum of exponentials. With that, one more pass over the
keys gives the probability that any query gives a key: the highest over the queries, and its square, each
summed over heads. Layers add up in place, in their order, so the same prompt gives the same sums. Knows
tensors and tables, no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from kvboost.errors import UnsupportedModelError
from kvboost.kernels import positional
from kvboost.kernels.positional import DeviceWork
from kvboost.kernels.scope import SOFTCAP, AttentionCall, heeded
from kvboost.kernels.work import Stretch

try:  # comes with torch for CUDA
    import triton
    import triton.language as tl
except ImportError:
    triton = None

KEYS = 64  # of a program
BLOCK_FIELDS = 3  # first slot, keys, position of the first key
_MOST_HEADS = 1_024
_LOG2_E = 1.4426950408889634

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _observe_keys(  # type: ignore[no-untyped-def]
        Q, K, LSE, SCORES, BLOCKS, POSITIONS, tokens, scale, cap, q_head, q_token, k_head, k_slot, squares,
        GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
        KEYS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        block = BLOCKS + tl.program_id(0) * 3
        length = tl.load(block + 1).to(tl.int32)
        if length > 0:
            slot = tl.load(block)
            at = tl.load(block + 2).to(tl.int32)
            index, token, d = tl.arange(0, KEYS), tl.arange(0, T), tl.arange(0, D)
            there, inside = index < length, token < tokens
            position = tl.load(POSITIONS + token, mask=inside, other=-1).to(tl.int32)
            key_position = at + index
            seen = there[None, :] & (key_position[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key_position[None, :] > position[:, None] - WINDOW)
            found = tl.zeros([KEYS], tl.float32)
            squared = tl.zeros([KEYS], tl.float32)
            for kv_head in range(KV_HEADS):
                key_at = K + kv_head * k_head + (slot + index)[None, :] * k_slot + d[:, None]
                keys = tl.load(key_at, mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
                for group in range(GROUP):
                    head = kv_head * GROUP + group
                    q_at = Q + head * q_head + token[:, None] * q_token + d[None, :]
                    q = tl.load(q_at, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
                    scores = tl.dot(q, keys, input_precision=PRECISION) * scale
                    if CAPPED:
                        scores = cap * (2 * tl.sigmoid(2 * scores) - 1)  # tanh; `scale` is by the cap then
                    total = tl.load(LSE + token * (KV_HEADS * GROUP) + head, mask=inside, other=float("inf"))
                    share = tl.where(seen, tl.exp2(scores - total[:, None]), 0.0)
                    highest = tl.max(share, 0)
                    found += highest
                    squared += highest * highest
            to = SCORES + at + index
            tl.store(to, tl.load(to, mask=there, other=0.0) + found, mask=there)
            tl.store(to + squares, tl.load(to + squares, mask=there, other=0.0) + squared, mask=there)


class Observed(NamedTuple):
    """Tables of what is observed, on the device.

    `blocks` `[n, 3]` are keys; `scores` `[2, positions]` (float32) is added to; `lse` (float32) has room for
    the base-2 logarithm of each query's sum of exponentials, `[tokens, heads]`.
    """

    blocks: torch.Tensor
    scores: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, blocks: np.ndarray, positions: int, tokens: int, device: torch.device) -> Observed:
        """For one forward of `tokens` queries."""
        return cls(
            torch.from_numpy(blocks).to(device),
            torch.zeros(2, positions, dtype=torch.float32, device=device),
            torch.empty(tokens * _MOST_HEADS, dtype=torch.float32, device=device),
        )


def blocks_of(stretches: Iterable[Stretch]) -> np.ndarray:
    """Keys cut into blocks `[n, 3]`."""
    parts = []
    for start, length, position in stretches:
        at = np.arange(0, length, KEYS, dtype=np.int64)
        parts.append(np.stack([start + at, np.minimum(KEYS, length - at), position + at], axis=1))
    return np.concatenate(parts) if parts else np.zeros((0, BLOCK_FIELDS), dtype=np.int64)


def attend(
    call: AttentionCall, work: DeviceWork, window: int | None, observed: Observed | None
) -> torch.Tensor:
    """Attention `[1, n, heads, head_dim]`, as `positional.attend` computes it, observed where it is to be."""
    if observed is None:
        return positional.attend(call, work, window)
    out = positional.attend(call, work, window, observed.lse)
    observe(call, observed, work.positions, window)
    return out


def observe(call: AttentionCall, observed: Observed, positions: torch.Tensor, window: int | None) -> None:
    """Add what the queries at `positions` `[tokens]` pay to each key; their `lse` is there."""
    query, key = call.query, call.key
    _, heads, tokens, head_dim = query.shape
    kv_heads, cap = key.shape[1], heeded(call, SOFTCAP)
    if tokens * heads > len(observed.lse):
        raise UnsupportedModelError(f"attention of {heads} heads cannot be observed")
    _observe_keys[(len(observed.blocks),)](
        query,
        key,
        observed.lse,
        observed.scores,
        observed.blocks,
        positions,
        tokens,
        call.scale * (_LOG2_E if cap is None else 1 / cap),
        _LOG2_E * (cap or 0.0),
        query.stride(1),
        query.stride(2),
        key.stride(1),
        key.stride(2),
        observed.scores.stride(0),
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        D=max(16, 1 << (head_dim - 1).bit_length()),
        T=max(16, 1 << (tokens - 1).bit_length()),
        KEYS=KEYS,
        WINDOW=window or 0,
        CAPPED=cap is not None,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_warps=4,
    )
