"""How long forwards take on this GPU, measured when an engine is made: what the cost guard reckons with.

Four packed forwards tell it: a few tokens cost what launching costs, many cost matrix products, and as many
behind others or between them cost attention on top. Knows models and arenas, no cache and no strategy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvboost.compat import probing, text_config
from kvboost.errors import UnsupportedModelError
from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout
from kvboost.kv.rope import max_positions
from kvboost.run.packed_step import Extension, PackedModel, Segment
from kvboost.run.step_tables import TOKENS

_FEW, _MANY = 16, 2048  # tokens
_ROUNDS = 3  # of which the first warms up
# What cannot be measured before a request has run, on the careful side.
_READ_BYTES_PER_S = 2e12  # weights, by a captured step
_LAYER_S = 60e-6  # of a captured step, where its layers are small
_HOST_BYTES_PER_S = 20e9  # KV that comes from the host's memory
_MOVED_S = 1.5e-6  # finding, placing and turning the KV of one token
_REPAIR_S = 4e-3  # planning and choosing


@dataclass(frozen=True)
class DeviceRates:
    """Seconds: of launching a forward, of one that is captured, of a token, of a key that a token sees.

    Of tokens that lie between others, a key takes `scattered_pair_s`. `moved_s` is what the KV of a moved
    token takes, `repair_s` what a repair takes beside its forwards.
    """

    launch_s: float
    captured_s: float
    token_s: float
    pair_s: float
    scattered_pair_s: float
    moved_s: float
    repair_s: float = _REPAIR_S

    def forward_s(self, tokens: int, keys: float, *, scattered: bool = False) -> float:
        """A forward of so many tokens, one behind the other or not, that see so many keys together."""
        least = self.captured_s if tokens <= TOKENS[-1] else self.launch_s
        pair_s = self.scattered_pair_s if scattered else self.pair_s
        return max(least, tokens * self.token_s + keys * pair_s)


def measured_rates(model: Any, layout: KVLayout, *, from_host: bool) -> DeviceRates | None:
    """The rates of the GPU that `model` is on, with KV `from_host` memory or from the device.

    None where there is no GPU, no room to measure, or attention is not computed by our kernel there. The
    caller holds the model's lock.
    """
    device = layout.slabs[0].device
    if device.type != "cuda":
        return None
    most = min(_MANY, (max_positions(model) or 2 * _MANY) // 2)
    try:
        with probing(model, "measuring forwards"), torch.cuda.device(device):
            packed = PackedModel(model, Arena(layout, 2 * most))
            few, many, behind, between = _seconds(packed, device, min(_FEW, most), most)
    except (UnsupportedModelError, torch.cuda.OutOfMemoryError):
        return None
    if packed.counts.by_kernel < packed.counts.forwards:
        return None
    pair_s = max(behind - many, 0.0) / most**2
    token_s = max(many - pair_s * most**2 / 2, many / 2) / most
    weights = sum(each.nbytes for each in model.parameters())
    return DeviceRates(
        launch_s=few,
        captured_s=min(few, weights / _READ_BYTES_PER_S + _LAYER_S * text_config(model).num_hidden_layers),
        token_s=token_s,
        pair_s=pair_s,
        scattered_pair_s=max(pair_s, (between - most * token_s) / most**2),
        moved_s=_MOVED_S + (layout.bytes_per_token / _HOST_BYTES_PER_S if from_host else 0.0),
    )


def _seconds(packed: PackedModel, device: torch.device, few: int, many: int) -> list[float]:
    """Forwards of `few` tokens, of `many`, of as many behind these and between them: the shortest of some."""
    found: list[tuple[float, ...]] = []
    for _ in range(_ROUNDS):
        first, whole = Segment(0, many), Segment(0, 2 * many)
        whole.length, whole.missing = whole.capacity, np.arange(1, 2 * many, 2)
        steps = (Segment(0, few), few), (first, many), (Segment(many, many, (first,)), many), (whole, many)
        found.append(tuple(_timed(packed, device, segment, tokens) for segment, tokens in steps))
    return [min(times) for times in zip(*found[1:], strict=True)]


def _timed(packed: PackedModel, device: torch.device, segment: Segment, tokens: int) -> float:
    ids = np.arange(tokens, dtype=np.int64) % 97
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in packed.extend([Extension(segment, ids)]):
        pass
    torch.cuda.synchronize(device)
    return time.perf_counter() - started
