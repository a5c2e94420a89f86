"""The engine's own batch on a GPU: one arena and one scheduler that stay from call to call.

Captured steps hold pointers into an arena, so it must stay; and text that was read before lies in it already.
One caller has it at a time; who finds it taken runs without it. Knows schedulers, and nothing of the calls
that they serve.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from kvboost.batching.batch_memory import LANE_TOKENS, BatchMemory
from kvboost.batching.scheduler import Scheduler
from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout
from kvboost.locks import fork_safe_lock
from kvboost.parts.engine_parts import EngineParts

_log = logging.getLogger(__name__)
_TOKENS = 65_536  # of prompts and of long answers
_SEQUENCES = 64
_LANES_SHARE = 4  # lanes take at most this fraction of the slots
_ROUND_SLOTS = 64


class ResidentBatch:
    """Lends the one scheduler; `most_slots` says how many slots its arena may have."""

    def __init__(self, parts: EngineParts, most_slots: Callable[[KVLayout], int]) -> None:
        self._parts = parts
        self._most_slots = most_slots
        self.exists = parts.layout.slabs[0].device.type == "cuda"  # whether this engine has one
        self._scheduler: Scheduler | None = None
        self._is_lent = False
        self._is_abandoned = False  # by whoever has it
        self._is_stale = False  # its text is to be forgotten when it comes back
        self._is_closed = False
        self._lock = fork_safe_lock(around_data=True)

    @property
    def nbytes(self) -> int:
        """Memory of its arena and its graphs."""
        scheduler = self._scheduler
        return scheduler.nbytes if scheduler is not None else 0

    def step_stats(self) -> dict[str, Any]:
        """How its forwards ran, and what captured steps take; empty before the first."""
        scheduler = self._scheduler
        return scheduler.packed.stats() if scheduler is not None else {}

    def take(self, *, restarts: bool) -> Scheduler | None:
        """The scheduler, or None where there is none or somebody has it.

        It `restarts` what runs when the model changes, or goes on with it outside its arena.
        """
        if not self.exists:
            return None
        with self._lock:
            if self._is_closed or (self._is_lent and not self._is_abandoned):
                return None
            was_abandoned, self._is_abandoned = self._is_abandoned, False
            self._is_lent = True
            scheduler = self._scheduler
        if was_abandoned and scheduler is not None:
            self._clean(scheduler)
            return self.take(restarts=restarts)
        try:
            scheduler = scheduler or self._made()
        finally:
            with self._lock:
                self._is_lent = scheduler is not None and not self._is_closed
                self._scheduler = scheduler if self._is_lent else None
        if scheduler is not None:
            scheduler.restarts = restarts
        return self._scheduler

    def _made(self) -> Scheduler | None:
        layout = self._parts.layout
        slots = min(self._most_slots(layout), _TOKENS + _SEQUENCES * LANE_TOKENS)
        sequences = min(_SEQUENCES, slots // _LANES_SHARE // LANE_TOKENS)
        if not sequences:
            return None
        tokens = (slots - sequences * LANE_TOKENS) // _ROUND_SLOTS * _ROUND_SLOTS
        try:
            arena = Arena(layout, sequences * LANE_TOKENS + tokens + _ROUND_SLOTS)
        except torch.cuda.OutOfMemoryError:
            return None
        memory = BatchMemory(arena, sequences, tokens, LANE_TOKENS)
        return Scheduler(self._parts, memory, offline=True)

    def abandon(self) -> None:
        """Its user is gone, wherever it was; whoever takes it next cleans up. Takes no lock, stores nothing.

        Garbage is collected in any thread, whatever locks that holds.
        """
        self._is_abandoned = True

    def give_back(self, scheduler: Scheduler) -> None:
        """Let others have it; nobody waits for a token now, so this is when steps are captured."""
        try:
            if scheduler.is_whole and not scheduler.sequences:
                scheduler.capture()
        except Exception:  # the answer is there: what fails here must not take it away
            _log.exception("steps could not be captured")
            scheduler.is_whole = False
        finally:
            self._clean(scheduler)

    def _clean(self, scheduler: Scheduler) -> None:
        """Have those that are left in it leave, and forget what is to be forgotten."""
        is_usable = False
        try:
            if scheduler.is_whole:
                for sequence in scheduler.sequences:
                    scheduler.leave(sequence)
                is_usable = True
        finally:
            with self._lock:
                if not is_usable or self._is_closed:
                    self._scheduler = None
                elif self._is_stale:
                    scheduler.clear()
                self._is_stale = self._is_lent = False

    def drop(self) -> None:
        """Forget all text in it, now or as soon as it is given back; its memory and its graphs stay."""
        with self._lock:
            if self._is_lent:
                self._is_stale = True
            elif self._scheduler is not None:
                self._scheduler.clear()

    def close(self) -> None:
        """Free its memory, now or as soon as it is given back."""
        with self._lock:
            self._is_closed, self._scheduler = True, None
