"""Warming the cache: a text is read once and its KV is kept.

It is read in one contiguous prefill, or in overlap mode chunk by chunk with little context. Knows the parts
of an engine, no answers.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from kvboost.identity.namespace import Namespace
from kvboost.kernels.scattered import ScatteredAttention
from kvboost.kv.arena import Arena
from kvboost.models import WarmResult
from kvboost.parts.engine_parts import EngineParts
from kvboost.requests.prompts import Prompt
from kvboost.reuse.assembler import Lookup
from kvboost.reuse.plan import ReusePlan
from kvboost.reuse.recorder import NO_POSITIONS, Answer
from kvboost.run import decode
from kvboost.run.sparse_forward import run_scattered
from kvboost.store.inserter import StoreReport

_log = logging.getLogger(__name__)


class Warmer:
    """Fills the cache of one engine."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def warm(self, text: Prompt, position_offset: int, cache_salt: str | None) -> WarmResult:
        """Read `text` at positions from `position_offset` on, and keep its KV."""
        parts = self._parts
        prompt = parts.reader.read(text, parts.salt(cache_salt), warming=True)
        total, chunk_size = len(prompt), parts.settings.chunk_size
        parts.requests.check_positions(position_offset + total, "position_offset and text", position_offset)
        namespace = parts.namespace(cache_salt)
        tail = total % chunk_size
        if why := namespace.gated or parts.why_gated(position_offset + total):
            return WarmResult(0, total, chunk_size, tail == 0, tail, f"not kept, {why}")
        end = total - tail if parts.bit_exact else total
        report = self.read(prompt.token_ids, end, namespace, position_offset)
        counts = total, report.stored, report.present, report.evicted
        _log.debug("warmed %d tokens: %d chunks stored, %d there before, %d evicted", *counts)
        return WarmResult(
            chunks_stored=report.present + report.stored,
            token_count=total,
            chunk_size=chunk_size,
            chunk_boundary_aligned=tail == 0,
            partial_tail_tokens=tail,
            alignment_warning=_alignment_warning(tail, bit_exact=parts.bit_exact),
            evicted_chunks=report.evicted,
        )

    def read(self, ids: np.ndarray, end: int, namespace: Namespace, position_offset: int = 0) -> StoreReport:
        """Compute the KV of the first `end` of `ids` `[tokens]` that is not stored yet, and store it."""
        parts = self._parts
        if position_offset:
            namespace = namespace.at_offset(position_offset)
        elif parts.remote is not None:
            parts.remote.look_ahead(ids, namespace, end, False)
        arena, already, _ = parts.workspace.take(max(end, 1), namespace.key, ids)
        plan = parts.loader.place(Lookup(ids, namespace, end), arena, already)
        with decode.running(parts.model, fast=not parts.bit_exact, was_read=True):
            if parts.settings.overlap_k:
                self._encode_with_overlap(ids, arena, end, position_offset)
            else:
                decode.prefill(
                    parts.model, ids, arena, end, block=parts.block, position_offset=position_offset
                )
        report = parts.recorder.store(ids[:end], arena, namespace, plan, position_offset=position_offset)
        if not report.is_refused:
            parts.workspace.give_back(arena, namespace.key, ids[:end])
        return report

    def store_answer(
        self,
        ids: np.ndarray,
        arena: Arena,
        namespace: Namespace,
        answer: Answer,
        plan: ReusePlan | None = None,
        recomputed: np.ndarray = NO_POSITIONS,
    ) -> StoreReport:
        """Store `ids` `[tokens]`, a prompt and its answer, with the KV of `arena`, and remember the answer.

        In overlap mode that KV saw more than its encoding allows: the text is read anew.
        """
        recorder = self._parts.recorder
        if self._parts.settings.overlap_k:
            report = self.read(ids, len(ids), namespace)
            recorder.remember(answer, namespace, report)
            return report
        return recorder.store_answer(ids, arena, namespace, answer, plan, recomputed)

    def _encode_with_overlap(self, ids: np.ndarray, arena: Arena, end: int, position_offset: int) -> None:
        """Fill `arena` up to `end`; each chunk sees only the sink tokens and the last K tokens before it."""
        parts = self._parts
        device = parts.model.get_input_embeddings().weight.device
        start, chunk_start = arena.length, 0
        for cut in parts.writer.cuts(ids[:end]):
            if cut <= start:
                chunk_start = cut
                continue
            visible = torch.zeros(cut, dtype=torch.bool, device=device)
            visible[: parts.settings.sink_tokens] = True
            visible[max(0, chunk_start - parts.settings.overlap_k) :] = True
            pattern = ScatteredAttention(torch.arange(start, cut, device=device), cut, filled=visible)
            run_scattered(parts.model, ids, arena, pattern, position_offset=position_offset)
            start = chunk_start = cut
        arena.set_length(end)


def _alignment_warning(tail: int, *, bit_exact: bool) -> str | None:
    if tail == 0:
        return None
    if bit_exact:
        return f"the last {tail} tokens do not fill a block and are not kept in bit-exact mode"
    return f"the last {tail} tokens do not fill a chunk; they are kept as a short one and reused exactly"
