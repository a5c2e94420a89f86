"""Choosing which reused tokens of a sequence are computed again.

Strategies want an arena in which positions are slots: they get a copy of the KV. What they choose goes
through the model in the steps of the batch. Knows sequences and strategies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvboost.batching.batch_memory import BatchMemory
from kvboost.batching.sequence import Sequence
from kvboost.reuse.repair import live_positions
from kvboost.run import decode
from kvboost.run.packed_step import SequenceKV

_NO_POSITIONS = np.zeros(0, dtype=np.int64)


def choose_repair(model: Any, memory: BatchMemory, sequence: Sequence) -> None:
    """Choose for a sequence whose text before its private nodes is there; it may read all of it then."""
    plan, limit, strategy = sequence.plan, sequence.limit, sequence.plan.strategy
    runs, ids = plan.repair_runs, sequence.request.token_ids
    staged, kv = memory.staged(len(ids)), SequenceKV(memory.arena, sequence.node.segment)
    sequence.set_missing(_NO_POSITIONS)
    for run in runs:
        staged.place(kv.between(run.start, run.end), run.start)
    for start, end in plan.gaps:
        staged.clear(start, end)  # masked, but a mask does not stop the NaN of an earlier request
    staged.set_length(plan.contiguous_end)
    with decode.running(model, fast=True, was_read=True):
        chosen = strategy.choose(model, ids, staged, runs)
    if strategy.rewrites_all:
        for node in sequence.private_nodes:
            first = node.segment.position
            memory.arena.place(staged.between(first, node.end), node.segment.start)
    sequence.recomputed = chosen[chosen < limit]
    sequence.set_missing(np.union1d(live_positions(runs, limit), sequence.recomputed))
    sequence.awaits_choice = False
