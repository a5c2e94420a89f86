"""CacheBlend: compute again the share of the reused tokens that the new text around them changes most.

There are two ways to find these tokens. "deviation" is the published rule (Yao et al.,
https://arxiv.org/abs/2405.16444): run the first two layers for all reused tokens and take those whose
values differ most from the cached ones. "guided" asks the end of the prompt: one cheap forward of its last
tokens over the placed cache shows which tokens the answer will attend to. The first tokens of every run,
which may be attention sinks that are no longer first, are always taken. A quarter of what is left of the
budget goes to what is looked for and what stands right behind it, since that is what the answer will say; the
rest prefers tokens near a run's start, which saw the least of what stands before them now. Knows no store and
no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvboost.errors import InvalidRequestError
from kvboost.kernels.scattered import ScatteredAttention
from kvboost.kv.arena import Arena
from kvboost.models import ReusedRun
from kvboost.reuse.costs import CostEstimate, ForwardCosts, exact_end
from kvboost.reuse.repair import RepairStrategy, live_positions, positions_of
from kvboost.run.sparse_forward import run_scattered

_SELECTORS = ("guided", "deviation")  # of this strategy; the option `selector` may know others
RUN_START_TOKENS = 4  # the first tokens of a run, where its old attention sink is
TAIL_TOKENS = 24  # "guided" observes the attention of that many tokens at the end of the prompt
_HALF_WORTH_TOKENS = 64  # so far into a run, a token counts half as much as at its start
# "guided" gives this share, behind the starts of runs, to what is looked for, wherever it stands: an answer
# attends to "the code is" and copies what follows, so the tokens right behind one are worth so much of it, by
# distance.
_LOOKED_FOR_SHARE = 0.25
_SPREAD = (0.8, 0.64, 0.5, 0.36)
_LAYERS = 2  # that "deviation" computes for all tokens
_MAX_DEVIATION_TOKENS = 4096  # that "deviation" computes at once


@dataclass(frozen=True)
class CacheBlendRecompute(RepairStrategy):
    """Computes about `recompute_ratio` of the reused tokens again.

    With `selector="deviation"`, tokens whose values deviate by less than `min_deviation` (1 - cosine) are
    not recomputed.
    """

    recompute_ratio: float = 0.15
    min_deviation: float = 0.01
    device: str = "cpu"
    selector: str = "guided"

    def __post_init__(self) -> None:
        if not 0 <= self.recompute_ratio <= 1:
            raise InvalidRequestError(f"recompute_ratio must be from 0 to 1, got {self.recompute_ratio!r}")
        if self.selector not in _SELECTORS:
            raise InvalidRequestError(f'selector must be "guided" or "deviation", got {self.selector!r}')

    def choose(
        self, model: Any, token_ids: np.ndarray, arena: Arena, runs: Sequence[ReusedRun]
    ) -> np.ndarray:
        """Sorted positions `[n]` among the runs that are not exact."""
        if self.selector == "deviation":
            return self._most_deviating(model, token_ids, arena, runs)
        return self.choose_by(
            lambda: attention_from_the_end(model, token_ids, arena, runs), len(token_ids), runs
        )

    @property
    def observes(self) -> int:
        return TAIL_TOKENS if self.selector == "guided" else 0

    def choose_by(
        self,
        attention: Callable[[], torch.Tensor | None],
        total: int,
        runs: Sequence[ReusedRun],
    ) -> np.ndarray:
        """Seams, a share of what the end of the prompt looks for, then what it attends to near seams."""

        def worth(reused: np.ndarray, budget: int) -> torch.Tensor:
            scores = attention()
            depth = torch.from_numpy(_depth_in_run(runs, total))
            paid, squares = torch.ones(2, total, dtype=torch.double)  # not every model lets it be observed
            if scores is not None:
                depth, (paid, squares) = depth.to(scores.device), scores[:, :total].double()
            where = torch.from_numpy(reused).to(paid.device)
            looked_for = _spread(squares, depth)[where]
            found: torch.Tensor = (paid / (depth + _HALF_WORTH_TOKENS))[where]
            at_seam = depth[where] < RUN_START_TOKENS
            looked_for[at_seam], found[at_seam] = -torch.inf, torch.inf
            left = max(0, budget - int(at_seam.sum()))
            found[_order(looked_for)[: math.ceil(_LOOKED_FOR_SHARE * left)]] = torch.inf
            return found

        return self._most_worth(runs, worth)

    def _most_deviating(
        self, model: Any, token_ids: np.ndarray, arena: Arena, runs: Sequence[ReusedRun]
    ) -> np.ndarray:
        def worth(reused: np.ndarray, _budget: int) -> torch.Tensor:
            deviation = value_deviation(model, token_ids, arena, runs)[reused]
            return torch.from_numpy(np.where(deviation < self.min_deviation, -np.inf, deviation))

        return self._most_worth(runs, worth)

    def _most_worth(
        self, runs: Sequence[ReusedRun], worth: Callable[[np.ndarray, int], torch.Tensor]
    ) -> np.ndarray:
        """The share of the approximate tokens that is worth most; `worth` is asked only for a part."""
        reused = positions_of(runs, exact=False)
        budget = min(len(reused), math.ceil(self.recompute_ratio * len(reused)))
        if budget in (0, len(reused)):
            return reused[:budget]
        return _highest(reused, worth(reused, budget), budget)

    def cost(self, runs: Sequence[ReusedRun], total: int, costs: ForwardCosts) -> CostEstimate:
        """The chosen share, and the forward that finds it."""
        choosing = self._choosing_cost(runs, total, costs) if self.recompute_ratio else 0.0
        return costs.estimate(runs, total, self.recompute_ratio, choosing=choosing)

    def _choosing_cost(self, runs: Sequence[ReusedRun], total: int, costs: ForwardCosts) -> float:
        if self.selector == "guided":
            return costs.observed_forward(np.arange(max(0, total - TAIL_TOKENS), total))
        return _LAYERS * costs.forward(np.arange(exact_end(runs), total)) / costs.layers

    def describe(self, reused: int) -> str:
        """The number that the ratio gives."""
        return f"of {reused:,} approximate tokens {math.ceil(self.recompute_ratio * reused):,}"

    @property
    def rewrites_all(self) -> bool:
        """The published rule leaves the KV of the layers that it computed."""
        return self.selector == "deviation"


def attention_from_the_end(
    model: Any, token_ids: np.ndarray, arena: Arena, runs: Sequence[ReusedRun], tail_tokens: int = TAIL_TOKENS
) -> torch.Tensor | None:
    """How much the last prompt tokens attend to each token, `[2, tokens]`.

    The highest attention probability that any of them gives it, summed over layers and heads; and its square
    summed so, in which a few heads that look for one token count more than many that look at all. None if the
    model's attention cannot be observed.
    """
    total = len(token_ids)
    start = max(0, total - tail_tokens)
    device = model.get_input_embeddings().weight.device
    filled = torch.zeros(total, dtype=torch.bool)
    filled[torch.from_numpy(positions_of(runs))] = True
    filled[start:] = True
    pattern = ScatteredAttention(
        torch.arange(start, total, device=device), total, filled=filled.to(device), observe=True
    )
    # The forward overwrites the KV of the last tokens, and reused ones may be among them.
    kept = [slab[:, :, start:total].clone() for slab in arena.slabs]
    try:
        run_scattered(model, token_ids, arena, pattern)
    finally:
        for slab, part in zip(arena.slabs, kept, strict=True):
            slab[:, :, start:total] = part
    scores = pattern.scores
    return scores if scores is not None and bool(scores.any()) else None


def value_deviation(model: Any, token_ids: np.ndarray, arena: Arena, runs: Sequence[ReusedRun]) -> np.ndarray:
    """1 - cosine between cached and newly computed values of the second layer, `[tokens]`.

    Computes the first two layers of all tokens that are not exact, and leaves that KV in the arena.
    """
    end = max(run.end for run in runs)
    layer = arena.layers[min(_LAYERS, len(arena.layers)) - 1]
    arena.set_length(end)
    cached = layer.values[0].clone()
    todo = np.union1d(positions_of(runs, exact=False), live_positions(runs, end))
    device = model.get_input_embeddings().weight.device
    for first in range(0, len(todo), _MAX_DEVIATION_TOKENS):
        block = todo[first : first + _MAX_DEVIATION_TOKENS]
        pattern = ScatteredAttention(torch.from_numpy(block).to(device), int(block[-1]) + 1)
        run_scattered(model, token_ids, arena, pattern, layers=min(_LAYERS, len(arena.layers)))
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


def _spread(worth: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    """Each of the tokens `[tokens]` is worth a part of those right before it in its run, or more."""
    found = worth.clone()
    for distance, part in enumerate(_SPREAD, start=1):
        reached = torch.where(depth[distance:] >= distance, part * worth[:-distance], 0.0)
        found[distance:] = torch.maximum(found[distance:], reached)
    return found


def _highest(positions: np.ndarray, worth: torch.Tensor, budget: int) -> np.ndarray:
    """The `budget` positions of the highest worth, sorted; those worth -inf are never taken."""
    order = _order(worth)[:budget]
    chosen: np.ndarray = np.sort(positions[order[worth[order] > -torch.inf].cpu().numpy()])
    return chosen


def _order(worth: torch.Tensor) -> torch.Tensor:
    """Indices `[n]`, the highest worth first, and the first of equals."""
    return torch.sort(worth, descending=True, stable=True).indices
