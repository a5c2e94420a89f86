"""What a request would cost with approximate reuse and without it, estimated before it runs.

The unit is the forward of one token without context. Each token costs one for the linear layers and a
little per key that it attends to, and each forward has a fixed overhead. This is rough on purpose: it only
has to tell whether reuse pays. On a GPU all of that is measured (`device_rates`), and reuse must win by a
margin. Knows the model's shapes, no cache and no strategy.
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
from kvboost.reuse.device_rates import DeviceRates
from kvboost.reuse.repair import live_positions, positions_of

# All of these were measured, see docs/log.md.
_SCATTERED = {"cpu": 1.2, "cuda": 3.0}  # a forward over scattered positions, against a contiguous one
_OBSERVED = 1.5  # a forward whose attention is observed, against one whose is not
_FORWARD_TOKENS = 16.0  # a forward's overhead on a CPU; on a GPU it depends on the model and is measured
_MOVED_TOKEN = 0.02  # finding, copying and re-rotating the KV of one token
_PROBE_TOKENS = (16, 4096)
_MARGIN = 1.1  # of a repair's forward on a GPU that was measured: it must not lose


@dataclass(frozen=True)
class CostEstimate:
    """Estimated work of filling the cache with and without approximate reuse, in forwards of one token."""

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
    """The config's `head_dim`; None if it has none, or one per layer."""
    try:
        return getattr(config, "head_dim", None)
    except RuntimeError:  # transformers raises it for a value that differs between layers
        return None


class ForwardCosts:
    """What forwards of one model cost; its prompts are cut into chunks of `chunk_size` tokens.

    With `rates` of the GPU that it is on, these are reckoned with.
    """

    def __init__(self, model: Any, chunk_size: int = 128, rates: DeviceRates | None = None) -> None:
        config = text_config(model)
        vocabulary = config.vocab_size
        inner = sum(p.numel() for p in model.parameters() if p.shape[:1] != (vocabulary,))
        heads = config.num_attention_heads
        head_dim = _head_dim(config) or config.hidden_size // heads
        layers: int = config.num_hidden_layers
        self.flops_per_token = 2.0 * inner
        self._pair = 4 * heads * head_dim * layers / max(2 * inner, 1)
        self._chunk_size = chunk_size
        self.layers = layers
        self.rates = rates
        self._moved, self._repair = _MOVED_TOKEN, 0.0
        if rates is not None:
            self._scattered = _MARGIN
            self._moved, self._repair = rates.moved_s / rates.token_s, rates.repair_s / rates.token_s
            return
        self._fixed = forward_overhead_tokens(model)
        device = model.get_input_embeddings().weight.device.type
        self._scattered = _SCATTERED.get(device, _SCATTERED["cuda"])

    def forward(self, positions: np.ndarray, *, scattered: bool = False) -> float:
        """One forward over tokens at `positions` `[n]`, each of which attends to all before it."""
        if len(positions) == 0:
            return 0.0
        if self.rates is not None:
            keys = float(positions.sum())
            return self.rates.forward_s(len(positions), keys, scattered=scattered) / self.rates.token_s
        return float(self._fixed + len(positions) + self._pair * positions.sum())

    def observed_forward(self, positions: np.ndarray) -> float:
        """One forward over `positions` `[n]` whose attention is observed."""
        return _OBSERVED * self.forward(positions)

    def seam_share(self, tokens: int) -> float:
        """The share that `tokens` at each seam are, with a seam at every chunk."""
        return min(1.0, tokens / self._chunk_size)

    def estimate(
        self, runs: Sequence[ReusedRun], total: int, share: float, *, choosing: float = 0.0
    ) -> CostEstimate:
        """Prefill of what follows the exact runs of `total` tokens, against repairing the other runs.

        `share` of the approximate tokens is computed again; `choosing` is what it costs to find them.
        """
        prefill = self.forward(np.arange(exact_end(runs), total))
        reused = positions_of(runs, exact=False)
        again = reused[:: max(1, round(1 / share))] if share else reused[:0]
        computed = np.concatenate([live_positions(runs, total), again])
        cost = self._scattered * self.forward(computed, scattered=True) + self._moved * len(reused)
        return CostEstimate(prefill, cost + choosing + self._repair)


def exact_end(runs: Sequence[ReusedRun]) -> int:
    """Where the exact runs end."""
    return max((run.end for run in runs if run.exact), default=0)


def forward_overhead_tokens(model: Any) -> float:
    """The overhead of a forward, in tokens: launching kernels and reading weights.

    Measured on a GPU, where overhead is nearly all that a forward of a small model costs, so that
    recomputing fewer tokens saves nothing. The caller holds the model's lock.
    """
    device = model.get_input_embeddings().weight.device
    if device.type != "cuda":
        return _FORWARD_TOKENS
    short, long = _PROBE_TOKENS[0], min(_PROBE_TOKENS[1], max_positions(model) or _PROBE_TOKENS[1])
    few, many = _forward_seconds(model, short, device), _forward_seconds(model, long, device)
    per_token = (many - few) / max(1, long - short)
    return few / max(per_token, few / 1e5)


def _forward_seconds(model: Any, tokens: int, device: torch.device) -> float:
    """The shortest of three forwards over `tokens` tokens, after one warm-up."""
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
