"""Choosing which reused tokens of a sequence are computed again.

On a GPU a strategy that asks the end of the prompt gets what that attends to, from KV where it lies. Others
want an arena in which positions are slots: they get a copy. What is chosen goes through the model in the
steps of the batch. Knows sequences and strategies.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from kvboost.batching.batch_memory import BatchMemory
from kvboost.batching.sequence import Sequence
from kvboost.kernels.work import Stretch
from kvboost.models import ReusedRun
from kvboost.reuse.repair import live_positions
from kvboost.run import decode
from kvboost.run.packed_step import PackedModel, SequenceKV


class _NotObservedError(Exception):
    """Attention could not be observed in place."""


_NO_POSITIONS = np.zeros(0, dtype=np.int64)


def choose_repair(
    model: Any, memory: BatchMemory, packed: PackedModel, sequence: Sequence, state: Hashable
) -> None:
    """Choose for a sequence whose text before its private nodes is there; it may read all of it then.

    `state` is that of the model, as captured steps ask for it.
    """
    plan, limit = sequence.plan, sequence.limit
    kv = SequenceKV(memory.arena, sequence.node.segment)
    sequence.set_missing(_NO_POSITIONS)
    with decode.running(model, fast=True, was_read=True):
        chosen = _chosen_in_place(memory, packed, sequence, kv, state)
        if chosen is None:
            chosen = _chosen_in_a_copy(model, memory, sequence, kv)
    sequence.recomputed = chosen[chosen < limit]
    sequence.set_missing(np.union1d(live_positions(plan.repair_runs, limit), sequence.recomputed))
    sequence.awaits_choice = False


def _chosen_in_place(
    memory: BatchMemory, packed: PackedModel, sequence: Sequence, kv: SequenceKV, state: Hashable
) -> np.ndarray | None:
    """Where the end of the prompt is all that has to be asked, KV stays where it is; None where it is not."""
    ids, strategy, runs = sequence.request.token_ids, sequence.plan.strategy, _runs_there(sequence)
    start = max(0, len(ids) - strategy.observes)
    slots = memory.probe_slots(strategy.observes) if strategy.observes else None
    if slots is None:
        return None

    def attention() -> torch.Tensor:
        seen = [each for run in runs for each in kv.stretches(run.start, min(run.end, start))]
        scores = packed.observe(seen, ids[start:], Stretch(slots, len(ids) - start, start), state)
        if scores is None:
            raise _NotObservedError
        return scores

    try:
        return strategy.choose_by(attention, len(ids), runs)
    except _NotObservedError:
        return None


def _runs_there(sequence: Sequence) -> list[ReusedRun]:
    """What is reused, with all exact text before the private nodes: other requests may have computed it."""
    runs, first = sequence.plan.repair_runs, sequence.private_nodes[0].segment.position
    before = [ReusedRun(0, first, 0, True)] if first else []
    return [*before, *(run for run in runs if run.start >= first)]


def _chosen_in_a_copy(model: Any, memory: BatchMemory, sequence: Sequence, kv: SequenceKV) -> np.ndarray:
    """For strategies that want an arena in which positions are slots, and may write to it."""
    ids, strategy, runs = sequence.request.token_ids, sequence.plan.strategy, _runs_there(sequence)
    staged = memory.staged(len(ids))
    for run in runs:
        staged.place(kv.between(run.start, run.end), run.start)
    ends, starts = [0, *(run.end for run in runs)], [*(run.start for run in runs), len(ids)]
    for start, end in zip(ends, starts, strict=True):
        staged.clear(start, end)  # masked, but a mask does not stop the NaN of an earlier request
    staged.set_length(sequence.plan.contiguous_end)
    chosen = strategy.choose(model, ids, staged, runs)
    if strategy.rewrites_all:
        for node in sequence.private_nodes:
            first = node.segment.position
            memory.arena.place(staged.between(first, node.end), node.segment.start)
    return chosen
