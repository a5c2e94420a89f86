"""After a request ran: its KV is stored, its answer remembered, and what was reused is counted.

All ways of running a request that may store end here; `chunk_writer` refuses what a changed model computed.
Callers see to it that the tokens are those that were run. Knows KV by positions, not where it was computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvboost.identity.namespace import Namespace
from kvboost.remote.cache import RemoteCache
from kvboost.requests.prompts import PromptReader
from kvboost.requests.request import Request
from kvboost.reuse.chunk_loader import ChunkLoader
from kvboost.reuse.chunk_writer import ChunkWriter, KVSource
from kvboost.reuse.plan import ReusePlan
from kvboost.settings import EngineSettings
from kvboost.store.inserter import StoreReport
from kvboost.store.manager import KVCacheManager

NO_POSITIONS = np.zeros(0, dtype=np.int64)


class Answer(NamedTuple):
    """An answer behind a prompt of so many tokens."""

    prompt_tokens: int
    token_ids: list[int]
    text: str

    def run_ids(self, prompt: np.ndarray) -> np.ndarray:
        """Prompt `[tokens]` and answer but for the last token, which was chosen and not run."""
        return np.concatenate([prompt, np.asarray(self.token_ids, dtype=np.int64)])[:-1]


class Recorder:
    """Stores, remembers and counts for one engine."""

    def __init__(
        self,
        settings: EngineSettings,
        manager: KVCacheManager,
        writer: ChunkWriter,
        loader: ChunkLoader,
        reader: PromptReader,
        remote: RemoteCache | None = None,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._writer = writer
        self._loader = loader
        self._reader = reader
        self._remote = remote

    def store(
        self,
        ids: np.ndarray,
        kv: KVSource,
        namespace: Namespace,
        plan: ReusePlan | None = None,
        recomputed: np.ndarray = NO_POSITIONS,
        *,
        position_offset: int = 0,
        is_piece: bool = False,
    ) -> StoreReport:
        """Store `ids` `[tokens]`, of which `plan` was reused; `recomputed` `[n]` are positions repaired.

        After a piece of a prompt, others wait for their tokens: the disk saves it with the rest.
        """
        if not len(ids):
            return StoreReport()
        self._loader.make_way(len(ids) - (plan.reused if plan is not None else 0))
        # Overlap chunks are approximate too, and stored as what they are.
        if plan is None or self._settings.overlap_k or exact_tokens(plan, len(ids)) == len(ids):
            report = self._writer.keep(ids, kv, namespace, position_offset=position_offset)
        else:
            report = self._writer.keep_approximate(ids, kv, namespace, plan, recomputed)
        if not report.is_refused and not is_piece:
            self._loader.save_soon()
        if self._remote is not None and not report.is_refused and not position_offset:
            reused = [piece.chunk.chunk_id for piece in plan.pieces] if plan is not None else []
            self._remote.offer(report.stored_keys, reused, namespace)
        return report

    def store_answer(
        self,
        ids: np.ndarray,
        kv: KVSource,
        namespace: Namespace,
        answer: Answer,
        plan: ReusePlan | None = None,
        recomputed: np.ndarray = NO_POSITIONS,
    ) -> StoreReport:
        """Store `ids` `[tokens]`, a prompt and what was run of its answer, and remember the answer."""
        report = self.store(self.kept(ids, answer), kv, namespace, plan, recomputed)
        self.remember(answer, namespace, report)
        return report

    def remember(self, answer: Answer, namespace: Namespace, report: StoreReport) -> None:
        """Remember the ids of an answer that was stored as `report` says."""
        if not report.is_refused and answer.token_ids:
            self._reader.remember_answer(answer.text, answer.token_ids, namespace.salt)

    def kept(self, ids: np.ndarray, answer: Answer) -> np.ndarray:
        """What may be stored of `ids` `[tokens]`: in bit-exact mode, whole blocks of the prompt."""
        block, prompt = self._settings.chunk_size, answer.prompt_tokens
        return ids[: prompt - prompt % block] if self._settings.bit_exact else ids

    def refuse(self, reason: str) -> StoreReport:
        """Count a text that must not be stored."""
        return self._writer.refuse(reason)

    def count(
        self,
        request: Request,
        plan: ReusePlan | None,
        reused: int,
        recomputed: int = 0,
        *,
        reason: str = "",
        prefill_seconds: float | None = None,
    ) -> None:
        """Count a request that reused `reused` tokens by its `plan`, or none for a `reason`."""
        self._manager.count_request(
            reused=reused,
            total=len(request.prompt),
            reason=plan.reason if plan is not None else reason,
            approximate=plan is not None and plan.first_approximate < plan.total,
            recomputed=recomputed,
            prefill_seconds=prefill_seconds,
        )


def exact_tokens(plan: ReusePlan, tokens: int) -> int:
    """How many of the first `tokens` tokens behind `plan`, prompt and answer, have exact KV."""
    return min(plan.first_approximate, tokens) if plan.first_approximate < plan.total else tokens
