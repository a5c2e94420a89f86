"""Repair: completing a prompt whose KV is partly reused.

A strategy chooses which reused tokens to compute again. They go through the model together with the tokens
that were not found, in one sparse pass. The engine does this in its own arena; a strategy's public `apply`
does it in an arena made from an `AssembledPrompt`. Knows no store.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout
from kvboost.models import AssembledPrompt, ReusedRun
from kvboost.run import decode
from kvboost.run.sparse_forward import sparse_forward

if TYPE_CHECKING:
    from kvboost.reuse.costs import CostEstimate, ForwardCosts


class RepairStrategy(ABC):
    """Which reused tokens to compute again where the text before them changed, and what that costs.

    A strategy is a frozen dataclass with `choose` and `cost`; the rest has defaults. Strategies keep no
    state: the engine builds one and uses it for every request, from any thread.
    """

    device: str = "cpu"  # where `apply` puts the repaired KV

    @abstractmethod
    def choose(
        self, model: Any, token_ids: np.ndarray, arena: Arena, runs: Sequence[ReusedRun]
    ) -> np.ndarray:
        """Positions `[n]` among the runs that are not exact; sorted, each once.

        `token_ids` `[tokens]` is the whole prompt, and `arena` holds the KV of `runs` in place and nothing
        else. A strategy may run the model over the arena. If it leaves other KV there, `rewrites_all` says
        so, and exact runs stay as they are.
        """

    @abstractmethod
    def cost(self, runs: Sequence[ReusedRun], total: int, costs: ForwardCosts) -> CostEstimate:
        """What reusing `runs` in a prompt of `total` tokens would cost, against computing it.

        Asked before anything is copied or run; approximate reuse that does not pay is left out.
        """

    def describe(self, reused: int) -> str:
        """How many of `reused` approximate tokens are computed again, in words."""
        return f"of {reused:,} approximate tokens some"

    @property
    def observes(self) -> int:
        """Of how many tokens at the end of a prompt `choose_by` wants to know the attention; 0 = of none.

        Such a strategy can choose without an arena of its own.
        """
        return 0

    def choose_by(
        self,
        attention: Callable[[], torch.Tensor | None],
        total: int,
        runs: Sequence[ReusedRun],
    ) -> np.ndarray:
        """As `choose` does for a prompt of `total` tokens, from the attention `[2, tokens]` that these get.

        `attention` finds that out when it is called, or returns None where the model does not let it be seen.
        """
        raise NotImplementedError

    @property
    def rewrites_all(self) -> bool:
        """Whether `choose` also changes the KV of approximate tokens that it does not return."""
        return False

    def apply(self, assembled: AssembledPrompt, model: Any) -> AssembledPrompt:
        """`assembled` with the chosen KV computed again, `[1, kv_heads, cached, head_dim]` per layer."""
        if all(run.exact for run in runs_of(assembled)):
            return assembled
        return apply_strategy(self, assembled, model)


def positions_of(runs: Sequence[ReusedRun], *, exact: bool | None = None) -> np.ndarray:
    """Sorted prompt positions `[n]` of runs: all, or only the exact or the approximate ones."""
    spans = [np.arange(run.start, run.end) for run in runs if exact is None or run.exact is exact]
    return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)


def live_positions(runs: Sequence[ReusedRun], total: int) -> np.ndarray:
    """Sorted positions `[n]` among the first `total` that no run covers."""
    live = np.ones(total, dtype=bool)
    for run in runs:
        live[run.start : run.end] = False
    return np.flatnonzero(live)


def complete(
    model: Any,
    token_ids: np.ndarray,
    arena: Arena,
    runs: Sequence[ReusedRun],
    strategy: RepairStrategy,
    end: int,
) -> np.ndarray:
    """Fill `arena`, which holds `runs`, up to `end`; returns the reused positions `[n]` computed again."""
    chosen = strategy.choose(model, token_ids, arena, runs)
    chosen = chosen[chosen < end]
    arena.set_length(max((run.end for run in runs), default=0))
    sparse_forward(model, token_ids, arena, np.union1d(live_positions(runs, end), chosen))
    arena.set_length(end)
    return chosen


def apply_strategy(strategy: RepairStrategy, assembled: AssembledPrompt, model: Any) -> AssembledPrompt:
    """A copy of `assembled` whose approximate KV `strategy` has repaired."""
    runs = runs_of(assembled)
    past = assembled.cached_past_kv
    if past is None or not runs:
        return assembled
    token_ids = np.asarray(assembled.full_token_ids, dtype=np.int64)
    model_device = model.get_input_embeddings().weight.device
    placed = tuple((key.to(model_device), value.to(model_device)) for key, value in past)
    where = torch.from_numpy(positions_of(runs)).to(model_device)
    arena = Arena(KVLayout.of(placed), len(token_ids))
    with decode.running(model, fast=True):
        for layer, (key, value) in zip(arena.layers, placed, strict=True):
            layer.length = arena.capacity
            layer.keys.index_copy_(2, where, key)
            layer.values.index_copy_(2, where, value)
        complete(model, token_ids, arena, runs, strategy, end=runs[-1].end)
        repaired = tuple(
            (key.index_select(2, where).to(strategy.device), value.index_select(2, where).to(strategy.device))
            for key, value in arena.as_past_key_values()
        )
    return dataclasses.replace(assembled, cached_past_kv=repaired)


def runs_of(assembled: AssembledPrompt) -> list[ReusedRun]:
    """The runs of an assembled prompt. If it names none, each chunk is one; at most the first is exact."""
    if assembled.runs:
        return [ReusedRun(*run) for run in assembled.runs]
    return [
        ReusedRun(start, end, 0, start == 0 and not assembled.has_approximate)
        for start, end in assembled.chunk_boundaries
    ]
