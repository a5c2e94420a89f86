"""Loading stored chunks into an arena, from RAM and from disk, for one request or for a batch.

Knows plans and stores, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING

from kvboost.kv.arena import Arena
from kvboost.kv.codec import StoredKV
from kvboost.reuse.assembler import PromptAssembler, chunks_of, parts_of
from kvboost.reuse.plan import PlanPart, ReusePlan
from kvboost.store.manager import KVCacheManager

if TYPE_CHECKING:
    from kvboost.disk.cache import DiskCache

Planned = Callable[[], AbstractContextManager[ReusePlan]]


class ChunkLoader:
    """Places plans. If a chunk cannot be read from disk, it is dropped and the plan is made again."""

    def __init__(self, assembler: PromptAssembler, manager: KVCacheManager, disk: DiskCache | None) -> None:
        self._assembler = assembler
        self._manager = manager
        self._disk = disk

    def place(self, planned: Planned, arena: Arena, exact: int = 0, any_kind: int = 0) -> ReusePlan:
        """Plan and place. `arena` already holds `exact` tokens exactly, and the chain up to `any_kind`."""
        until = self._deadline()
        while True:
            with planned() as plan:
                place = partial(self._assembler.place, plan, arena, exact, any_kind)
                failed = self._load(parts_of(plan, exact, any_kind), place, until)
            if not failed:
                return plan
            self._forget(failed)

    def place_sequences(
        self, planned: Sequence[Planned], parts: Callable[[list[ReusePlan]], list[PlanPart]], arena: Arena
    ) -> list[ReusePlan]:
        """Plan several prompts and place `parts` of their plans in one arena."""
        until = self._deadline()
        while True:
            with ExitStack() as held:
                plans = [held.enter_context(each()) for each in planned]
                wanted = parts(plans)
                failed = self._load(wanted, partial(self._assembler.place_parts, wanted, arena), until)
            if not failed:
                return plans
            self._forget(failed)

    def _load(
        self, parts: list[PlanPart], place: Callable[[Mapping[str, StoredKV]], None], until: float
    ) -> dict[str, str]:
        """Load what `parts` need and have it placed; what cannot be loaded is returned with its reason."""
        if self._disk is None:
            place({})
            return {}
        fetched = self._disk.fetch(chunks_of(parts), until)
        if not fetched.failed:
            place(fetched.loaded)
        self._manager.on_disk.warm_up(fetched.loaded)
        return fetched.failed

    def _deadline(self) -> float:
        return self._disk.deadline() if self._disk is not None else 0.0

    def _forget(self, failed: dict[str, str]) -> None:
        for key, reason in failed.items():
            self._manager.on_disk.lost([key], reason)

    def make_way(self, tokens: int) -> None:
        """Let the disk save what storing `tokens` tokens would evict. Called after the first token."""
        if self._disk is not None and tokens > 0:
            self._disk.make_way(tokens)

    def save_soon(self) -> None:
        """Save what was stored in the background."""
        if self._disk is not None:
            self._disk.wake()
