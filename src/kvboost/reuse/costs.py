"""What a request would cost with approximate reuse and without, before it is run.

Counts work in forwards of one token without context: linear layers cost one each, attention a little
per pair of query and key, and every forward something of its own. Rough on purpose: it only has to
tell reuse that pays from reuse that does not. Knows shapes, no cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvboost.compat import text_config
from kvboost.kv.rope import max_positions
from kvboost.models import ReusedRun
from kvboost.reuse.repair import live_positions, positions_of
from kvboost.reuse.strategies.cacheblend import TAIL_TOKENS

# Measured: a scattered forward against a contiguous one, the watched tail against one that is not, a
# forward without tokens, and finding, copying and turning the KV of one token (docs/log.md).
_SCATTERED = {"cpu": 1.2, "cuda": 3.0}
_WATCHED = 1.5
_FORWARD_TOKENS = 16.0  # on a CPU; on a GPU, where it depends on the model, it is measured
_MOVED_TOKEN = 0.02
_PROBE_TOKENS = (16, 4096)


@dataclass(frozen=True)
class CostEstimate:
    """Estimated work, in forwards of one token, of filling the cache with and without approximate reuse."""

    prefill: float
    reuse: float

    @property
    def pays(self) -> bool:
        return self.reuse < self.prefill

    def __str__(self) -> str:
        choice = "reuse" if self.pays else "prefill"
        return (
            f"{choice}: approximate reuse would cost {self.reuse / self.prefill:.2f} x of computing it "
            f"({self.reuse:.0f} against {self.prefill:.0f} token forwards)"
        )


def _head_dim(config: Any) -> int | None:
    """As the config says; None where it does not, or says another one for every layer."""
    try:
        return getattr(config, "head_dim", None)
    except RuntimeError:  # transformers' word for an attribute that differs from layer to layer
        return None


class ForwardCosts:
    """The cost of forwards of one model."""

    def __init__(self, model: Any) -> None:
        config = text_config(model)
        vocabulary = config.vocab_size
        inner = sum(p.numel() for p in model.parameters() if p.shape[:1] != (vocabulary,))
        heads = config.num_attention_heads
        head_dim = _head_dim(config) or config.hidden_size // heads
        layers = config.num_hidden_layers
        self._pair = 4 * heads * head_dim * layers / max(2 * inner, 1)
        self._layers = layers
        self._fixed = forward_overhead_tokens(model)
        device = model.get_input_embeddings().weight.device.type
        self._scattered = _SCATTERED.get(device, _SCATTERED["cuda"])

    def forward(self, positions: np.ndarray) -> float:
        """One forward over tokens at `positions` `[n]`, each looking at all before it."""
        if len(positions) == 0:
            return 0.0
        return float(self._fixed + len(positions) + self._pair * positions.sum())

    def estimate(
        self, runs: Sequence[ReusedRun], total: int, ratio: float, selector: str | None
    ) -> CostEstimate:
        """Prefill behind the exact runs of `total` tokens, against repairing the others.

        `ratio` of the approximate tokens is computed again, found by `selector` (None = given).
        """
        exact_end = max((run.end for run in runs if run.exact), default=0)
        prefill = self.forward(np.arange(exact_end, total))
        reused = positions_of(runs, exact=False)
        live = live_positions(runs, total)
        share = np.concatenate([live, reused[:: max(1, round(1 / ratio))] if ratio else reused[:0]])
        cost = self._scattered * self.forward(share) + _MOVED_TOKEN * len(reused)
        if selector == "guided" and ratio:
            cost += _WATCHED * self.forward(np.arange(max(0, total - TAIL_TOKENS), total))
        elif selector == "deviation" and ratio:
            cost += 2 * self.forward(np.arange(exact_end, total)) / self._layers
        return CostEstimate(prefill, cost)


def forward_overhead_tokens(model: Any) -> float:
    """What a forward costs beside its tokens, in tokens: launching kernels, reading weights.

    Measured on a GPU, where a small model spends nearly all its time that way and recomputing less saves
    nothing. The caller holds the model.
    """
    device = model.get_input_embeddings().weight.device
    if device.type != "cuda":
        return _FORWARD_TOKENS
    short, long = _PROBE_TOKENS[0], min(_PROBE_TOKENS[1], max_positions(model) or _PROBE_TOKENS[1])
    few, many = _forward_seconds(model, short, device), _forward_seconds(model, long, device)
    per_token = (many - few) / max(1, long - short)
    return few / max(per_token, few / 1e5)


def _forward_seconds(model: Any, tokens: int, device: torch.device) -> float:
    """The shortest of three forwards over `tokens` tokens, after one that is not counted."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    seconds = []
    with torch.no_grad():
        for _ in range(4):
            torch.cuda.synchronize(device)
            started = time.perf_counter()
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
