"""Requests that run together from start to end: prefill and decode are batched, shared prefixes run once.

    match -> lay out -> place -> prefill shared prefixes -> prefill the rest -> decode -> store

Sequences leave as they finish. Between two forwards nothing is held, so a caller may stop at any time and
other requests may come between. Knows sequences and stores; what to run together is decided above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from kvboost.batching.batch_layout import BatchLayout, PlacedBatch
from kvboost.batching.context import BatchContext
from kvboost.batching.scores import Scores
from kvboost.choices import Origin
from kvboost.kv.arena import Arena
from kvboost.models import GenerationResult, ScoreResult
from kvboost.requests.prepared import LENGTH_REASON
from kvboost.requests.request import Request, ScoreRequest
from kvboost.run import decode
from kvboost.run.packed_step import Extension, Segment, SequenceKV, extend
from kvboost.run.sampling import SequenceSampler
from kvboost.store.inserter import StoreReport


class ModelChangedError(Exception):
    """The model changed between two answers of a batch: the KV of its sequences is of the model before."""


Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What became of request number `index`: a result, or why there is none."""

    index: int
    result: Result | Exception


@dataclasses.dataclass
class BatchCounts:
    """Batches that were run, and the KV memory of the largest, beside that of a copy for every sequence."""

    batches: int = 0
    sequences: int = 0
    shared_tokens: int = 0
    largest_kv_bytes: int = 0
    largest_kv_bytes_if_copied: int = 0

    def add(self, arena: Arena, sequences: int, shared: int, slots_if_copied: int) -> None:
        self.batches += 1
        self.sequences += sequences
        self.shared_tokens += shared
        if arena.nbytes > self.largest_kv_bytes:
            self.largest_kv_bytes = arena.nbytes
            self.largest_kv_bytes_if_copied = slots_if_copied * arena.layout.bytes_per_token


class BatchRunner:
    """Runs checked requests of one namespace together; each is answered as it would be alone."""

    def __init__(self, context: BatchContext) -> None:
        self._context = context
        self.counts = BatchCounts()

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome[GenerationResult]]:
        """Answer the requests; each outcome comes when its sequence has finished."""
        batch = self._place(requests)
        samplers = [
            SequenceSampler(
                self._context.model, self._context.tokenizer, each.token_ids, each.options, each.index
            )
            for each in requests
        ]
        self._fill_branches(batch, requests)
        active = list(batch.layout.forest.order)
        lanes = batch.layout.lanes
        prompts = [Extension(lanes[i], requests[i].token_ids[lanes[i].end :]) for i in active]
        single = [each.segment for each in prompts if len(each.token_ids) == 1]
        _clear_unfilled(single, batch.arena)
        failed = self._step(batch.arena, samplers, active, prompts)
        _clear_unfilled([lane for lane in lanes if lane not in single], batch.arena)
        while True:
            finished = [i for i in active if i in failed or samplers[i].finished_at is not None]
            for i in finished:
                active.remove(i)
                result = failed.get(i) or self._finish(batch, i, requests[i], samplers[i])
                yield Outcome(requests[i].index, result)
            if not active:
                break
            # Whoever took an answer may have changed the model.
            if finished and not self._context.fit.is_current(requests[0].namespace):
                raise ModelChangedError
            tokens = [Extension(lanes[i], np.array(samplers[i].new_ids[-1:])) for i in active]
            failed = self._step(batch.arena, samplers, active, tokens)
        self._give_back(batch, requests)

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[Outcome[ScoreResult]]:
        """Score continuations; pairs that need the same forward share it."""
        same: dict[bytes, list[ScoreRequest]] = {}
        for request in requests:
            same.setdefault(request.token_ids.tobytes(), []).append(request)
        groups = list(same.values())
        # Equal tokens need not be cut alike between prompt and continuation: the earliest cut serves all.
        heads = [min(group, key=lambda each: each.limit) for group in groups]
        batch = self._place(heads)
        self._fill_branches(batch, heads)
        order, lanes = batch.layout.forest.order, batch.layout.lanes
        extensions = [
            Extension(lanes[i], heads[i].token_ids[lanes[i].end :], heads[i].needed - heads[i].limit)
            for i in order
        ]
        scores = {request.index: Scores(request) for request in requests}
        with decode.running(self._context.model, fast=True, was_read=True):
            for number, first, logits in extend(self._context.model, batch.arena, extensions):
                i = order[number]
                for request in groups[i]:
                    scores[request.index].add(heads[i].limit + first, logits)
        for i in order:
            self._store(batch, i, heads[i], heads[i].prompt.token_ids)
            for request in groups[i]:
                text = self._context.reader.decode(request.continuation)
                yield Outcome(request.index, scores[request.index].result(batch.spans[i], text))
        self._give_back(batch, heads)

    def _step(
        self, arena: Arena, samplers: list[SequenceSampler], active: list[int], extensions: list[Extension]
    ) -> dict[int, Exception]:
        """One more token for every active sequence; returns those whose token could not be chosen."""
        failed: dict[int, Exception] = {}
        with decode.running(self._context.model, fast=True, was_read=True):
            for number, _, logits in extend(self._context.model, arena, extensions):
                sampler = samplers[active[number]]
                try:
                    sampler.append(sampler.choose(logits[0]))
                except Exception as error:  # a caller's own processor: its sequence fails, the others do not
                    failed[active[number]] = error
        return failed

    # --- sequences in an arena ---------------------------------------------------------------

    def _place(self, requests: Sequence[Request]) -> PlacedBatch:
        """Lay the requests out in an arena, and place what is stored of them up to their limits."""
        layout = BatchLayout(requests)
        first = requests[layout.first]
        arena, already, _ = self._context.workspace.take(layout.slots, first.namespace.key, first.token_ids)
        slots_if_copied = max(request.needed for request in requests) * len(requests)
        self.counts.add(arena, len(requests), layout.shared_tokens, slots_if_copied)
        plans = self._context.loader.place_sequences(
            [partial(self._context.planned, request) for request in requests],
            lambda plans: layout.parts(plans, already),
            arena,
        )
        spans = [layout.spans(plan, index) for index, plan in enumerate(plans)]
        return PlacedBatch(layout, arena, plans, spans)

    def _fill_branches(self, batch: PlacedBatch, requests: Sequence[Request]) -> None:
        """Compute what the sequences share and is not stored, each branch once."""
        for level in batch.layout.unfilled():
            extensions = [
                Extension(segment, requests[branch.sequences[0]].token_ids[segment.end : branch.end], 0)
                for segment, branch in level
            ]
            with decode.running(self._context.model, fast=True, was_read=True):
                for _ in extend(self._context.model, batch.arena, extensions):
                    pass

    def _give_back(self, batch: PlacedBatch, requests: Sequence[Request]) -> None:
        """Give the arena back, unless the model has changed; its first text may serve the next request."""
        if not self._context.fit.is_current(requests[0].namespace):
            return
        first = batch.layout.first
        lane, request = batch.layout.lanes[first], requests[first]
        at_start = (*lane.before, lane)[0]
        tokens = min(at_start.length, len(request.prompt)) if at_start.start == 0 else 0
        self._context.workspace.give_back(batch.arena, request.namespace.key, request.token_ids[:tokens])

    # --- results -----------------------------------------------------------------------------

    def _finish(
        self, batch: PlacedBatch, index: int, request: Request, sampler: SequenceSampler
    ) -> GenerationResult:
        """Store a finished sequence, and make its result."""
        decoded = sampler.decoded()
        text = self._context.reader.decode(decoded.token_ids)
        result = request.result(decoded, batch.spans[index], text, sampler.finished_at)
        ids = np.concatenate([request.token_ids, np.asarray(decoded.token_ids, dtype=np.int64)])[:-1]
        if batch.layout.lanes[index].end != len(ids):
            self._context.writer.refuse(LENGTH_REASON)
        elif not self._store(batch, index, request, ids).is_refused:
            self._context.reader.remember_answer(text, decoded.token_ids, request.namespace.salt)
        return result

    def _store(self, batch: PlacedBatch, index: int, request: Request, token_ids: np.ndarray) -> StoreReport:
        """Store the KV of `token_ids` `[tokens]`, as far as it was computed, and count the request."""
        plan, lane = batch.plans[index], batch.layout.lanes[index]
        self._context.loader.make_way(lane.end - plan.prefix_end)
        kv = SequenceKV(batch.arena, lane)
        report = self._context.writer.keep(token_ids[: lane.end], kv, request.namespace)
        self._context.loader.save_soon()
        self._context.manager.count_request(
            reused=sum(span.length for span in batch.spans[index] if span.origin is Origin.EXACT),
            total=len(request.prompt),
            reason=plan.reason,
        )
        return report


def _clear_unfilled(lanes: Sequence[Segment], arena: Arena) -> None:
    """Zero the unfilled slots of lanes that take single tokens from now on.

    They are read under a mask, and a mask does not stop the NaN of an earlier request.
    """
    for lane in lanes:
        arena.clear(lane.start + lane.length, lane.start + lane.capacity)
