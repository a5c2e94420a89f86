"""Loading stored chunks into an arena, from RAM and from disk.

Knows plans and stores, no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvboost.kv.arena import Arena
from kvboost.reuse.assembler import Lookup, PromptAssembler, chunks_of, parts_of
from kvboost.reuse.plan import PlanPart, ReusePlan
from kvboost.store.manager import KVCacheManager

if TYPE_CHECKING:
    from kvboost.disk.cache import DiskCache


class ChunkLoader:
    """Places plans. If a chunk cannot be read from disk, it is dropped and the plan is made again."""

    def __init__(self, assembler: PromptAssembler, manager: KVCacheManager, disk: DiskCache | None) -> None:
        self._assembler = assembler
        self._manager = manager
        self._disk = disk

    def place(self, lookup: Lookup, arena: Arena, exact: int = 0, any_kind: int = 0) -> ReusePlan:
        """Plan and place. `arena` already holds `exact` tokens exactly, and the chain up to `any_kind`."""
        plan = self.place_parts(lookup, lambda plan: parts_of(plan, exact, any_kind), arena)
        self._assembler.settle(plan, arena)
        return plan

    def place_parts(
        self, lookup: Lookup, parts: Callable[[ReusePlan], list[PlanPart]], arena: Arena
    ) -> ReusePlan:
        """Plan, and place `parts` of the plan; they are asked for again where a chunk could not be loaded."""
        until = self._disk.deadline() if self._disk is not None else 0.0
        while True:
            with self._assembler.planned(lookup) as plan:
                failed = self._load(parts(plan), arena, until)
            if not failed:
                return plan
            for key, reason in failed.items():
                self._manager.on_disk.lost([key], reason)

    def _load(self, parts: list[PlanPart], arena: Arena, until: float) -> dict[str, str]:
        """Load what `parts` need and place it; what cannot be loaded is returned with its reason."""
        if self._disk is None:
            self._assembler.place_parts(parts, arena)
            return {}
        fetched = self._disk.fetch(chunks_of(parts), until)
        if not fetched.failed:
            self._assembler.place_parts(parts, arena, fetched.loaded)
        self._manager.on_disk.warm_up(fetched.loaded)
        return fetched.failed

    def make_way(self, tokens: int) -> None:
        """Let the disk save what storing `tokens` tokens would evict. Called after the first token."""
        if self._disk is not None and tokens > 0:
            self._disk.make_way(tokens)

    def save_soon(self) -> None:
        """Save what was stored in the background."""
        if self._disk is not None:
            self._disk.wake()
