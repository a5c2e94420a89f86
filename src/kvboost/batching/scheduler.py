"""Requests that come and go in one running batch: continuous batching.

    join: match -> place what is stored -> a lane of its own
    step: some prompt tokens of those who wait for their first token, one token for all who have one
    leave: store -> result

What requests have in common lies in the arena once and is computed once (`radix_tree`): who needs text
that is being computed waits for it. A long prompt goes through in blocks, cut so that the others' tokens
come on time. Where the model changes between two steps, those that are in the loop go on by themselves, on
the model as it is then, and nothing of theirs is stored. One thread drives it. Knows rows and stores, no
queue and no network.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from kvboost.batching.radix_tree import Node, RadixTree, SlotPool
from kvboost.choices import Origin
from kvboost.compat import text_config
from kvboost.errors import InvalidRequestError
from kvboost.identity.namespace import Namespace
from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout
from kvboost.models import GenerationResult, Span
from kvboost.requests.prepared import CHANGED_REASON, LENGTH_REASON
from kvboost.requests.prompts import PromptReader
from kvboost.requests.request import Request
from kvboost.reuse.chunk_loader import ChunkLoader
from kvboost.reuse.chunk_writer import ChunkWriter
from kvboost.reuse.plan import PrefixPart, ReusePlan
from kvboost.run import decode
from kvboost.run.packed_step import Extension, Segment, extend
from kvboost.run.sampling import DecodingRow
from kvboost.store.manager import KVCacheManager, StoreReport

SHARED_REASON = "in use by another request"
LEFT_REASON = "another request was to compute it, and left"
LANE_TOKENS = 256  # of an answer; a longer one is moved on, so that lanes stay equal
_PULLED_SHARE = 2  # of a lane: the end of a prompt up to this long is taken into it
_ALONE_BLOCK = {False: 256, True: 2048}  # prompt tokens per step while nobody waits for a next token
_LEAST_BLOCK = 16
# How many times as long a step may take for the prompt tokens that go along with it: the first, and up to the
# second where those who wait for their first token outnumber those who wait for their next.
_SLOWDOWN = (6.0, 12.0)
_MEASURE_EVERY = 32  # steps with prompt tokens; then one without, to see how long that takes
_ROUND = ((64, 64), (16, 8))  # above so many tokens in a step, multiples of this: few shapes, few kernels
_MEMORY = 0.8  # how much of what was measured before counts in the running means
Planned = Callable[[Request], AbstractContextManager[ReusePlan]]


class Listener(Protocol):
    """Hears what becomes of a request, in the thread that drives the loop."""

    def token(self, token_id: int) -> None:
        """The next token of the answer."""

    def done(self, result: GenerationResult) -> None:
        """The answer is complete, or was cut off by `leave`."""

    def failed(self, error: Exception) -> None:
        """There is no answer."""


class Row:
    """A request in the loop."""

    def __init__(self, request: Request, listener: Listener, answers: bool, tenant: str = "") -> None:
        self.request = request
        self.listener = listener
        self.tenant = tenant
        self.answers = answers  # False: only its prompt is read
        self.node: Node
        self.lane = Segment(0, 0)
        self.moved_on: list[Segment] = []  # full lanes of its answer
        self.reserved = 0  # slots that its answer may still need
        self.plan: ReusePlan
        self.in_place = 0  # tokens that lay or were being computed in the arena before it came
        self.computed_from = len(request.token_ids)  # the first position that went through the model for it
        self.decoding: DecodingRow
        self.stored = 0  # of its prompt
        self.by_itself: StockSequence | None = None  # out of the arena, since the model is not shared now
        self.started = False  # its last prompt token went through
        self.pulled = False  # the end of its prompt lies in its lane, if it could

    @property
    def limit(self) -> int:
        return self.request.limit if self.answers else len(self.request.token_ids)

    @property
    def unfilled(self) -> Node | None:
        """The first part of its prompt that nobody has computed."""
        return next((node for node in self.node.path if not node.is_filled), None)

    @property
    def own_nodes(self) -> list[Node]:
        """Nodes of its prompt that were made for it."""
        return [node for node in self.node.path if node.segment.position >= self.in_place]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All before its lane."""
        return (*(node.segment for node in self.node.path), *self.moved_on)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The origin of every prompt token. What lay in the arena before was computed for others."""
        if self.by_itself is not None:
            return (Span(0, len(self.request.prompt), Origin.LIVE, self.by_itself.reason),)
        plan = self.plan
        if self.in_place <= plan.prefix_end <= self.computed_from:
            return plan.spans()
        end = min(max(plan.prefix_end, self.in_place), self.computed_from)
        spans = [
            replace(span, end=min(span.end, end))
            for span in plan.spans()
            if span.origin is not Origin.LIVE and span.start < end
        ]
        if plan.prefix_end < end:
            spans.append(Span(plan.prefix_end, end, Origin.EXACT, SHARED_REASON))
        if end < plan.total:
            spans.append(Span(end, plan.total, Origin.LIVE, plan.reason or LEFT_REASON))
        return tuple(spans)


class StockSequence:
    """A request that goes on alone, on stock attention and a stock cache."""

    def __init__(self, model: Any, reason: str) -> None:
        self.reason = reason
        self._model = model
        self._namespace: Namespace | None = None
        self._cache: Any = None

    def next_logits(self, token_ids: np.ndarray, namespace: Namespace) -> torch.Tensor:
        """Logits `[vocab]` behind `token_ids` `[tokens]`; `namespace` is that of the model as it is now."""
        if self._cache is None or namespace != self._namespace or namespace.gated:
            self._cache, self._namespace = DynamicCache(config=text_config(self._model)), namespace
        device = self._model.get_input_embeddings().weight.device
        ids = torch.from_numpy(token_ids[self._cache.get_seq_length() :]).to(device).unsqueeze(0)
        with decode.running(self._model, fast=False, was_read=True):
            output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits


@dataclass
class SchedulerCounts:
    """What the loop has done."""

    steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    joined: int = 0
    shared_tokens: int = 0  # found in the arena
    failed_steps: int = 0


class Pace:
    """How many prompt tokens a step may take, by how long steps took before."""

    def __init__(self, on_gpu: bool) -> None:
        self._most = _ALONE_BLOCK[on_gpu]
        self._step_s = 0.0
        self._since_alone = 0  # steps with both tokens and prompt tokens in a row
        self.token_s = 0.0  # of a prompt token, as measured

    def block(self, decoding: int, waiting: int) -> int:
        """Prompt tokens for the next step: `decoding` rows get a token in it, `waiting` have none yet."""
        if decoding and self._since_alone >= _MEASURE_EVERY:
            return 0  # how long a step takes by itself may have changed
        allowed = float(self._most)
        if decoding and self.token_s and self._step_s:
            slowdown = min(_SLOWDOWN[1], _SLOWDOWN[0] * max(1.0, waiting / decoding))
            allowed = min(allowed, max(_LEAST_BLOCK, (slowdown - 1) * self._step_s / self.token_s))
        least = min(_LEAST_BLOCK, int(allowed))
        return max(least, _rounded(int(allowed) + decoding) - decoding)

    def took(self, seconds: float, decoding: int, prompt_tokens: int) -> None:
        """A step of so many tokens took `seconds`."""
        self._since_alone += 1 if prompt_tokens and decoding else 0
        if not prompt_tokens:
            is_old = self._since_alone >= _MEASURE_EVERY
            self._step_s = seconds if is_old else _mean(self._step_s, seconds)
            self._since_alone = 0
        elif not decoding:
            self.token_s = _mean(self.token_s, seconds / prompt_tokens)
        elif self._step_s:
            self.token_s = _mean(self.token_s, max(0.0, seconds - self._step_s) / prompt_tokens)


def _rounded(tokens: int) -> int:
    for above, step in _ROUND:
        if tokens > above:
            return tokens // step * step
    return tokens


def _mean(so_far: float, value: float) -> float:
    return value if not so_far else _MEMORY * so_far + (1 - _MEMORY) * value


class Scheduler:
    """Runs checked requests of any namespaces in one batch; each is answered as it would be alone."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        layout: KVLayout,
        manager: KVCacheManager,
        loader: ChunkLoader,
        writer: ChunkWriter,
        reader: PromptReader,
        planned: Planned,
        begin: Callable[[Sequence[Request]], None],
        is_current: Callable[[Namespace], bool],
        *,
        max_sequences: int,
        prompt_tokens: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._manager = manager
        self._loader = loader
        self._writer = writer
        self._reader = reader
        self._planned = planned
        self._begin = begin
        self._is_current = is_current
        self.max_sequences = max_sequences
        lanes = max_sequences * LANE_TOKENS
        self._arena = Arena(layout, lanes + prompt_tokens)
        self._prompt_tokens = prompt_tokens
        self.radix_tree = RadixTree(SlotPool(lanes, lanes + prompt_tokens))
        self._rows: list[Row] = []  # by lane
        self._order: list[Row] = []  # by arrival
        self._pace = Pace(layout.slabs[0].device.type == "cuda")
        self._newcomers_had_a_turn = False
        self.counts = SchedulerCounts()

    @property
    def rows(self) -> Sequence[Row]:
        """Requests in the loop, in the order of their arrival."""
        return tuple(self._order)

    @property
    def max_tokens(self) -> int:
        """Tokens that prompts, and answers that outgrow their lanes, may have together."""
        return self._prompt_tokens

    @property
    def nbytes(self) -> int:
        """Memory of the arena."""
        return self._arena.nbytes

    # --- coming ------------------------------------------------------------------------------

    @staticmethod
    def needed(request: Request, *, answers: bool = True) -> int:
        """Room that a request takes at most, in tokens."""
        return Row(request, _NOBODY, answers).limit + _growth(request, answers)

    def check(self, request: Request, *, answers: bool = True) -> None:
        """Refuse what would not fit even if nothing else ran."""
        needed = self.needed(request, answers=answers)
        if needed > self._prompt_tokens:
            raise InvalidRequestError(
                f"prompt and max_new_tokens need room for {needed} tokens, the running batch has "
                f"{self._prompt_tokens}"
            )

    def has_room(
        self, request: Request, *, answers: bool = True, spare_rows: int = 0, spare_tokens: int = 0
    ) -> bool:
        """Whether a request could join now, and leave so many rows and tokens free for others."""
        if len(self._rows) >= self.max_sequences - spare_rows:
            return False
        row = Row(request, _NOBODY, answers)
        reserved = sum(each.reserved for each in self._rows)
        needed, there = self.radix_tree.room_for(
            request.namespace.key, request.token_ids[: row.limit], reserved
        )
        return needed + _growth(request, answers) + spare_tokens <= there

    def join(self, request: Request, listener: Listener, *, answers: bool = True, tenant: str = "") -> Row:
        """Take a request of `tenant` in; `answers=False` only reads its prompt, for later ones.

        What of it is stored is placed now, the rest goes along with the next steps.
        """
        self._check_model()
        self._begin([request])
        row = Row(request, listener, answers, tenant)
        tokens = request.token_ids[: row.limit]
        if answers:
            row.decoding = DecodingRow(
                self._model, self._tokenizer, request.token_ids, request.options, request.index
            )
        if why := request.namespace.gated:
            row.by_itself = StockSequence(self._model, why)
            self._order.append(row)
            self.counts.joined += 1
            return row
        row.node, row.in_place = self.radix_tree.enter(request.namespace.key, tokens)
        try:
            row.plan = self._place(row)
        except BaseException:
            for node in row.own_nodes:
                node.segment.length = 0  # what was to be placed may not be there
            self.radix_tree.leave(row.node)
            raise
        row.stored = min(row.plan.prefix_end, row.limit)
        row.reserved = _growth(request, answers)
        start = len(self._rows) * LANE_TOKENS
        self._arena.clear(start, start + LANE_TOKENS)  # read under a mask, which does not stop a NaN
        row.lane = Segment(start, LANE_TOKENS, row.segments, clean=True)
        self._rows.append(row)
        self._order.append(row)
        self.counts.joined += 1
        self.counts.shared_tokens += row.in_place
        return row

    def _place(self, row: Row) -> ReusePlan:
        """Copy what is stored of a row's prompt into the nodes that are its own."""
        own = row.own_nodes

        def parts(plans: list[ReusePlan]) -> list[PrefixPart]:
            found = []
            for node in own:
                segment = node.segment
                segment.length = min(max(0, plans[0].prefix_end - segment.position), segment.capacity)
                found.append(PrefixPart.of(plans[0], segment.position, segment.end, segment.start))
            return found

        request = row.request
        return self._loader.place_sequences([partial(self._planned, request)], parts, self._arena)[0]

    # --- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        """One forward for all. Where it fails, so do all requests in it; those that join later do not."""
        try:
            self._step()
        except Exception as error:  # out of memory, mostly; the KV of those in the step is not to be trusted
            self.fail_all(error)

    def _check_model(self) -> None:
        """Where the model is another one than at the last step, take all requests out of the arena."""
        if not self._rows or self._is_current(self._rows[0].request.namespace):
            return
        for row in list(self._rows):
            self._free_place(row)
            row.by_itself = StockSequence(self._model, CHANGED_REASON)
        lanes = self.max_sequences * LANE_TOKENS
        self.radix_tree = RadixTree(SlotPool(lanes, lanes + self._prompt_tokens))

    def _step_by_itself(self, row: Row) -> None:
        """One token for a request that is out of the arena."""
        assert row.by_itself is not None
        if not row.answers:
            self.leave(row)  # its prompt was to be read for later ones, and it cannot be kept
            return
        self._begin([row.request])
        given = np.asarray(row.decoding.new_ids, dtype=np.int64)
        try:
            logits = row.by_itself.next_logits(
                np.concatenate([row.request.token_ids, given]), row.request.namespace
            )
            row.decoding.append(row.decoding.choose(logits))
        except Exception as error:  # a processor of the request, or no memory: the others go on
            self._drop(row)
            row.listener.failed(error)
            return
        self.counts.decoded_tokens += 1
        if row.decoding.finished_at is not None:
            self.leave(row)
        else:
            row.listener.token(row.decoding.new_ids[-1])

    def _step(self) -> None:
        self._check_model()
        for row in [each for each in self._order if each.by_itself is not None]:
            self._step_by_itself(row)
        if not self._rows:
            self.counts.steps += 1
            return
        started = time.perf_counter()
        decoding = [row for row in self._rows if row.started]
        fills = self._fills(self._pace.block(len(decoding), len(self._rows) - len(decoding)))
        prompt_tokens = sum(len(each.token_ids) for each in fills.values())
        speaking = [row for row in self._rows if row.started or (row.answers and self._is_ready(row, fills))]
        self._make_lanes(speaking)
        failed = self._forward([*((fill, None) for fill in fills.values()), *map(self._next, speaking)])
        self.counts.steps += 1
        self.counts.decoded_tokens += len(speaking)
        self.counts.prefilled_tokens += prompt_tokens
        for row in speaking:
            row.started = True
            if (error := failed.get(id(row))) is not None:
                self._drop(row)
                row.listener.failed(error)
            elif row.decoding.finished_at is not None:
                self.leave(row)
            else:
                row.listener.token(row.decoding.new_ids[-1])
        self._pace.took(time.perf_counter() - started, len(speaking), prompt_tokens)
        for row in [each for each in self._order if each.by_itself is None]:
            self._store_prompt(row)
            if not row.answers and row.unfilled is None:
                self.leave(row)

    def _fills(self, block: int) -> dict[int, Extension]:
        """The next `block` prompt tokens, by node, each node once.

        Half of them belong to who came first; then the shortest are next, tenants in turns, so that nobody
        waits long for somebody else's long prompt.
        """
        waiting: dict[int, tuple[Row, Node]] = {}
        for row in self._whose_turn():
            if (node := row.unfilled) is not None:
                waiting.setdefault(id(node), (row, node))
        fills: dict[int, Extension] = {}
        needs = [_Need(*_unfilled(row, node), row.tenant) for row, node in waiting.values()]
        for (row, node), count in zip(waiting.values(), _shares(block, needs), strict=True):
            if count:
                row.computed_from = min(row.computed_from, node.segment.end)
                start = node.segment.length
                fills[id(node)] = Extension(node.segment, node.tokens[start : start + count], 0)
        return fills

    def _whose_turn(self) -> list[Row]:
        """Rows whose prompts go on: every other step only those of tenants that have no token yet, if any.

        A tenant that floods the batch with long prompts cannot keep another from its first token.
        """
        rows = [row for row in self._order if row.by_itself is None]
        served = {row.tenant for row in rows if row.started}
        newcomers = [row for row in rows if row.tenant not in served]
        if self._newcomers_had_a_turn or len({row.tenant for row in rows}) < 2:
            newcomers = []
        self._newcomers_had_a_turn = bool(newcomers)
        return newcomers or rows

    @staticmethod
    def _is_ready(row: Row, fills: dict[int, Extension]) -> bool:
        """Whether all before a row's last prompt token is there after the fills."""
        missing = [node for node in row.node.path if not node.is_filled]
        return all(
            id(node) in fills
            and node.segment.length + len(fills[id(node)].token_ids) == node.segment.capacity
            for node in missing
        )

    def _make_lanes(self, speaking: list[Row]) -> None:
        """Let every lane have room for a token, behind all that comes before it."""
        for row in speaking:
            if row.started and not row.pulled:
                self._pull_in(row)
            if row.lane.length == row.lane.capacity:
                self._move_on(row)
            row.lane.before = row.segments

    def _pull_in(self, row: Row) -> None:
        """Copy the end of a prompt that nobody else uses into its row's lane.

        There the step's one call for all lanes reads it; as a node of its own it would take a call per layer.
        """
        row.pulled = True
        own: list[Node] = []
        count = 0
        for node in row.node.path[::-1]:
            if node.users > 1 or count + len(node.tokens) > LANE_TOKENS // _PULLED_SHARE:
                break
            own.insert(0, node)
            count += len(node.tokens)
        lane = row.lane
        if not count or lane.length > count or row.moved_on:
            return
        self._arena.move(lane.start, lane.start + count, lane.length)
        at = lane.start
        for node in own:
            self._arena.move(node.segment.start, at, len(node.tokens))
            at += len(node.tokens)
        row.node = self.radix_tree.release(own)
        row.lane = Segment(lane.start, LANE_TOKENS, row.segments, clean=True)
        row.lane.length = count + lane.length

    def _move_on(self, row: Row) -> None:
        """Take a full lane's KV elsewhere, and begin it anew."""
        lane = row.lane
        position = lane.position
        done = 0
        for start, end in self.radix_tree.take(lane.length):
            self._arena.move(lane.start + done, start, end - start)
            part = Segment(start, end - start, row.segments)
            part.length = end - start
            row.moved_on.append(part)
            done += end - start
        row.reserved = max(0, row.reserved - lane.length)
        row.lane = Segment(lane.start, LANE_TOKENS, row.segments, clean=True)
        assert row.lane.position == position + done

    @staticmethod
    def _next(row: Row) -> tuple[Extension, Row]:
        if row.started:
            return Extension(row.lane, np.array(row.decoding.new_ids[-1:])), row
        return Extension(row.lane, row.request.token_ids[row.limit :]), row

    def _forward(self, parts: list[tuple[Extension, Row | None]]) -> dict[int, Exception]:
        """Run the extensions and choose their rows' next tokens; returns the rows for which that failed."""
        failed: dict[int, Exception] = {}
        parts.sort(key=lambda part: _path(part[0].segment))
        found = []
        with decode.running(self._model, fast=True, was_read=True):
            for number, _, logits in extend(self._model, self._arena, [each for each, _ in parts]):
                row = parts[number][1]
                assert row is not None
                found.append((row, logits[0]))
            greedy = [(row, logits) for row, logits in found if row.decoding.takes_the_largest]
            if greedy:  # one question to the device for them all
                largest = torch.stack([logits for _, logits in greedy]).argmax(-1).tolist()
                for (row, _), token in zip(greedy, largest, strict=True):
                    row.decoding.append(token)
            for row, logits in found:
                if not row.decoding.takes_the_largest:
                    try:
                        row.decoding.append(row.decoding.choose(logits))
                    except Exception as error:  # a processor of the request: the others go on
                        failed[id(row)] = error
        return failed

    # --- going -------------------------------------------------------------------------------

    def leave(self, row: Row) -> None:
        """Let a request go, with the answer that it has; what was computed is stored, its place is free."""
        if row not in self._order:
            return
        request = row.request
        decoded = row.decoding.decoded() if row.answers else decode.Decoded()
        if not decoded.token_ids:
            decoded.first_token_at = time.perf_counter()
        if row.answers and row.decoding.finished_at is None:
            decoded.finish_reason = "cancelled"
        text = self._reader.decode(decoded.token_ids) if decoded.token_ids else ""
        if decoded.token_ids and row.decoding.finished_at is not None:
            row.listener.token(decoded.token_ids[-1])
        result = request.result(decoded, row.spans, text, row.decoding.finished_at if row.answers else None)
        row.listener.done(result)
        if row.by_itself is None and not self._store(row, decoded.token_ids).is_refused and decoded.token_ids:
            self._reader.remember_answer(text, decoded.token_ids, request.namespace.salt)
        if row.answers:
            live = len(request.prompt) - result.cached_tokens
            self._manager.count_request(
                reused=result.cached_tokens,
                total=len(request.prompt),
                reason=row.plan.reason if row.by_itself is None else row.by_itself.reason,
                prefill_seconds=live * self._pace.token_s if self._pace.token_s else None,
            )
        self._drop(row)

    def _store_prompt(self, row: Row) -> None:
        """Keep what is new of a row's prompt, piece by piece, so that no step has much to store."""
        filled = min(_filled(row), row.limit)
        chunk = self._manager.chunk_size
        if filled - row.stored >= chunk:
            row.stored = filled
            self._keep(row, row.request.token_ids[: filled - filled % chunk], row.node.segment)

    def _store(self, row: Row, new_ids: list[int]) -> StoreReport:
        if row.started:
            row.lane.before = row.segments
            ids = np.concatenate([row.request.token_ids, np.asarray(new_ids, dtype=np.int64)])[:-1]
            if row.lane.end != len(ids):
                return self._writer.refuse(LENGTH_REASON)
            report = self._keep(row, ids, row.lane)
        else:
            report = self._keep(row, row.request.token_ids[: _filled(row)], row.node.segment)
        self._loader.save_soon()
        return report

    def _keep(self, row: Row, token_ids: np.ndarray, last: Segment) -> StoreReport:
        if not len(token_ids):
            return StoreReport()
        self._loader.make_way(len(token_ids) - row.plan.prefix_end)
        return self._writer.keep_from(token_ids, partial(last.between, self._arena), row.request.namespace)

    def _drop(self, row: Row) -> None:
        """Let go of a row, and free its place."""
        self._order.remove(row)
        if row.by_itself is None:
            self._free_place(row)

    def _free_place(self, row: Row) -> None:
        """Free a row's place; the last lane takes it over, so that lanes stay neighbours."""
        for segment in row.moved_on:
            self.radix_tree.pool.give(segment.start, segment.start + segment.capacity)
        self.radix_tree.leave(row.node)
        at, last = self._rows.index(row), self._rows.pop()
        if last is not row:
            self._rows[at] = last
            self._arena.move(last.lane.start, at * LANE_TOKENS, last.lane.length)
            self._arena.clear(at * LANE_TOKENS + last.lane.length, (at + 1) * LANE_TOKENS)
            last.lane.start = at * LANE_TOKENS

    def fail_all(self, error: Exception) -> None:
        """Tell all requests that there is no answer, and begin anew."""
        self.counts.failed_steps += 1
        rows = self.rows
        self._rows, self._order = [], []
        lanes = self.max_sequences * LANE_TOKENS
        self.radix_tree = RadixTree(SlotPool(lanes, lanes + self._prompt_tokens))
        for row in rows:
            row.listener.failed(error)
        self._arena.clear(0, lanes)  # last, since it may fail too: the device may be gone

    def clear(self) -> None:
        """Forget the text that lies in the arena; requests in the loop are not disturbed."""
        self.radix_tree.clear()


def _growth(request: Request, answers: bool) -> int:
    """Slots beyond its lane that an answer may need."""
    if not answers:
        return 0
    return (request.options.max_new_tokens + LANE_TOKENS // _PULLED_SHARE) // LANE_TOKENS * LANE_TOKENS


def _path(segment: Segment) -> tuple[int, ...]:
    """Sorted by it, who shares something are neighbours, and a segment comes before those behind it."""
    return tuple(each.start for each in segment.before)


def _unfilled(row: Row, node: Node) -> tuple[int, int]:
    """How many tokens a node needs, its row's next one, and how many the row needs in all."""
    return node.segment.capacity - node.segment.length, row.limit - node.segment.end


class _Need(NamedTuple):
    """Tokens that a node needs, and that its row needs in all."""

    now: int
    in_all: int
    tenant: str = ""


def _shares(block: int, needs: Sequence[_Need]) -> list[int]:
    """How many of `block` tokens go to each of `needs`, which come in the order of arrival."""
    shares = [0] * len(needs)
    if needs:
        others = sum(each.now for each in needs[1:])
        shares[0] = min(needs[0].now, max(block - others, (block + 1) // 2))
    left = block - sum(shares)
    for index in _in_turns(needs[1:]):
        shares[index + 1] = min(needs[index + 1].now, left)
        left -= shares[index + 1]
    return shares


def _in_turns(needs: Sequence[_Need]) -> list[int]:
    """Indices: the shortest of every tenant, then the second of every tenant, and so on."""
    places: dict[int, int] = {}
    seen: Counter[str] = Counter()
    shortest_first = sorted(range(len(needs)), key=lambda index: needs[index].in_all)
    for index in shortest_first:
        places[index] = seen[needs[index].tenant]
        seen[needs[index].tenant] += 1
    return sorted(shortest_first, key=places.__getitem__)


def _filled(row: Row) -> int:
    """How many of a row's first prompt tokens have their KV in the arena."""
    node = row.unfilled
    return node.segment.end if node is not None else row.node.end


class _Nobody:
    def token(self, token_id: int) -> None:
        """Nobody listens."""

    def done(self, result: GenerationResult) -> None:
        """Nobody listens."""

    def failed(self, error: Exception) -> None:
        """Nobody listens."""


_NOBODY = _Nobody()
