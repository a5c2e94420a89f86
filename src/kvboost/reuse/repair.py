"""Completing a prompt whose KV is partly reused: choose what to recompute, then one sparse pass.

A strategy says which of the reused tokens are worth computing again; together with the tokens that
were not found they go through the model at once. The engine does this on its arena, the strategies'
public `apply` on an arena of its own made from an `AssembledPrompt`. Knows no store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout
from kvboost.models import AssembledPrompt, ReusedRun
from kvboost.run import decode
from kvboost.run.sparse_forward import sparse_forward


class RepairStrategy(Protocol):
    """Which reused tokens to compute again in their new surroundings."""

    def choose(
        self, model: Any, token_ids: np.ndarray, arena: Arena, runs: Sequence[ReusedRun]
    ) -> np.ndarray:
        """Sorted positions `[n]` among the runs that are not exact.

        `arena` holds the KV of `runs` at their places and nothing else; what a strategy computes there
        in passing may stay, but must not make it worse.
        """
        ...


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
    strategy: RepairStrategy | None,
    end: int,
) -> np.ndarray:
    """Fill `arena`, which holds `runs`, up to `end`; returns the reused positions computed again."""
    nothing = np.zeros(0, dtype=np.int64)
    chosen = nothing if strategy is None else strategy.choose(model, token_ids, arena, runs)
    chosen = chosen[chosen < end]
    arena.set_length(max((run.end for run in runs), default=0))
    sparse_forward(model, token_ids, arena, np.union1d(live_positions(runs, end), chosen))
    arena.set_length(end)
    return chosen


def apply_strategy(
    strategy: RepairStrategy, assembled: AssembledPrompt, model: Any, device: str
) -> AssembledPrompt:
    """A copy of `assembled` whose approximate KV was repaired as `strategy` says."""
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
            (key.index_select(2, where).to(device), value.index_select(2, where).to(device))
            for key, value in arena.as_past_key_values()
        )
    return dataclasses.replace(assembled, cached_past_kv=repaired)


def runs_of(assembled: AssembledPrompt) -> list[ReusedRun]:
    """The runs of an assembled prompt; where it names none, every chunk is one that was moved here."""
    if assembled.runs:
        return [ReusedRun(*run) for run in assembled.runs]
    return [
        ReusedRun(start, end, 0, start == 0 and not assembled.has_approximate)
        for start, end in assembled.chunk_boundaries
    ]
