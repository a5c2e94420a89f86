"""One request by itself: transformers' own `generate` over an arena that holds what was reused.

    match -> place -> repair -> prefill and decode -> store

`serve` shows these steps in order. Knows the parts of an engine, and requests that were checked before.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from kvboost.batching.scores import Scores
from kvboost.choices import GenerationMode, Origin
from kvboost.executor.warming import Warmer
from kvboost.kv import rope
from kvboost.kv.arena import Arena
from kvboost.models import GenerationResult, ScoreResult, Span
from kvboost.parts.engine_parts import EngineParts
from kvboost.requests.prepared import LENGTH_REASON
from kvboost.requests.request import Request, ScoreRequest
from kvboost.reuse import repair
from kvboost.reuse.plan import ReusePlan
from kvboost.reuse.recorder import Answer, exact_tokens
from kvboost.reuse.workspace import Workspace
from kvboost.run import decode
from kvboost.run.decode import Decoded


class AloneRunner:
    """Answers and scores requests one at a time."""

    def __init__(self, parts: EngineParts, warmer: Warmer) -> None:
        self._parts = parts
        self._warmer = warmer

    def serve(self, request: Request) -> GenerationResult:
        """Answer a request."""
        parts = self._parts
        parts.fit.begin([request])
        if request.mode is GenerationMode.BASELINE:
            return self._serve_baseline(request)
        if why := parts.why_plain(request):
            parts.recorder.count(request, None, 0, reason=why)
            return self._serve_plain(request, why)
        plan, arena = self._place(request)
        run_started = time.perf_counter()
        recomputed = self._repair(plan, request, arena)
        decoded = self._run(request, arena)
        text = parts.reader.decode(decoded.token_ids)
        self._store(request, Answer(plan.total, decoded.token_ids, text), arena, plan, recomputed)
        seconds = decoded.first_token_at - run_started
        parts.recorder.count(request, plan, plan.reused, len(recomputed), prefill_seconds=seconds)
        return request.result(decoded, plan.spans(recomputed), text)

    def _place(self, request: Request) -> tuple[ReusePlan, Arena]:
        """What is reused of the prompt, and an arena that holds it, with room for the rest and the answer."""
        parts = self._parts
        repaired = parts.repair_of(request).label
        arena, exact, any_kind = parts.workspace.take(
            request.needed, request.namespace.key, request.token_ids, repaired
        )
        return parts.loader.place(parts.lookup(request), arena, exact, any_kind), arena

    def _repair(self, plan: ReusePlan, request: Request, arena: Arena) -> np.ndarray:
        """Recompute what the strategy chooses, and compute the gaps between reused runs.

        Returns the reused positions `[n]` that were computed again.
        """
        if not plan.needs_repair:
            return np.zeros(0, dtype=np.int64)
        model, end = self._parts.model, len(request.prompt) - 1
        with decode.running(model, fast=True, was_read=True):
            return repair.complete(model, request.token_ids, arena, plan.repair_runs, plan.strategy, end)

    def _run(self, request: Request, arena: Arena) -> Decoded:
        """Prefill what is missing and decode."""
        parts, total, block = self._parts, len(request.token_ids), self._parts.block
        with decode.running(parts.model, fast=not parts.bit_exact, was_read=True):
            stop = decode.last_stop(arena.length, total, block)
            decode.prefill(parts.model, request.token_ids, arena, stop, block=block)
            if request.options.num_sequences > 1:
                arena.batch_repeat_interleave(request.options.num_sequences)
            return self._generate(request, arena)

    def _serve_baseline(self, request: Request) -> GenerationResult:
        """The model's own `generate`; in bit-exact mode, with the same prefill blocks as with reuse."""
        parts = self._parts
        if not parts.bit_exact or parts.why_plain(request):
            return self._serve_plain(request, "baseline")
        arena = Workspace(parts.layout).take(request.needed, "", request.token_ids)[0]
        return self._result(request, self._run(request, arena), (_live(request, "baseline"),))

    def _serve_plain(self, request: Request, reason: str) -> GenerationResult:
        """The model's own `generate` with stock attention and cache; nothing is read or stored."""
        parts = self._parts
        with decode.running(parts.model, fast=False, was_read=True):
            rope.reset_dynamic_frequencies(parts.model)
            decoded = self._generate(request, None)
        return self._result(request, decoded, (_live(request, reason),))

    def _generate(self, request: Request, cache: Arena | None) -> Decoded:
        what = request.token_ids, cache, request.options, request.watch, request.index
        return decode.generate(self._parts.model, self._parts.tokenizer, *what)

    def _result(self, request: Request, decoded: Decoded, spans: tuple[Span, ...]) -> GenerationResult:
        return request.result(decoded, spans, self._parts.reader.decode(decoded.token_ids))

    # --- scores ------------------------------------------------------------------------------

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Score one continuation: without reuse, or with reuse that may need repair."""
        parts = self._parts
        parts.fit.begin([request])
        gated = parts.why_plain(request)
        repaired = request.mode is GenerationMode.CHUNK_KV_REUSE or parts.settings.overlap_k > 0
        if request.mode is GenerationMode.BASELINE or gated or parts.bit_exact or not repaired:
            reason = gated or parts.why_alone(request) or "computed alone"
            with decode.running(parts.model, fast=False, was_read=True):
                rope.reset_dynamic_frequencies(parts.model)
                return self._scored(request, None, (_live(request, reason),))
        plan, arena = self._place(request)
        recomputed = self._repair(plan, request, arena)
        with decode.running(parts.model, fast=True, was_read=True):
            decode.prefill(parts.model, request.token_ids, arena, request.limit)
            result = self._scored(request, arena, plan.spans(recomputed))
        ids = request.prompt.token_ids
        self._warmer.store_answer(ids, arena, request.namespace, Answer(len(ids), [], ""), plan, recomputed)
        parts.recorder.count(request, plan, plan.reused, len(recomputed))
        return result

    def _scored(self, request: ScoreRequest, arena: Arena | None, spans: tuple[Span, ...]) -> ScoreResult:
        """The score, by one forward over the tokens that `arena` does not hold."""
        model = self._parts.model
        ids = request.token_ids[arena.length if arena is not None else 0 :]
        device = model.get_input_embeddings().weight.device
        with torch.no_grad():
            output = model(
                input_ids=torch.from_numpy(ids).to(device).unsqueeze(0),
                past_key_values=arena,
                use_cache=arena is not None,
                logits_to_keep=len(request.continuation),
            )
        scores = Scores(request, self._parts.reader.decode)
        # a model without `logits_to_keep` returns all logits
        scores.add(request.limit, output.logits[0, -len(request.continuation) :])
        return scores.result(spans)

    # --- storing -----------------------------------------------------------------------------

    def _store(
        self, request: Request, answer: Answer, arena: Arena, plan: ReusePlan, recomputed: np.ndarray
    ) -> None:
        """Store the KV of prompt and answer, as far as it was computed, and keep the arena."""
        parts, namespace = self._parts, request.namespace
        ids = request.token_ids  # beams agree on the prompt, not on the answer
        if arena.batch == 1:
            ids = answer.run_ids(ids)
            if arena.length != len(ids):
                parts.recorder.refuse(LENGTH_REASON)
                return
        ids = parts.recorder.kept(ids, answer)
        report = self._warmer.store_answer(ids, arena, namespace, answer, plan, recomputed)
        if not report.is_refused and not parts.settings.overlap_k:
            repaired, exact = parts.repair_of(request).label, exact_tokens(plan, len(ids))
            parts.workspace.give_back(arena, namespace.key, ids, exact, repaired)


def _live(request: Request, reason: str) -> Span:
    return Span(0, len(request.prompt), Origin.LIVE, reason)
