"""Requests that run together: what they share is loaded or computed once, prefill and decoding are batched.

    match -> lay out -> place -> prefill what is shared -> prefill the rows -> decode -> store

Rows leave as they finish. Between two forwards nothing is held, so a caller may stop at any time and
other requests may come between. Knows rows and stores; what to run together is decided above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from kvboost.batching.prefixes import Branch, Forest, plan_forest
from kvboost.choices import Origin
from kvboost.identity.namespace import Namespace
from kvboost.kv.arena import Arena
from kvboost.models import GenerationResult, ScoreResult, Span
from kvboost.requests.prepared import LENGTH_REASON
from kvboost.requests.prompts import PromptReader
from kvboost.requests.request import Request, ScoreRequest
from kvboost.reuse.chunk_loader import ChunkLoader
from kvboost.reuse.chunk_writer import ChunkWriter
from kvboost.reuse.plan import PrefixPart, ReusePlan
from kvboost.reuse.workspace import Workspace
from kvboost.run import decode
from kvboost.run.packed_step import Extension, Segment, extend
from kvboost.run.sampling import DecodingRow
from kvboost.store.manager import KVCacheManager, StoreReport


class ModelChangedError(Exception):
    """The model changed between two answers of a batch: what its rows hold is of the model before."""


SHARED_REASON = "computed once for the batch"
Result = TypeVar("Result")
Planned = Callable[[Request], AbstractContextManager[ReusePlan]]


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What became of request number `index`: a result, or why there is none."""

    index: int
    result: Result | Exception


@dataclasses.dataclass
class BatchCounts:
    """Batches that were run, and the KV memory of the largest, beside that of a copy for every row."""

    batches: int = 0
    rows: int = 0
    shared_tokens: int = 0
    largest_kv_bytes: int = 0
    largest_kv_bytes_if_copied: int = 0

    def add(self, arena: Arena, rows: int, shared: int, slots_if_copied: int) -> None:
        self.batches += 1
        self.rows += rows
        self.shared_tokens += shared
        if arena.nbytes > self.largest_kv_bytes:
            self.largest_kv_bytes = arena.nbytes
            self.largest_kv_bytes_if_copied = slots_if_copied * arena.layout.bytes_per_token


@dataclasses.dataclass
class Seating:
    """Rows in an arena: their plans, and the segments of what they share and of what is their own.

    `spans` say where every prompt token of each row comes from.
    """

    arena: Arena
    forest: Forest
    plans: list[ReusePlan]
    branches: dict[Branch, Segment]
    lanes: list[Segment]
    spans: list[tuple[Span, ...]]

    def unfilled(self) -> list[list[tuple[Segment, Branch]]]:
        """Branches that are not filled, by level: each stands behind those of the levels before it."""
        levels: dict[int, list[tuple[Segment, Branch]]] = {}
        for branch, segment in self.branches.items():
            if segment.length < segment.capacity:
                levels.setdefault(len(segment.before), []).append((segment, branch))
        return [level for _, level in sorted(levels.items())]


class BatchRunner:
    """Runs checked requests of one namespace together; each is answered as it would be alone."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        manager: KVCacheManager,
        loader: ChunkLoader,
        writer: ChunkWriter,
        workspace: Workspace,
        reader: PromptReader,
        planned: Planned,
        is_current: Callable[[Namespace], bool],
    ) -> None:
        self._is_current = is_current
        self._model = model
        self._tokenizer = tokenizer
        self._manager = manager
        self._loader = loader
        self._writer = writer
        self._workspace = workspace
        self._reader = reader
        self._planned = planned
        self.counts = BatchCounts()

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome[GenerationResult]]:
        """Answer the requests; each outcome comes when its row has finished."""
        seating = self.seat(requests)
        rows = [
            DecodingRow(self._model, self._tokenizer, each.token_ids, each.options, each.index)
            for each in requests
        ]
        self.fill_branches(seating, requests)
        active = list(seating.forest.order)
        lanes = seating.lanes
        prompts = [Extension(lanes[row], requests[row].token_ids[lanes[row].end :]) for row in active]
        single = [each.segment for each in prompts if len(each.token_ids) == 1]
        _clear_behind(single, seating.arena)
        failed = self._step(seating.arena, rows, active, prompts)
        _clear_behind([lane for lane in lanes if lane not in single], seating.arena)
        while True:
            through = [row for row in active if row in failed or rows[row].finished_at is not None]
            for row in through:
                active.remove(row)
                error = failed.get(row)
                yield Outcome(
                    requests[row].index, error or self._finish(seating, row, requests[row], rows[row])
                )
            if not active:
                break
            if through and not self._is_current(
                requests[0].namespace
            ):  # whoever took an answer may have changed it
                raise ModelChangedError
            tokens = [Extension(lanes[row], np.array(rows[row].new_ids[-1:])) for row in active]
            failed = self._step(seating.arena, rows, active, tokens)
        if self._is_current(requests[0].namespace):
            self.leave(seating, requests)

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[Outcome[ScoreResult]]:
        """Score continuations; pairs that need the same forward share it."""
        same: dict[bytes, list[ScoreRequest]] = {}
        for request in requests:
            same.setdefault(request.token_ids.tobytes(), []).append(request)
        groups = list(same.values())
        # Equal tokens need not be cut alike between prompt and continuation: the earliest cut serves all.
        heads = [min(group, key=lambda each: each.limit) for group in groups]
        seating = self.seat(heads)
        self.fill_branches(seating, heads)
        order = seating.forest.order
        lanes = seating.lanes
        wanted = {row: heads[row].needed - heads[row].limit for row in order}
        rows = [Extension(lanes[row], heads[row].token_ids[lanes[row].end :], wanted[row]) for row in order]
        scores = {request.index: Scores(request) for request in requests}
        with decode.running(self._model, fast=True, was_read=True):
            for number, first, logits in extend(self._model, seating.arena, rows):
                row = order[number]
                for request in groups[row]:
                    scores[request.index].add(heads[row].limit + first, logits)
        for row in order:
            self.store(seating, row, heads[row], heads[row].prompt.token_ids)
            for request in groups[row]:
                text = self._reader.decode(request.continuation)
                yield Outcome(request.index, scores[request.index].result(seating.spans[row], text))
        if self._is_current(heads[0].namespace):
            self.leave(seating, heads)

    def _step(
        self, arena: Arena, rows: list[DecodingRow], active: list[int], extensions: list[Extension]
    ) -> dict[int, Exception]:
        """One token more for every active row; returns the rows whose token could not be chosen."""
        failed: dict[int, Exception] = {}
        with decode.running(self._model, fast=True, was_read=True):
            for number, _, logits in extend(self._model, arena, extensions):
                row = active[number]
                try:
                    rows[row].append(rows[row].choose(logits[0]))
                except Exception as error:  # a caller's own processor: its row fails, the others do not
                    failed[row] = error
        return failed

    # --- rows in an arena --------------------------------------------------------------------

    def seat(self, requests: Sequence[Request]) -> Seating:
        """Lay the requests out in an arena, and place what is stored of them up to their limits."""
        limits = [request.limit for request in requests]
        needed = [request.needed for request in requests]
        forest = plan_forest([request.token_ids for request in requests], limits)
        slots = 0
        branches: dict[Branch, Segment] = {}
        for branch in forest.branches:
            before = _segments(branch.parent, branches)
            branches[branch] = Segment(slots, branch.end - branch.start, before)
            slots += branch.end - branch.start
        lane_tokens = max(needed[row] - forest.start_of(row) for row in forest.order)
        lanes: dict[int, Segment] = {}
        for row in forest.order:
            before = _segments(forest.branch_of[row], branches)
            lanes[row] = Segment(slots, lane_tokens, before, clean=True)
            slots += lane_tokens
        first = requests[_row_at_start(forest)]
        arena, already, _ = self._workspace.take(slots, first.namespace.key, first.token_ids)
        self.counts.add(
            arena, len(requests), sum(b.end - b.start for b in forest.branches), max(needed) * len(requests)
        )

        def parts(plans: list[ReusePlan]) -> list[PrefixPart]:
            found = []
            for branch, segment in branches.items():
                best = max((plans[row] for row in branch.rows), key=lambda plan: plan.prefix_end)
                segment.length = min(max(0, best.prefix_end - branch.start), segment.capacity)
                in_place = min(already, segment.length) if segment.start == 0 else 0
                found.append(
                    PrefixPart.of(best, branch.start + in_place, branch.end, segment.start + in_place)
                )
            for row, lane in lanes.items():
                lane.length = max(0, plans[row].prefix_end - lane.position)
                in_place = min(already, lane.length) if lane.start == 0 else 0
                start, end = lane.position + in_place, lane.position + lane.length
                found.append(PrefixPart.of(plans[row], start, end, lane.start + in_place))
            return found

        plans = self._loader.place_sequences(
            [partial(self._planned, request) for request in requests], parts, arena
        )
        rows = range(len(requests))
        spans = [row_spans(plans[row], forest.branch_of[row], row, branches) for row in rows]
        return Seating(arena, forest, plans, branches, [lanes[row] for row in rows], spans)

    def fill_branches(self, seating: Seating, requests: Sequence[Request]) -> None:
        """Compute what the rows share and nobody has stored, each branch once."""
        for level in seating.unfilled():
            extensions = [
                Extension(segment, requests[branch.rows[0]].token_ids[segment.end : branch.end], 0)
                for segment, branch in level
            ]
            with decode.running(self._model, fast=True, was_read=True):
                for _ in extend(self._model, seating.arena, extensions):
                    pass

    def leave(self, seating: Seating, requests: Sequence[Request]) -> None:
        """Give the arena back; what stands at its start may serve the next request where it is."""
        first = _row_at_start(seating.forest)
        at_start = next(each for each in (*seating.lanes[first].before, seating.lanes[first]))
        tokens = min(at_start.length, len(requests[first].prompt)) if at_start.start == 0 else 0
        request = requests[first]
        self._workspace.give_back(seating.arena, request.namespace.key, request.token_ids[:tokens])

    # --- results -----------------------------------------------------------------------------

    def _finish(self, seating: Seating, row: int, request: Request, answer: DecodingRow) -> GenerationResult:
        """Store a finished row, and make its result."""
        decoded = answer.decoded()
        text = self._reader.decode(decoded.token_ids)
        result = request.result(decoded, seating.spans[row], text, answer.finished_at)
        ids = np.concatenate([request.token_ids, np.asarray(decoded.token_ids, dtype=np.int64)])[:-1]
        if seating.lanes[row].end != len(ids):
            self._writer.refuse(LENGTH_REASON)
        elif not self.store(seating, row, request, ids).is_refused:
            self._reader.remember_answer(text, decoded.token_ids, request.namespace.salt)
        return result

    def store(self, seating: Seating, row: int, request: Request, token_ids: np.ndarray) -> StoreReport:
        """Keep the KV of a row's `token_ids` `[tokens]`, as far as it was computed, and book the request."""
        plan, lane = seating.plans[row], seating.lanes[row]
        self._loader.make_way(lane.end - plan.prefix_end)
        report = self._writer.keep_from(
            token_ids[: lane.end], partial(lane.between, seating.arena), request.namespace
        )
        self._loader.save_soon()
        self._manager.count_request(
            reused=sum(span.length for span in seating.spans[row] if span.origin is Origin.EXACT),
            total=len(request.prompt),
            reason=plan.reason,
        )
        return report


def _row_at_start(forest: Forest) -> int:
    """A row whose text begins in the first slot of the arena: branches come before lanes."""
    return forest.branches[0].rows[0] if forest.branches else forest.order[0]


def _clear_behind(lanes: Sequence[Segment], arena: Arena) -> None:
    """Zero what is not filled of lanes that take single tokens from now on.

    It is read under a mask, and a mask does not stop the NaN of an earlier request.
    """
    for lane in lanes:
        arena.clear(lane.start + lane.length, lane.start + lane.capacity)


def _segments(branch: Branch | None, segments: dict[Branch, Segment]) -> tuple[Segment, ...]:
    return tuple(segments[each] for each in branch.path) if branch is not None else ()


class Scores:
    """The log-likelihoods of a continuation's tokens, as the logits for them come in."""

    def __init__(self, request: ScoreRequest) -> None:
        self._request = request
        self._values: list[float] = []
        self._is_greedy = True

    def add(self, position: int, logits: torch.Tensor) -> None:
        """Logits `[n, vocab]` of the tokens from `position` on; those before the continuation say nothing."""
        skipped = max(0, self._request.limit - position)
        if skipped >= len(logits):
            return
        scores = logits[skipped:].float().log_softmax(-1)
        done = len(self._values)
        targets = self._request.continuation[done : done + len(scores)]
        chosen = torch.tensor(targets, device=scores.device).unsqueeze(-1)
        self._values += scores.gather(-1, chosen).squeeze(-1).tolist()
        self._is_greedy &= scores.argmax(-1).tolist() == targets

    def result(self, spans: tuple[Span, ...], text: str) -> ScoreResult:
        """The score, with the origin of the prompt's tokens."""
        return self._request.scored(self._values, self._is_greedy, spans, text)


def row_spans(
    plan: ReusePlan, branch: Branch | None, row: int, segments: dict[Branch, Segment]
) -> tuple[Span, ...]:
    """The origin of every prompt token of a row, before anything was computed.

    What is computed once for several rows is live for the first of them, and exact for the others.
    """
    *cached, last = plan.spans()  # a prompt's last token is always live
    at, spans = plan.prefix_end, cached
    for each in branch.path if branch is not None else ():
        edge = each.end if row != each.rows[0] else segments[each].end
        for end, origin, reason in (
            (edge, Origin.EXACT, SHARED_REASON),
            (each.end, Origin.LIVE, plan.reason),
        ):
            if end > at:
                spans.append(Span(at, end, origin, reason))
                at = end
    return tuple(_joined([*spans, Span(at, plan.total, last.origin, last.reason)]))


def _joined(spans: list[Span]) -> Iterator[Span]:
    """Neighbouring live spans as one, and likewise shared ones."""
    held: Span | None = None
    for span in spans:
        if held is not None and not span.donor and (held.origin, held.reason) == (span.origin, span.reason):
            held = dataclasses.replace(held, end=span.end)
            continue
        if held is not None:
            yield held
        held = span
    if held is not None:
        yield held
