"""Attention of queries at any positions, each of which sees the keys at and before its own.

Queries go through in blocks that read only the keys up to the last position of the block, and the attention
probabilities can be observed. Knows no cache and no engine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

from kvboost.kernels.scope import AttentionCall, model_attention

# Queries per block, on a CPU and on a GPU.
_BLOCK_TOKENS = {False: 64, True: 512}


class ScatteredAttention:
    """The backend of a forward over sorted `positions` `[n]` of a text whose cache has `tokens` keys.

    `filled` `[tokens]` says which keys may be seen at all; None = all of them. With `observe`, the
    attention probability of every key is collected: the maximum over the queries, summed over heads and
    layers, and its square summed so (`scores` `[2, tokens]`).
    """

    def __init__(
        self,
        positions: torch.Tensor,
        tokens: int,
        *,
        filled: torch.Tensor | None = None,
        observe: bool = False,
    ) -> None:
        self.positions = positions
        self.tokens = tokens
        self.filled = filled
        self.scores = torch.zeros(2, tokens, device=positions.device) if observe else None
        self._blocks: list[tuple[int, int, int]] = []
        self._ends = positions.tolist()
        self._masks: dict[Any, torch.Tensor] = {}
        size = _BLOCK_TOKENS[positions.device.type == "cuda"]
        for start in range(0, len(self._ends), size):
            end = min(start + size, len(self._ends))
            self._blocks.append((start, end, self._ends[end - 1] + 1))

    def mask(
        self,
        start: int,
        end: int,
        keys: int,
        dtype: torch.dtype,
        group: int = 1,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Additive mask `[1, 1, group * (end - start), keys]` of queries `[start, end)`, made once."""
        made_for = (start, end, keys, dtype, group, device or self.positions.device)
        if made_for not in self._masks:
            visible = torch.arange(keys, device=self.positions.device) <= self.positions[start:end, None]
            if self.filled is not None:
                visible &= self.filled[:keys]
            values = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            values.masked_fill_(~visible, torch.finfo(dtype).min)
            self._masks[made_for] = values.repeat(group, 1)[None, None].to(made_for[-1])
        return self._masks[made_for]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention `[1, n, heads, head_dim]`, block by block."""
        query, value = call.query, call.value
        batch, heads, tokens, _ = query.shape
        known = call.is_plain
        if self.scores is not None:
            probabilities = self._observe(call)
            if known and batch == 1:
                seen = torch.bmm(probabilities.to(value.dtype), value[0])
                return seen.reshape(heads, tokens, -1).transpose(0, 1).unsqueeze(0)
        if not known or batch != 1:
            return model_attention(call)
        result = query.new_empty(batch, heads, tokens, value.shape[3])
        for start, end, keys in self._blocks:
            result[:, :, start:end] = self._attend_block(call, start, end, keys)
        return result.transpose(1, 2).contiguous()

    def _attend_block(self, call: AttentionCall, start: int, end: int, keys: int) -> torch.Tensor:
        """Queries `[start, end)` over the first `keys` keys: `[batch, heads, end - start, head_dim]`."""
        query, group = call.query, call.group
        batch, heads, _, head_dim = query.shape
        block = functional.scaled_dot_product_attention(
            query[:, :, start:end].reshape(batch, call.key.shape[1], group * (end - start), head_dim),
            call.key[:, :, :keys],
            call.value[:, :, :keys],
            attn_mask=self.mask(start, end, keys, query.dtype, group, query.device),
            scale=call.scaling,
        )
        return block.reshape(batch, heads, end - start, call.value.shape[3])

    def _observe(self, call: AttentionCall) -> torch.Tensor:
        """Add to the scores; returns the attention probabilities `[kv_heads, group * n, tokens]`."""
        query, key, group = call.query, call.key, call.group
        _, heads, tokens, head_dim = query.shape
        softcap: float | None = call.extra.get("softcap")
        folded_query = query[0].reshape(key.shape[1], group * tokens, head_dim)
        weights = torch.bmm(folded_query, key[0].transpose(1, 2)).float()
        weights *= call.scale
        if softcap is not None:
            weights = torch.tanh(weights / softcap) * softcap
        weights += self.mask(0, tokens, self.tokens, torch.float32, group, weights.device)[0, 0]
        probabilities = weights.softmax(-1)
        assert self.scores is not None
        highest = probabilities.reshape(heads, tokens, -1).amax(1)
        self.scores += torch.stack([highest.sum(0), highest.square().sum(0)]).to(self.scores.device)
        return probabilities
