"""CacheBlend: compute the share of the reused tokens again that the new surroundings change most.

Two ways to find them. "deviation" is the published rule (Yao et al., https://arxiv.org/abs/2405.16444):
the first two layers run for all reused tokens, and those whose values differ most from the cached
ones are chosen. "guided" asks the end of the prompt instead: one cheap forward of its last tokens over
the placed cache shows which tokens the answer will look at. The first tokens of every run, false
beginnings in their old place, are always among them, and those near its start count for more: they
knew the least of what stands before them now. Knows no store and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvboost.choices import SELECTORS
from kvboost.errors import InvalidRequestError
from kvboost.kernels.attention import QueryPattern
from kvboost.kv.arena import Arena
from kvboost.models import AssembledPrompt, ReusedRun
from kvboost.reuse.repair import apply_strategy, live_positions, positions_of, runs_of
from kvboost.run.sparse_forward import run_pattern

RUN_START_TOKENS = 4  # every run starts with a false attention sink
TAIL_TOKENS = 24  # that many tokens at the end of the prompt are asked what they look at
_HALF_WORTH_TOKENS = 64  # that far into a run a token counts half as much as at its start
_LAYERS = 2  # that the published rule computes for all tokens
_MAX_DEVIATION_TOKENS = 4096  # computed at once by it


@dataclass(frozen=True)
class CacheBlendRecompute:
    """Computes about `recompute_ratio` of the reused tokens again.

    With `selector="deviation"`, tokens whose values deviate by less than `min_deviation` (1 - cosine) are
    left alone.
    """

    recompute_ratio: float = 0.15
    min_deviation: float = 0.01
    device: str = "cpu"
    selector: str = "guided"

    def __post_init__(self) -> None:
        if not 0 <= self.recompute_ratio <= 1:
            raise InvalidRequestError(f"recompute_ratio must be from 0 to 1, got {self.recompute_ratio!r}")
        if self.selector not in SELECTORS:
            raise InvalidRequestError(f'selector must be "guided" or "deviation", got {self.selector!r}')

    def choose(
        self, model: Any, token_ids: np.ndarray, arena: Arena, runs: Sequence[ReusedRun]
    ) -> np.ndarray:
        """Sorted positions `[n]` among the runs that are not exact."""
        reused = positions_of(runs, exact=False)
        budget = math.ceil(self.recompute_ratio * len(reused))
        if budget >= len(reused):
            return reused
        if budget == 0:
            return reused[:0]
        if self.selector == "deviation":
            return self._most_deviating(model, token_ids, arena, runs, reused, budget)
        scores = attention_from_the_end(model, token_ids, arena, runs)
        depth = _depth_in_run(runs, len(token_ids))[reused]
        attention = scores[reused] if scores is not None else 1.0  # of some models it cannot be watched
        worth = attention / (depth + _HALF_WORTH_TOKENS)
        worth[depth < RUN_START_TOKENS] = np.inf
        return _highest(reused, worth, budget)

    def _most_deviating(
        self,
        model: Any,
        token_ids: np.ndarray,
        arena: Arena,
        runs: Sequence[ReusedRun],
        reused: np.ndarray,
        budget: int,
    ) -> np.ndarray:
        deviation = value_deviation(model, token_ids, arena, runs)[reused]
        return _highest(reused, np.where(deviation < self.min_deviation, -np.inf, deviation), budget)

    def apply(self, assembled: AssembledPrompt, model: Any) -> AssembledPrompt:
        """`assembled` with the chosen KV computed again, `[1, kv_heads, cached, head_dim]` per layer."""
        if all(run.exact for run in runs_of(assembled)):
            return assembled
        return apply_strategy(self, assembled, model, self.device)


def attention_from_the_end(
    model: Any, token_ids: np.ndarray, arena: Arena, runs: Sequence[ReusedRun], tail_tokens: int = TAIL_TOKENS
) -> np.ndarray | None:
    """How much the last prompt tokens look at each token, `[tokens]`: attention probability, its maximum
    over those tokens, summed over layers and heads. None where the model's attention cannot be watched.
    """
    total = len(token_ids)
    start = max(0, total - tail_tokens)
    device = model.get_input_embeddings().weight.device
    filled = torch.zeros(total, dtype=torch.bool)
    filled[torch.from_numpy(positions_of(runs))] = True
    filled[start:] = True
    pattern = QueryPattern(
        torch.arange(start, total, device=device), total, filled=filled.to(device), observe=True
    )
    kept = [slab[:, :, start:total].clone() for slab in arena.slabs]  # reused tokens may be among the last
    try:
        run_pattern(model, token_ids, arena, pattern)
    finally:
        for slab, part in zip(arena.slabs, kept, strict=True):
            slab[:, :, start:total] = part
    assert pattern.scores is not None
    scores: np.ndarray = pattern.scores.cpu().numpy()
    return scores if scores.any() else None


def value_deviation(model: Any, token_ids: np.ndarray, arena: Arena, runs: Sequence[ReusedRun]) -> np.ndarray:
    """1 - cosine between cached and newly computed values of the second layer, `[tokens]`.

    Computes the first two layers for all tokens that are not exact, and leaves their KV there.
    """
    end = max(run.end for run in runs)
    layer = arena.layers[min(_LAYERS, len(arena.layers)) - 1]
    arena.set_length(end)
    cached = layer.values[0].clone()
    todo = np.union1d(positions_of(runs, exact=False), live_positions(runs, end))
    device = model.get_input_embeddings().weight.device
    for first in range(0, len(todo), _MAX_DEVIATION_TOKENS):
        block = todo[first : first + _MAX_DEVIATION_TOKENS]
        pattern = QueryPattern(torch.from_numpy(block).to(device), int(block[-1]) + 1)
        run_pattern(model, token_ids, arena, pattern, layers=min(_LAYERS, len(arena.layers)))
    arena.set_length(end)
    fresh, old = (values.float().transpose(0, 1).flatten(1) for values in (layer.values[0], cached))
    deviation: np.ndarray = (1 - torch.cosine_similarity(fresh, old, dim=1)).cpu().numpy()
    return deviation


def _depth_in_run(runs: Sequence[ReusedRun], total: int) -> np.ndarray:
    """How many tokens of its run stand before each token, `[tokens]`."""
    depth = np.zeros(total, dtype=np.int64)
    for run in runs:
        depth[run.start : run.end] = np.arange(run.end - run.start)
    return depth


def _highest(positions: np.ndarray, worth: np.ndarray, budget: int) -> np.ndarray:
    """The `budget` positions of the highest worth, sorted; none that is worth -inf."""
    order = np.argsort(-worth, kind="stable")[:budget]
    chosen: np.ndarray = np.sort(positions[order[worth[order] > -np.inf]])
    return chosen
