"""Attention over a part of the keys, and putting parts together.

A softmax over two sets of keys is the weighted mean of the softmaxes over each; the weights follow from the
logs of their sums of exponentials. Knows tensors only.
"""

from __future__ import annotations

import torch

_MAX_HEAD_DIM = 256  # of the GPU's kernels


def merged(
    first: torch.Tensor, first_sums: torch.Tensor, second: torch.Tensor, second_sums: torch.Tensor
) -> torch.Tensor:
    """Attention over all keys, in float32, from two parts `[..., n, head_dim]` with sums `[..., n]`."""
    share = torch.sigmoid(second_sums - first_sums).unsqueeze(-1)
    return torch.lerp(first.float(), second.float(), share)


def merge(out: torch.Tensor, weight: torch.Tensor, part: torch.Tensor, sums: torch.Tensor) -> None:
    """Add attention over other keys to `out` `[..., n, head_dim]` (float32) with its `weight` `[..., n]`.

    `part` and `sums` have the same shapes; `out` and `weight` are changed in place.
    """
    total = torch.logaddexp(weight, sums)
    out.lerp_(part.float(), (sums - total).exp_().unsqueeze(-1))
    weight.copy_(total)


def takes_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch has its fastest kernel for a GPU's `[batch, heads, n, head_dim]`, without a mask."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[3] == value.shape[3]
        and query.shape[3] % 8 == 0
        and query.shape[3] <= _MAX_HEAD_DIM
    )


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `[batch, heads, n, head_dim]`, and per query the log of its sum of exponentials.

    Keys and values may have fewer heads, each for a group of queries' heads. Returns `[batch, heads, n,
    head_dim]` and float32 `[batch, heads, n]`.
    """
    same_size = query.shape[3] == value.shape[3]
    half = query.dtype in (torch.float16, torch.bfloat16)
    group = query.shape[1] // key.shape[1]
    if group > 1 and not (query.device.type == "cuda" and half):  # only flash kernels share heads themselves
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    if query.device.type == "cpu" and same_size and query.dtype in (torch.float32, torch.bfloat16):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
    fits = query.shape[3] % 8 == 0 and query.shape[3] <= _MAX_HEAD_DIM
    if query.device.type == "cuda" and same_size and mask is None and fits:
        return _partial_on_gpu(query, key, value, scale, causal)
    if key.shape[1] < query.shape[1]:
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    return _partial_by_hand(query, key, value, mask, scale, causal)


def _partial_on_gpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = query.shape[2]
    if query.dtype in (torch.float16, torch.bfloat16):
        out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
    else:
        out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
    return out, sums[:, :, :tokens]


def _partial_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scale
    if mask is not None:
        scores += mask
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(future, torch.finfo(scores.dtype).min)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.unsqueeze(-1)).exp_().to(value.dtype)
    return torch.matmul(weights, value), sums
